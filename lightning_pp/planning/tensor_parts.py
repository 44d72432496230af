"""What one of the ranks that share matrices computes, holds and communicates, found without data and processes.

Cuts are found as in training. Then the step is recorded once more, with one of each kind of unit on parts, by the rules
that it trains with. So FLOPs, bytes and saved tensors are those of a rank, and the functions at the edges of cut code
tell what they would communicate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pp.errors import SplitError
from lightning_pp.split.data.tree import leaves_of, map_leaves, own_containers
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.split.head.parts import HeadPart, is_head
from lightning_pp.split.record.step_record import HeldMemory, StepRecord, UnitCall, Value
from lightning_pp.tensor import Plan, PlannedGroup, TensorParallelUnits, tied_along_vocabulary

Call = tuple[str, tuple[Any, Any]]
"""The name of a unit with its arguments, without data."""
Step = Callable[[DryRun], Any]
Again = Callable[[Callable[[Step], Step], FakeParameters], StepRecord]
"""Records the step, given what to make of it and other fakes."""


@dataclass(frozen=True)
class TensorRanks:
    """How matrices are shared.

    Attributes:
        size: Ranks that share them.
        plan: The strategy's ``tensor_parallel_plan``.
        sequence_parallel: The strategy's.
    """

    size: int = 1
    plan: Plan = "auto"
    sequence_parallel: bool = False


class Traffic(NamedTuple):
    """What a rank communicates with the others that share its matrices.

    Attributes:
        number: Collectives.
        num_bytes: What it receives in them, in rings.
    """

    number: int = 0
    num_bytes: float = 0.0

    def plus(self, other: Traffic) -> Traffic:
        """Both."""
        return Traffic(self.number + other.number, self.num_bytes + other.num_bytes)


@dataclass(frozen=True)
class OnParts:
    """The step as one rank of several computes it.

    Attributes:
        size: Ranks that share the matrices.
        fake_parameters: Those that are cut have the shapes of parts.
        record: The step on one microbatch, with units that run on parts.
        num_parameters: Parameters that a rank has of each unit.
        about: What stays whole, in a sentence.
    """

    size: int
    fake_parameters: FakeParameters
    record: StepRecord
    num_parameters: Mapping[str, int]
    about: str
    _traffic: Mapping[str, tuple[Traffic, Traffic, Traffic, Traffic]]

    def traffic_of(self, unit: str) -> tuple[Traffic, Traffic, Traffic]:
        """Of a unit in F, in I beside weight gradients, and in I where it runs again, of one microbatch."""
        forward, backward, inside, again = self._traffic.get(unit, (Traffic(),) * 4)
        return forward, backward, inside.plus(again) if unit in self.record.recomputed_units else inside


def head_and_tied(
    record: StepRecord, module: nn.Module, units: Mapping[str, nn.Module], plan: Plan, num_ranks: int
) -> tuple[str | None, set[nn.Parameter]]:
    """The last projection, if the step ends with one, and what is cut along the vocabulary in several units."""
    calls = [call.unit for call in record.calls]
    head = calls[-1] if calls and calls.count(calls[-1]) == 1 and is_head(units[calls[-1]]) else None
    return head, tied_along_vocabulary(module, {units[name] for name in calls}, head, plan, num_ranks)


@contextmanager
def arguments_noted(units: Mapping[str, nn.Module], calls: list[Call]) -> Iterator[None]:
    """Around a dry run: has ``calls`` be what units are called with."""
    calls.clear()

    def note(name: str, unit: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        calls.append((name, own_containers((args, kwargs))))

    hooks = [
        unit.register_forward_pre_hook(partial(note, name), with_kwargs=True)
        for name, unit in units.items()
        if not isinstance(unit, HeadPart)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        calls[:] = [(name, map_leaves(_without_data, given)) for name, given in calls]


def cut_on_parts(
    units: Mapping[str, nn.Module],
    fake_parameters: FakeParameters,
    record: StepRecord,
    calls: Sequence[Call],
    ranks: TensorRanks,
    again: Again,
) -> OnParts:
    """Finds how units are cut, and records the step with them on parts.

    Args:
        units: All units of the model, whole.
        fake_parameters: Those of the whole model.
        record: The step with whole units.
        calls: What these were called with.
        ranks: Who shares matrices.
        again: Records the step once more.

    Raises:
        ConfigurationError: The plan does not fit the model.
        SplitError: A unit cannot run on parts.
    """
    module, names = fake_parameters.module, fake_parameters.names
    group, watch = PlannedGroup(ranks.size), _TrafficWatch(ranks.size)
    whole = {names[name] for name in record.parameters_used_outside()}
    own = {name: unit for name, unit in units.items() if not isinstance(unit, HeadPart)}
    head, tied = head_and_tied(record, module, units, ranks.plan, ranks.size)
    found = TensorParallelUnits(
        module, own, ranks.plan, cast(dist.ProcessGroup, group), whole, ranks.sequence_parallel, tied - whole, head
    )
    for name, (args, kwargs) in calls:
        found.observe(name, args, kwargs)
    found.plan()
    cut = FakeParameters(module, fake_parameters.device)
    cut.set_compute_dtype(fake_parameters.compute_dtype, fake_parameters.uncast)
    parts = {cut.canonical_names[name]: part for name, part in found.parts.items()}
    for name, whole_one in names.items():
        if (part := parts.get(cut.canonical_names[name])) is not None:
            meta = torch.empty(part.local_shape, dtype=whole_one.dtype, device="meta")
            cut.names[name] = nn.Parameter(meta, requires_grad=whole_one.requires_grad)
    group.tell = watch.note
    like = _alike(record, units, fake_parameters.names)
    with found.running_on_parts(), _standing_in(units, record, like):
        on_parts = _for_all_calls(record, again(watch.watching, cut), like, ranks.size)
    cut.names = {name: cut.parameter(name) for name in cut.names}  # which does not keep the parameters themselves
    num_parameters = {name: sum(p.numel() for p in unit.parameters()) for name, unit in units.items()}
    for name in own:
        of_unit = [part for key, part in found.parts.items() if key.startswith(f"{name}.")]
        num_parameters[name] -= sum(part.shape.numel() - part.local_shape.numel() for part in of_unit)
    return OnParts(ranks.size, cut, on_parts, num_parameters, found.report(), watch.by_unit(on_parts, like, head))


class _TrafficWatch:
    """Notes what units communicate in a dry run."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._run: DryRun | None = None
        # index of the call, FLOPs of it before, bytes received in forward and in backward
        self._noted: list[tuple[int, int, float, float]] = []

    def watching(self, step: Step) -> Step:
        """``step``, of which the last run is noted."""

        def watched(run: DryRun) -> Any:
            self._run = run
            self._noted.clear()
            return step(run)

        return watched

    def note(self, num_bytes: int, forward: int, backward: int) -> None:
        """Notes one communication."""
        if self._run is not None and self._run.record.calls:
            call, share = self._run.record.calls[-1], num_bytes * (self._size - 1) / self._size
            before = call.flops - call.flops_saved_by_policy
            self._noted.append((call.index, before, forward * share, backward * share))

    def by_unit(
        self, record: StepRecord, like: Sequence[int], head: str | None
    ) -> dict[str, tuple[Traffic, Traffic, Traffic, Traffic]]:
        """In F, in I, again in I by the unit itself, and again if the unit runs there up to the last tensor it keeps.

        The columns of ``head`` are gathered in a dry run; a cross entropy of parts of logits needs a few numbers only.
        """
        found: dict[str, tuple[Traffic, Traffic, Traffic, Traffic]] = {}
        last_of_region = {call.region: call.index for call in record.calls}
        by_call: dict[int, list[tuple[int, float, float]]] = {}
        for index, before, forward, backward in self._noted:
            by_call.setdefault(index, []).append((before, forward, backward))
        for call, ran in zip(record.calls, like, strict=True):
            first, second, inside, third = found.get(call.unit, (Traffic(),) * 4)
            for before, forward, backward in by_call.get(ran, ()):
                sent = Traffic(int(forward > 0), forward) if call.unit != head else Traffic()
                first, second = first.plus(sent), second.plus(Traffic(int(backward > 0), backward))
                is_needed = before < call.flops_run_again
                by_module = call.region is not None and (is_needed or last_of_region[call.region] != call.index)
                if by_module or (call.num_regions_inside and before < call.flops):
                    inside = inside.plus(sent)
                elif is_needed:
                    third = third.plus(sent)
            found[call.unit] = first, second, inside, third
        return found


