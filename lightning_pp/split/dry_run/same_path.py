"""Whether a step takes the path of a record: it is rehearsed, as far as that is needed to know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_pp.split.data.tree import leaves_of
from lightning_pp.split.dry_run.looks import LooksWatched
from lightning_pp.split.dry_run.rehearsal import Compared, rehearse
from lightning_pp.split.fakes.parameters import FakeParameters, is_fake
from lightning_pp.split.record.reduction import Place, Reduction
from lightning_pp.split.record.source_lines import innermost_user_line
from lightning_pp.split.record.step_record import OperationPlace, PassedOn, StepRecord, UnitCall, spec_of
from lightning_pp.split.record.unknown_numbers import UnknownNumber
from lightning_pp.split.reductions.recording import ReductionRecorder
from lightning_pp.split.side_effects.module_state import RehearsedState, preserved_state
from lightning_pp.split.unit_calls.call_arguments import fingerprint_of, shapes_of
from lightning_pp.split.unit_calls.compute_dtype import cast_activations
from lightning_pp.split.unit_calls.interception import UnitCalls
from lightning_pp.split.unit_calls.operations import OperationCalls


class PathComparison:
    """Compares the paths of steps with recorded ones.

    Args:
        module: The whole model.
        units: Its units.
        fake_parameters: Makes fakes.
    """

    def __init__(self, module: nn.Module, units: Mapping[str, nn.Module], fake_parameters: FakeParameters) -> None:
        self._units = units
        self._fake_parameters = fake_parameters
        self._unit_calls = UnitCalls(units)
        self._state = RehearsedState(module, units)
        self._of_made_up_values: set[tuple[type, str]] = set()

    def is_same(
        self,
        record: StepRecord,
        step: Callable[[], Any],
        seed_inter_unit: Callable[[int], None],
        crossing: Collection[int] = (),
        *,
        with_gradients: bool = False,
    ) -> bool:
        """Rehearses ``step`` and tells whether it takes the path of ``record``.

        Args:
            record: The record.
            step: Runs the user's step on one microbatch.
            seed_inter_unit: As for :func:`rehearse`.
            crossing: Numbers of operations between units, which the step must run as well.
            with_gradients: Whether gradients must flow as in ``record`` as well.

        Raises:
            Exception: What the step raised, if it does not do so again: no made-up value caused that.
        """
        compared = partial(self._compared, record, step, seed_inter_unit, crossing, with_gradients)
        is_same, failure = compared()
        if failure is not None and _kind_of(failure) not in self._of_made_up_values:
            _, again = compared()
            if again is None or _kind_of(again) != _kind_of(failure):
                raise failure
            self._of_made_up_values.add(_kind_of(failure))
        return is_same

    def _compared(
        self,
        record: StepRecord,
        step: Callable[[], Any],
        seed_inter_unit: Callable[[int], None],
        crossing: Collection[int],
        with_gradients: bool,
    ) -> tuple[bool, Exception | None]:
        """:meth:`is_same`, and what the step raised."""

        def is_same_call(
            call: UnitCall, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> bool:
            return self._gives_the_same(call, record, original, args, kwargs)

        operations, others = None, set[int]()
        num_looks = 0

        def on_look(*_: Any) -> None:
            nonlocal num_looks
            num_looks += 1

        if crossing:
            operations = self._followed(record, crossing, others)
        recorder = ReductionRecorder(is_fake, is_fake)
        with ExitStack() as stack:
            if record.updates:  # the code between units writes into parameters
                stack.enter_context(self._fake_parameters.all_fake(_unmarked))
            stack.enter_context(recorder)
            if not record.depends_on_batch_values:
                stack.enter_context(LooksWatched(on_look))
            matches, failure = rehearse(
                record,
                self._units,
                step,
                self._fake_parameters.device,
                seed_inter_unit,
                unit_calls=self._unit_calls,
                preserving=self._state.preserved(),
                compared=Compared(is_same_call, on_look, operations, with_gradients),
            )
        if operations is not None:
            matches &= not others and operations.have_come(record, crossing)
        if failure is None:  # else what the end of the step makes of made-up values says nothing
            matches &= places_of(recorder.reductions) == places_of(record.reductions)
            # a step that begins to look at values needs a plan that says so
            matches &= record.depends_on_batch_values or num_looks == record.num_looks
        return matches, failure

    def _followed(self, record: StepRecord, crossing: Collection[int], others: set[int]) -> OperationCalls:
        """Follows the operations between units; ``others`` gets those of ``crossing`` that give another shape."""

        def on_operation(number: int, place: OperationPlace, given: list[Tensor], result: Tensor) -> Tensor:
            if number in crossing and spec_of(result) != record.operations[number].result.spec:
                others.add(number)
            return result

        return OperationCalls(record.operation_numbers.get, on_operation, self._unit_calls.note_function)

    def _gives_the_same(
        self,
        call: UnitCall,
        record: StepRecord,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Whether the unit, called with ``args`` and ``kwargs``, gives what ``call`` has recorded."""
        if shapes_of(args, kwargs) != call.shapes:
            return False
        if call.looks_at is None or fingerprint_of(args, kwargs) == call.looks_at:
            return True
        if call.side_effects:
            return False
        args, kwargs = cast_activations(call, args, kwargs, record.compute_dtype)
        fakes = self._fake_parameters
        try:
            with (
                preserved_state(self._units[call.unit]),
                nullcontext() if record.updates else fakes.all_fake(_unmarked),
                fakes.computing(call.unit, _unmarked),
            ):
                return _is_recorded(call, original(*args, **kwargs), leaves_of((args, kwargs)))
        except Exception:  # it may need data; a dry run knows what to do then
            return False


def _kind_of(failure: Exception) -> tuple[type, str]:
    return type(failure), innermost_user_line(failure)


def _unmarked(fake: nn.Parameter, name: str) -> None:
    """Nobody follows the fakes of a rehearsal."""


def _is_recorded(call: UnitCall, output: Any, given: Sequence[Any]) -> bool:
    """Whether ``output``, made of ``given``, is like that of ``call``."""
    leaves = leaves_of(output)
    return len(leaves) == len(call.leaves) and all(
        _is_recorded_leaf(leaf, recorded.fake, recorded.spec, given)
        for leaf, recorded in zip(leaves, call.leaves, strict=True)
    )


def _is_recorded_leaf(leaf: Any, recorded: Any, spec: Any, given: Sequence[Any]) -> bool:
    if isinstance(recorded, PassedOn):
        return leaf is given[recorded.position]
    if spec is not None or isinstance(leaf, Tensor):
        return spec is not None and isinstance(leaf, Tensor) and spec_of(leaf) == spec
    return isinstance(recorded, UnknownNumber) or (type(leaf) is type(recorded) and bool(leaf == recorded))


def places_of(reductions: Sequence[Reduction]) -> list[Place]:
    """Where they are."""
    return [reduction.place for reduction in reductions]
