"""Equal units: in a second dry run only the first of each kind runs, and its results stand for the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

from torch import nn

from lightning_pp.errors import SplitError
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.split.head.parts import HeadPart
from lightning_pp.split.record.step_record import HeldMemory, StepRecord, UnitCall, Value
from lightning_pp.split.record.unknown_numbers import PLAIN
from lightning_pp.split.unit_calls.interception import StandingBy

Step = Callable[[DryRun], Any]
Again = Callable[[Callable[[Step], Step], FakeParameters], StepRecord]
"""Records a step, given what to make of it and its fakes."""


class AlikeUnits:
    """The calls of a recorded step, and which of them do the same with other tensors of the same shapes.

    Args:
        record: The step.
        units: All units of the model.
        names: Their parameters, by name.

    Attributes:
        first: For each call the index of the first one like it, or its own.
        run: The dry run in progress, or the last one.
    """

    def __init__(self, record: StepRecord, units: Mapping[str, nn.Module], names: Mapping[str, nn.Parameter]) -> None:
        self._record, self._units = record, units
        self.run: DryRun | None = None
        owners = Counter(memory for call in record.calls for memory in {*call.memory.saved, *call.memory.queued})
        num_calls = Counter(call.unit for call in record.calls)
        changed = tuple(f"{name}." for name, _ in record.mutated_attributes)
        seen: dict[Hashable, int] = {}
        self.first: list[int] = []
        for call in record.calls:
            is_plain = num_calls[call.unit] == 1 and _is_plain(call, units[call.unit], owners)
            is_plain &= not any(name.startswith(f"{call.unit}.") for name in changed)
            self.first.append(
                seen.setdefault(kind_of(call, units[call.unit], names) if is_plain else call.index, call.index)
            )

    def recorded(self, again: Again, fakes: FakeParameters) -> StepRecord:
        """The step once more, in which units that stand by return tensors of the right shapes at once.

        Raises:
            SplitError: It calls other units, or gives them other tensors.
        """

        def noted(step: Step) -> Step:
            def run_step(run: DryRun) -> Any:
                self.run = run
                return step(run)

            return run_step

        with self._standing_by(fakes):
            found = again(noted, fakes)
        if [call.unit for call in found.calls] != [call.unit for call in self._record.calls]:
            raise SplitError("The step calls other units than in its first recording.")
        for call, ours in zip(self._record.calls, found.calls, strict=True):
            if len(ours.given) != len(call.given) or len(ours.leaves) != len(call.leaves):
                raise SplitError(f"The unit {call.unit!r} is given other tensors than in the first recording.")
        return found

    @contextmanager
    def _standing_by(self, fakes: FakeParameters) -> Iterator[None]:
        held: list[tuple[dict[str, Any], Any]] = []

        def stand_in(call: UnitCall, like: int, *_: Any, **__: Any) -> Any:
            assert self.run is not None, "a unit is called within a step"
            leaves = enumerate(self.run.record.calls[like].leaves)
            specs = {Value(call.index, place): (leaf.spec, leaf.requires_grad) for place, leaf in leaves}
            made = {value: fakes.fake(spec).requires_grad_(grad) for value, (spec, grad) in specs.items() if spec}
            return call.output_of(made)

        try:
            for call, like in zip(self._record.calls, self.first, strict=True):
                if like != call.index:
                    attributes = vars(self._units[call.unit])
                    held.append((attributes, attributes.get("forward")))
                    attributes["forward"] = StandingBy(stand_in, call, like)
            yield
        finally:
            for attributes, forward in held:
                attributes.pop("forward", None)
                if forward is not None:
                    attributes["forward"] = forward

    def filled(self, record: StepRecord, ran: StepRecord) -> StepRecord:
        """``record`` with what each call costs and keeps in ``ran``, by the call that it is like."""
        fresh, calls = count(1 << 40), []  # above the numbers of all memories in the record
        for call, like in zip(record.calls, self.first, strict=True):
            part = ran.calls[like]
            number_of = defaultdict[int, int](lambda: next(fresh))
            number_of.update(zip(part.given, call.given, strict=True))
            for ours, own in zip(part.leaves, call.leaves, strict=True):
                if ours.memory is not None and own.memory is not None:
                    number_of[ours.memory] = own.memory
            held = part.memory
            saved, queued, by_policy = (
                {number_of[memory]: size for memory, size in each.items()}
                for each in (held.saved, held.queued, held.saved_by_policy)
            )
            calls.append(
                replace(
                    call,
                    flops=part.flops,
                    weight_flops=part.weight_flops,
                    work=part.work,
                    flops_saved_by_policy=part.flops_saved_by_policy,
                    flops_run_again=part.flops_run_again,
                    flops_run_again_inside=part.flops_run_again_inside,
                    num_regions_inside=part.num_regions_inside,
                    memory=HeldMemory(saved, queued, held.queued_gradients_bytes, by_policy),
                )
            )
        return replace(record, calls=calls)

    def of_other_sizes(self, again: Again, fakes: FakeParameters) -> StepRecord | None:
        """The same step on a batch of another size; None where more than sizes differs."""
        try:
            ran = self.recorded(again, fakes)
        except SplitError:
            return None
        base, calls = self._record, []
        is_same = base.operations.keys() == ran.operations.keys() and base.tail.values == ran.tail.values
        for call, ours, like in zip(base.calls, ran.calls, self.first, strict=True):
            is_same &= ours.shapes == ran.calls[like].shapes
            is_same &= like != call.index or ours.reads.values == call.reads.values
            # units that stand by read nothing, and cut the graph
            of_base = {name: getattr(call.reads, name) for name in ("values", "nearest", "parameters", "escapes")}
            calls.append(replace(ours, reads=replace(ours.reads, **of_base), differentiated=call.differentiated))
        if not is_same:
            return None
        record = replace(
            ran,
            calls=calls,
            gradient_sources=base.gradient_sources,
            nearest_gradients=base.nearest_gradients,
            weights_of_float32_norms=base.weights_of_float32_norms,
        )
        return self.filled(record, record)


def _is_plain(call: UnitCall, unit: nn.Module, owners: Mapping[int, int]) -> bool:
    """Whether all that a call does is to return tensors and plain values, and to keep what no other call keeps."""
    known = {*call.given, *(leaf.memory for leaf in call.leaves)}
    return (
        not (call.left or call.side_effects or isinstance(unit, HeadPart))
        and all(leaf.spec is not None or type(leaf.fake) in PLAIN for leaf in call.leaves)
        and all(owners[memory] == 1 or memory in known for memory in {*call.memory.saved, *call.memory.queued})
    )


def kind_of(call: UnitCall, unit: nn.Module, names: Mapping[str, nn.Parameter]) -> Hashable:
    """What calls share that do the same: work, shapes, and what is kept of arguments, results and all else."""
    place = {memory: number for number, memory in enumerate(call.given)}
    held = call.memory
    kept = tuple((place.get(memory, -1), size) for memory, size in (*held.saved.items(), *held.queued.items()))
    leaves = (
        (leaf.spec or repr(leaf.fake), leaf.requires_grad, place.get(leaf.memory or -1, -1)) for leaf in call.leaves
    )
    own = ((key, names[f"{call.unit}.{key}"]) for key, _ in unit.named_parameters())
    parameters = tuple((key, parameter.shape, parameter.dtype, parameter.requires_grad) for key, parameter in own)
    work = frozenset(call.work.items()), call.flops_run_again, call.region is None, call.num_regions_inside
    given = call.shapes, call.numbers, tuple(call.given.values())
    return type(unit), unit.training, parameters, work, given, kept, tuple(leaves), len(call.left)