def _alike(record: StepRecord, units: Mapping[str, nn.Module], names: Mapping[str, nn.Parameter]) -> list[int]:
    """For each call the first one that does the same with other tensors of the same shapes, or itself."""
    owners = Counter(memory for call in record.calls for memory in {*call.memory.saved, *call.memory.queued})
    num_calls = Counter(call.unit for call in record.calls)
    first: dict[Hashable, int] = {}
    like = []
    for call in record.calls:
        unit, held = units[call.unit], call.memory
        known = {*call.given, *(leaf.memory for leaf in call.leaves)}
        is_plain = (
            num_calls[call.unit] == 1
            and not (call.left or call.side_effects or isinstance(unit, HeadPart))
            and all(leaf.spec is not None for leaf in call.leaves)
            and all(owners[memory] == 1 or memory in known for memory in {*held.saved, *held.queued})
        )
        like.append(first.setdefault(_kind_of(call, unit, names) if is_plain else call.index, call.index))
    return like


def _kind_of(call: UnitCall, unit: nn.Module, names: Mapping[str, nn.Parameter]) -> Hashable:
    """What calls share that do the same: work, shapes, and what is kept of arguments, results and all else."""
    place = {memory: number for number, memory in enumerate(call.given)}
    kept = [(place.get(memory, -1), size) for memory, size in (*call.memory.saved.items(), *call.memory.queued.items())]
    leaves = [(leaf.spec, leaf.requires_grad, place.get(leaf.memory or -1, -1)) for leaf in call.leaves]
    parameters = [(key, names[f"{call.unit}.{key}"].shape) for key, _ in unit.named_parameters()]
    work = frozenset(call.work.items()), call.flops_run_again, call.region is None, call.num_regions_inside
    given = call.shapes, call.numbers, tuple(call.given.values())
    return type(unit), unit.training, tuple(parameters), work, given, tuple(kept), tuple(leaves)


