"""Running only the code between units, on fakes for what units return: quick, and with no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_pp.split.dry_run.python_reads import PythonReads
from lightning_pp.split.fakes.fake_mode import MadeUp
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.head.deferred_logits import WholeHeadError, deferred
from lightning_pp.split.head.parts import parts_in
from lightning_pp.split.record.step_record import StepRecord, UnitCall, Value
from lightning_pp.split.side_effects.carried import FakeSideEffects
from lightning_pp.split.side_effects.generators import generators_untouched
from lightning_pp.split.unit_calls.interception import UnitCalls
from lightning_pp.split.unit_calls.operations import OperationCalls

IsSameCall = Callable[[UnitCall, Callable[..., Any], tuple[Any, ...], "dict[str, Any]"], bool]
"""Whether a recorded call gives the same when it is run with these arguments; the second is what runs it."""


class Rehearsed(BaseException):
    """Leaves the user's step."""


def rehearse(
    record: StepRecord,
    units: Mapping[str, nn.Module],
    step: Callable[[], Any],
    device: torch.device,
    seed_inter_unit: Callable[[int], None],
    *,
    unit_calls: UnitCalls | None = None,
    preserving: AbstractContextManager[Any] | None = None,
    is_same_call: IsSameCall = lambda *_: True,
    on_look: Callable[[torch.Tensor], None] = lambda _: None,
    operations: OperationCalls | None = None,
) -> tuple[bool, Exception | None]:
    """Runs ``step`` with every unit standing in, until its end or until it calls a unit otherwise than ``record`` says.

    The generators are as before afterwards, and what units leave behind is taken back.

    Args:
        record: What the units return and leave behind.
        units: Names and modules of the units.
        step: Runs the user's step on one microbatch; it may raise :class:`Rehearsed` to end it.
        device: Where the step computes.
        seed_inter_unit: Given the index of a call (-1: the step's start), seeds the generators for the code after it.
        unit_calls: Intercepts the units' calls; kept by who rehearses often.
        preserving: A context that keeps the module's state, if the step may change it.
        is_same_call: Is asked about each call of a unit that ``record`` has in the same place.
        on_look: Is told of tensors with data that Python reads as a whole.
        operations: Follows the operations between units.

    Returns:
        Whether the step called the units of ``record`` as it says, and what it raised, which may be due to made-up
        values.
    """
    side_effects = FakeSideEffects(with_made_up=True)
    num_calls = 0
    went_elsewhere = False
    failure: Exception | None = None

    def fake(unit: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal num_calls, went_elsewhere
        if unit == record.split_head:
            return deferred(parts_in(units)[unit], args, kwargs)
        call = record.calls[num_calls] if num_calls < len(record.calls) else None
        if call is None or call.unit != unit or not is_same_call(call, original, args, kwargs):
            went_elsewhere = True
            raise Rehearsed
        num_calls += 1
        left: dict[Value, Any] = {}

        def fake_of(value: Value) -> Any:
            return left.setdefault(value, call.leaf(value.leaf).for_one_step())

        side_effects.leave(call, units[unit], args, kwargs, fake_of)
        output = call.output_of(left, with_made_up=True)
        if call.index in record.inter_unit_draws.after:
            seed_inter_unit(call.index)
        if operations is not None:
            operations.note_call(call, output)
        return output

    with ExitStack() as stack:
        stack.enter_context(generators_untouched(device))
        stack.enter_context(preserving or nullcontext())
        stack.callback(side_effects.undo)
        stack.enter_context(_values_made_up(record, on_look))
        stack.enter_context((unit_calls or UnitCalls(units)).handled_by(fake))
        stack.enter_context(torch.no_grad())
        stack.enter_context(operations or nullcontext())
        if -1 in record.inter_unit_draws.after:
            seed_inter_unit(-1)
        try:
            step()
        except Rehearsed:
            pass
        except WholeHeadError:
            went_elsewhere = True
        except Exception as error:
            failure = error
    return not went_elsewhere and num_calls == len(record.calls), failure


@contextmanager
def _values_made_up(record: StepRecord, on_look: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within, code may read values of fakes (``.item()``, ``.numpy()``) and sees something."""
    mode = next((leaf.fake.fake_mode for call in record.calls for leaf in call.leaves if leaf.spec), None)
    fill = MadeUp()
    read = PythonReads(is_fake, lambda fake: fill(fake.shape, dtype=fake.dtype, device=fake.device), on_look)
    with read, nullcontext() if mode is None else mode.making_up():
        yield
