"""Runs only the code between units, on fakes for the outputs of units: fast, and without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pp.split.data.tree import tensors_of
from lightning_pp.split.dry_run.gradient_flow import values_reached
from lightning_pp.split.fakes.fake_mode import MadeUpData
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.head.deferred_logits import WholeHeadError, deferred
from lightning_pp.split.head.parts import parts_in
from lightning_pp.split.record.step_record import StepRecord, UnitCall, Value
from lightning_pp.split.reductions.recording import pass_on_selected
from lightning_pp.split.side_effects.carried import FakeSideEffects
from lightning_pp.split.side_effects.generators import generators_untouched
from lightning_pp.split.unit_calls.interception import UnitCalls, with_passed_on
from lightning_pp.split.unit_calls.operations import OperationCalls
from lightning_pp.split.unit_calls.python_reads import PythonReads

StandIn = Callable[[UnitCall, Callable[..., Any], tuple[Any, ...], "dict[str, Any]"], "UnitCall | None"]
"""The call that says what the unit returns for these arguments, the recorded one or another; None: it is no such call.
The second runs the unit."""


@dataclass(frozen=True)
class Compared:
    """How a rehearsal is compared with a record.

    Attributes:
        stand_in: Is asked about each call of a unit that the record has in the same place.
        on_look: Called with tensors with data that Python reads as a whole.
        operations: Follows the operations between units.
        with_gradients: Whether gradients have to flow as in the record, to each call and from the loss.
    """

    stand_in: StandIn = lambda call, *_: call
    on_look: Callable[[torch.Tensor], None] = lambda _: None
    operations: OperationCalls | None = None
    with_gradients: bool = False


class Rehearsed(BaseException):
    """Ends the user's step."""


def rehearse(
    record: StepRecord,
    units: Mapping[str, nn.Module],
    step: Callable[[], Any],
    device: torch.device,
    seed_inter_unit: Callable[[int], None],
    *,
    unit_calls: UnitCalls | None = None,
    preserving: AbstractContextManager[Any] | None = None,
    compared: Compared | None = None,
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
        compared: How closely the step has to follow ``record``; None: in the order of its units alone.

    Returns:
        Whether the step called the units of ``record`` as it says, and what it raised, which may be due to made-up
        values.
    """
    compared = compared or Compared()
    gradients = _Gradients(record) if compared.with_gradients else None
    stand_ins = _StandIns(record, units, seed_inter_unit, compared, gradients)
    failure: Exception | None = None
    with ExitStack() as stack:
        stack.enter_context(generators_untouched(device))
        stack.enter_context(preserving or nullcontext())
        stack.callback(stand_ins.side_effects.undo)
        stack.enter_context(_values_made_up(record, compared.on_look))
        stack.enter_context((unit_calls or UnitCalls(units)).handled_by(stand_ins.on_call))
        stack.enter_context(torch.set_grad_enabled(compared.with_gradients))
        stack.enter_context(compared.operations or nullcontext())
        if -1 in record.inter_unit_draws.after:
            seed_inter_unit(-1)
        try:
            result = step()
            if gradients is not None and not gradients.are_recorded_from(result):
                stand_ins.went_elsewhere = True
        except Rehearsed:
            pass
        except WholeHeadError:
            stand_ins.went_elsewhere = True
        except Exception as error:
            failure = error
    return not stand_ins.went_elsewhere and stand_ins.num_calls == len(record.calls), failure


class _Gradients:
    """Follows the values from which gradients would come, in a rehearsal of the step of ``record``."""

    def __init__(self, record: StepRecord) -> None:
        self._record = record
        self._markers: dict[Value, Any] = {}

    def marked(self, call: UnitCall, value: Value, fake: Any) -> Any:
        """``fake`` with an autograd node of its own, where the unit returns a tensor that requires a gradient."""
        leaf = call.leaf(value.leaf)
        if leaf.spec is None or not leaf.requires_grad or not torch.is_grad_enabled():
            return fake
        marked = fake.detach().requires_grad_().clone()
        self._markers[value] = marked.grad_fn
        return marked

    def are_recorded_to(self, call: UnitCall, args: Any, kwargs: Any) -> bool:
        """Whether autograd is on as it was, and the arguments of ``call`` depend on the values as they did."""
        is_on = torch.is_grad_enabled() == call.tracks_gradients
        return is_on and values_reached((args, kwargs), self._markers) == call.differentiated

    def are_recorded_from(self, result: Any) -> bool:
        """Whether the loss depends on the values that it depended on."""
        recorded = self._record.gradient_sources.get(None)
        if self._record.outputs_cross_alone:  # its end was not recorded
            return True
        loss = result.get("loss") if isinstance(result, Mapping) else result
        return values_reached(loss, self._markers) == (recorded or frozenset())


class _StandIns:
    """Returns and leaves behind what units do by ``record``; the arguments are those of :func:`rehearse`."""

    def __init__(
        self,
        record: StepRecord,
        units: Mapping[str, nn.Module],
        seed_inter_unit: Callable[[int], None],
        compared: Compared,
        gradients: _Gradients | None,
    ) -> None:
        self._record = record
        self._units = units
        self._seed_inter_unit = seed_inter_unit
        self._stand_in = compared.stand_in
        self._operations = compared.operations
        self._gradients = gradients
        self.side_effects = FakeSideEffects(with_made_up=True)
        self.num_calls = 0
        self.went_elsewhere = False

    def on_call(self, unit: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the next call of the record returns; raises :class:`Rehearsed` if this is another."""
        record = self._record
        if unit == record.split_head:
            logits = deferred(parts_in(self._units)[unit], args, kwargs)
            pass_on_selected(tensors_of((args, kwargs)), logits)
            return logits
        call = record.calls[self.num_calls] if self.num_calls < len(record.calls) else None
        if call is not None:
            call = self._stand_in(call, original, args, kwargs) if call.unit == unit else None
        if call is None:
            self.went_elsewhere = True
            raise Rehearsed
        gradients = self._gradients
        if gradients is not None and not gradients.are_recorded_to(call, args, kwargs):
            self.went_elsewhere = True
            raise Rehearsed
        self.num_calls += 1
        left: dict[Value, Any] = {}

        def fake_of(value: Value) -> Any:
            if value not in left:
                fake = call.leaf(value.leaf).for_one_step()
                left[value] = fake if gradients is None else gradients.marked(call, value, fake)
            return left[value]

        for place, leaf in enumerate(call.leaves):
            if gradients is not None and leaf.spec is not None:
                fake_of(Value(call.index, place))
        self.side_effects.leave(call, self._units[unit], args, kwargs, fake_of)
        output = call.output_of(left, with_made_up=True)
        if call.output is not None:  # the unit may have run, to find out about sizes
            output = with_passed_on(output, args, kwargs)
        if call.index in record.inter_unit_draws.after:
            self._seed_inter_unit(call.index)
        if self._operations is not None:
            self._operations.note_call(call, output)
        pass_on_selected(tensors_of((args, kwargs)), output)
        return output


@contextmanager
def _values_made_up(record: StepRecord, on_look: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """In the block, code may read values of fakes (``.item()``, ``.numpy()``) and their memory, and sees something."""
    mode = next((leaf.fake.fake_mode for call in record.calls for leaf in call.leaves if leaf.spec), None)
    real = MadeUpData().real
    read = PythonReads(is_fake, real, lambda fake: int(real(fake).data_ptr()), on_look)
    with read, nullcontext() if mode is None else mode.making_up():
        yield
