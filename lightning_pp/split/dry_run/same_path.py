"""Whether a step takes the path of a record: it is rehearsed until that is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import is_not
from typing import Any

from torch import Tensor, nn

from lightning_pp.split.dry_run.rehearsal import Compared, Rehearsed, rehearse
from lightning_pp.split.fakes.parameters import FakeParameters, is_fake
from lightning_pp.split.record.reduction import Place, Reduction
from lightning_pp.split.record.source_lines import innermost_user_line
from lightning_pp.split.record.sources import storage_of
from lightning_pp.split.record.step_record import (
    OF_OPERATION,
    Operation,
    OperationPlace,
    StepRecord,
    UnitCall,
    Value,
    spec_of,
)
from lightning_pp.split.reductions.recording import EarlierRun, ReductionRecorder
from lightning_pp.split.side_effects.module_state import StateAroundUnits
from lightning_pp.split.unit_calls.call_arguments import fingerprint_of, numbers_of, shapes_of
from lightning_pp.split.unit_calls.interception import UnitCalls
from lightning_pp.split.unit_calls.looks import StepWatch
from lightning_pp.split.unit_calls.operations import NoteFunction, OperationCalls
from lightning_pp.split.unit_calls.unit_sizes import UnitSizes, can_be_resized, leaves_plain


class PathComparison:
    """Compares the paths of steps with recorded ones."""

    def __init__(self, module: nn.Module, units: Mapping[str, nn.Module], fake_parameters: FakeParameters) -> None:
        self._units = units
        self._fake_parameters = fake_parameters
        self._unit_calls = UnitCalls(units)
        self.unit_sizes = UnitSizes(units, fake_parameters)
        self._state = StateAroundUnits(module, units)
        self._of_made_up_values: set[tuple[type, str]] = set()

    def followed(
        self,
        record: StepRecord,
        step: Callable[[], Any],
        seed_inter_unit: Callable[[int], None],
        crossing: Collection[int] = (),
        *,
        with_gradients: bool = False,
        is_alike: bool = False,
        earlier: EarlierRun | None = None,
    ) -> StepRecord | None:
        """Rehearses ``step`` and returns whether it takes the path of ``record``.

        Args:
            record: The record.
            step: Runs the user's step on one microbatch.
            seed_inter_unit: As for :func:`rehearse`.
            crossing: Numbers of operations between units, which the step must run as well.
            with_gradients: Whether gradients must flow as in ``record`` as well.
            is_alike: Whether the batch may be of other sizes and plain numbers than that of ``record``.
            earlier: To have the reductions of this step in what is returned: as of :class:`ReductionRecorder`.

        Returns:
            ``record``, or what it is with the sizes of this step; None if the step takes another path.

        Raises:
            Exception: What the step raised, if it does not do so again: no made-up value caused that.
        """
        compared = partial(self._compared, step, seed_inter_unit, with_gradients, earlier)
        path = partial(_Path, record, self.unit_sizes, self._unit_calls.regions.note_function, crossing, is_alike)
        found, failure = compared(path())
        if failure is not None and _kind_of(failure) not in self._of_made_up_values:
            _, again = compared(path())
            if again is None or _kind_of(again) != _kind_of(failure):
                raise failure
            self._of_made_up_values.add(_kind_of(failure))
        return found

    def _compared(
        self,
        step: Callable[[], Any],
        seed_inter_unit: Callable[[int], None],
        with_gradients: bool,
        earlier: EarlierRun | None,
        path: _Path,
    ) -> tuple[StepRecord | None, Exception | None]:
        """:meth:`followed`, and what the step raised."""
        record, recorder = path.record, ReductionRecorder(is_fake, is_fake, earlier)
        with ExitStack() as stack:
            # the code between units may use and write into parameters, also those that this rank has not
            uses_parameters = bool(record.updates or record.parameters_used_outside())
            stack.enter_context(self.unit_sizes.in_rehearsal(from_start=uses_parameters))
            stack.enter_context(recorder)
            stack.enter_context(path.watch)
            matches, failure = rehearse(
                record,
                self._units,
                step,
                self._fake_parameters.device,
                seed_inter_unit,
                unit_calls=self._unit_calls,
                preserving=self._state.preserved(path.note_changes),
                compared=Compared(path.stand_in, path.watch.note_look, path.operations, with_gradients),
            )
        matches &= path.operations.have_run(record, path.crossing) and path.can_be_resized(failure)
        matches &= path.changed <= set(record.mutated_attributes)
        if failure is None:  # else what the end of the step makes of made-up values says nothing
            matches &= places_of(recorder.reductions) == places_of(record.reductions)
            # a step that begins to look at values needs a plan that says so
            matches &= record.depends_on_batch_values or path.watch.num_looks == record.num_looks
        if earlier is None:
            return path.found() if matches else None, failure
        # a dry run follows values, a rehearsal knows what is fake: all is well where both say the same
        matches &= failure is None and _dependences(recorder.reductions) == _dependences(record.reductions)
        is_dynamic = record.has_dynamic_shapes or recorder.makes_integers
        found = replace(path.found(), reductions=recorder.reductions, has_dynamic_shapes=is_dynamic)
        return found if matches else None, failure


class _Path:
    """One rehearsal beside a record: which sizes differ, and whether all else is the same."""

    def __init__(
        self,
        record: StepRecord,
        unit_sizes: UnitSizes,
        note_function: NoteFunction,
        crossing: Collection[int],
        is_alike: bool,
    ) -> None:
        self.record = record
        self._unit_sizes = unit_sizes
        self.crossing = crossing
        self._is_alike = is_alike
        self._calls: list[UnitCall] = []
        self._operations: dict[int, Operation] = {}
        self.changed: set[tuple[str, str]] = set()
        self._is_other = False
        self.watch = StepWatch(lambda: len(self._calls))
        self.operations = OperationCalls(
            record.operation_numbers.get, self._on_operation, note_function, self._on_other
        )

    def stand_in(
        self, call: UnitCall, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> UnitCall | None:
        """The record to use for a call: the recorded one, or it with other sizes; None if it is another call."""
        is_same = shapes_of(args, kwargs) == call.shapes
        is_same &= call.looks_at is None or fingerprint_of(args, kwargs) == call.looks_at
        if is_same and (not self._is_alike or numbers_of(args, kwargs) == call.numbers):
            found: UnitCall | None = call
        elif not leaves_plain(call):
            return None
        else:
            found = self._unit_sizes.resized(call, self.record.compute_dtype, self.watch, original, args, kwargs)
        if found is not None:
            self._calls.append(found)
        return found

    def note_changes(self, changed: Collection[tuple[str, str, Any]]) -> None:
        """What code outside units has changed on modules, at the end."""
        self.changed = {(name, attribute) for name, attribute, _ in changed}

    def can_be_resized(self, failure: Exception | None) -> bool:
        """Whether nothing but sizes differs, where any does."""
        record = self.record
        if not self._is_resized:
            return True
        num_calls = len(record.calls)
        counted = {place: number for place, number in self.operations.counts.items() if place.num_calls < num_calls}
        of_record = {place: number for place, number in record.num_alike.items() if place.num_calls < num_calls}
        return (
            can_be_resized(record)
            and not self._is_other
            and counted == of_record
            and (failure is None or record.outputs_cross_alone)
            and self.watch.draws == record.inter_unit_draws.after
        )

    @property
    def _is_resized(self) -> bool:
        is_other = any(map(is_not, self._calls, self.record.calls))
        return is_other or any(operation is not self.record.operations[n] for n, operation in self._operations.items())

    def found(self) -> StepRecord:
        """The record with the sizes of this step."""
        record = self.record
        if not self._is_resized:
            return record
        flops = self.watch.flops
        calls = [
            replace(call, reads=replace(call.reads, flops=flops.get(call.index, 0))) if call.reads.flops else call
            for call in self._calls
        ]
        tail = replace(record.tail, flops=flops.get(len(calls), 0))
        operations = {**record.operations, **self._operations}
        return replace(record, calls=calls, tail=tail, operations=operations, is_resized=True)

    def _on_operation(self, number: int, place: OperationPlace, given: list[Tensor], result: Tensor) -> Tensor:
        operation = self.record.operations.get(number)
        if operation is not None and spec_of(result) != operation.result.spec:
            is_whole = result.is_contiguous() and storage_of(result) not in map(storage_of, given)
            self._is_other |= not (is_whole and result.dtype == self.record.spec(Value(OF_OPERATION, number)).dtype)
            self._operations[number] = replace(operation, result=replace(operation.result, spec=spec_of(result)))
        return result

    def _on_other(self, place: OperationPlace) -> None:
        """An operation on values that the record has not; at the end of a step its values must be known there."""
        num_calls = len(self.record.calls)
        if self._is_alike and place.num_calls < num_calls:
            raise Rehearsed
        read = {value for value in place.given if value is not None}
        of_tail = (other.given for other in self.record.num_alike if other.num_calls == num_calls)
        self._is_other |= place.num_calls < num_calls or not read <= set().union(*of_tail)


def _kind_of(failure: Exception) -> tuple[type, str]:
    return type(failure), innermost_user_line(failure)


def _dependences(reductions: Sequence[Reduction]) -> list[tuple[bool, tuple[bool, ...]]]:
    return [(reduction.depends_on_weights, reduction.of_samples) for reduction in reductions]


def places_of(reductions: Sequence[Reduction]) -> list[Place]:
    """Where they are."""
    return [reduction.place for reduction in reductions]
