"""Running only the code between units, on fakes for what units return: quick, and with no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_pp.split.dry_run.python_reads import PythonReads
from lightning_pp.split.fakes.fake_mode import MadeUp
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.record.step_record import StepRecord, Value
from lightning_pp.split.side_effects.carried import FakeSideEffects
from lightning_pp.split.side_effects.module_state import preserved_random_state, preserved_state
from lightning_pp.split.unit_calls.given import is_like
from lightning_pp.split.unit_calls.interception import UnitCalls


class Rehearsed(BaseException):
    """Leaves the user's step."""


def rehearse(
    record: StepRecord,
    units: Mapping[str, nn.Module],
    step: Callable[[], Any],
    module: nn.Module,
    device: torch.device,
    seed_inter_unit: Callable[[int], None],
    *,
    compares_arguments: bool = False,
) -> tuple[bool, Exception | None]:
    """Runs ``step`` with every unit standing in, until its end or until it calls a unit otherwise than ``record`` says.

    The module and the generators are as before afterwards.

    Args:
        record: What the units return and leave behind.
        units: Names and modules of the units.
        step: Runs the user's step on one microbatch; it may raise :class:`Rehearsed` to end it.
        module: The whole model.
        device: Where the step computes.
        seed_inter_unit: Given the index of a call (-1: the step's start), seeds the generators for the code after it.
        compares_arguments: Whether a call with other arguments than ``record`` says is another call.

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
        call = record.calls[num_calls] if num_calls < len(record.calls) else None
        if call is None or call.unit != unit or (compares_arguments and not is_like(call, args, kwargs)):
            went_elsewhere = True
            raise Rehearsed
        num_calls += 1
        left: dict[Value, Any] = {}
        side_effects.leave(
            call,
            units[unit],
            args,
            kwargs,
            lambda value: left.setdefault(value, call.leaf(value.leaf).for_one_step()),
        )
        output = call.output_of(left, with_made_up=True)
        if call.index in record.inter_unit_draws.after:
            seed_inter_unit(call.index)
        return output

    with ExitStack() as stack:
        stack.enter_context(preserved_random_state(device))
        if compares_arguments or record.mutated_attributes:
            stack.enter_context(preserved_state(module))
        stack.callback(side_effects.undo)
        stack.enter_context(_values_made_up(record))
        stack.enter_context(UnitCalls(units).handled_by(fake))
        stack.enter_context(torch.no_grad())
        if -1 in record.inter_unit_draws.after:
            seed_inter_unit(-1)
        try:
            step()
        except Rehearsed:
            pass
        except Exception as error:
            failure = error
    return not went_elsewhere and num_calls == len(record.calls), failure


@contextmanager
def _values_made_up(record: StepRecord) -> Iterator[None]:
    """Within, code may read values of fakes (``.item()``, ``.numpy()``) and sees something."""
    mode = next((leaf.fake.fake_mode for call in record.calls for leaf in call.leaves if leaf.spec), None)
    fill = MadeUp()
    read = PythonReads(is_fake, lambda fake: fill(fake.shape, dtype=fake.dtype, device=fake.device))
    with read, nullcontext() if mode is None else mode.making_up():
        yield