@contextmanager
def _standing_in(units: Mapping[str, nn.Module], record: StepRecord, like: Sequence[int]) -> Iterator[None]:
    """Within, units whose call is like an earlier one return tensors of the right shapes at once."""
    held: list[tuple[dict[str, Any], Any]] = []

    def stand_in(call: UnitCall, *args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        source = next((leaf for leaf in given if leaf.requires_grad), given[0])
        found: dict[Value, Tensor] = {}
        for place, leaf in enumerate(call.leaves):
            assert leaf.spec is not None
            made = source.flatten()[:1].to(leaf.spec.dtype).expand(leaf.spec.shape).clone()
            found[Value(call.index, place)] = made if leaf.requires_grad else made.detach()
        return call.output_of(found)

    try:
        for call, ran in zip(record.calls, like, strict=True):
            if ran != call.index:
                attributes = vars(units[call.unit])
                held.append((attributes, attributes.get("forward")))
                attributes["forward"] = partial(stand_in, call)
        yield
    finally:
        for attributes, forward in held:
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward


def _for_all_calls(record: StepRecord, on_parts: StepRecord, like: Sequence[int], num_ranks: int) -> StepRecord:
    """``record`` with what each call costs and keeps on parts, by the call that it is like."""
    if [call.unit for call in on_parts.calls] != [call.unit for call in record.calls]:
        raise SplitError("The step calls other units with parts of matrices than with whole ones.")
    fresh, calls = count(1 << 40), []  # above the numbers of all memories in the record
    for call, ran in zip(record.calls, like, strict=True):
        part = on_parts.calls[ran]
        if len(part.given) != len(call.given) or len(part.leaves) != len(call.leaves):
            raise SplitError(
                f"The unit {call.unit!r} is given other tensors with parts of matrices than with whole ones."
            )
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
                memory=HeldMemory(saved, queued, held.queued_gradients_bytes, by_policy),
            )
        )
    return replace(record, calls=calls, num_tensor_ranks=num_ranks)


def _without_data(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf
