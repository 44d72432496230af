"""Computation, memory and communication of one tensor rank, found without data and processes.

Cuts are found as in training. Then the step is recorded once more, with one of each kind of unit on parts, by the rules
that it trains with. So FLOPs, bytes and saved tensors are those of a rank, and the functions at the edges of cut code
tell what they would communicate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from lightning_pp.planning.alike_units import Again, AlikeUnits
from lightning_pp.split.data.tree import map_leaves, own_containers
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.split.head.parts import HeadPart, is_head
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.tensor.functions import PlannedGroup
from lightning_pp.tensor.plans import Plan, tied_along_vocabulary
from lightning_pp.tensor.units import TensorParallelUnits, without_data

Call = tuple[str, tuple[Any, Any]]
"""The name of a unit with its arguments, without data."""


@dataclass(frozen=True)
class TensorRanks:
    """How matrices are shared.

    Attributes:
        size: Ranks that share them.
        plan: The strategy's ``tensor_parallel_plan``.
        sequence_parallel: The strategy's.
        defers_logits: Whether a cross entropy gets the logits of a rank's classes, where the head is cut along them.
    """

    size: int = 1
    plan: Plan = "auto"
    sequence_parallel: bool = False
    defers_logits: bool = True


class Traffic(NamedTuple):
    """The communication of a rank with its tensor group.

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
    """The step as one of several tensor ranks computes it.

    Attributes:
        size: Ranks that share the matrices.
        fake_parameters: Those that are cut have the shapes of parts.
        record: The step on one microbatch, with units that run on parts.
        num_parameters: Parameters that a rank has of each unit.
        about: What stays whole, in a sentence.
        cuts: How units are cut.
    """

    size: int
    fake_parameters: FakeParameters
    record: StepRecord
    num_parameters: Mapping[str, int]
    about: str
    cuts: _Cuts
    _traffic: Mapping[str, tuple[Traffic, Traffic, Traffic, Traffic]]

    @property
    def cut_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are cut, whole."""
        named = self.fake_parameters.module.named_parameters(remove_duplicate=False)
        return {name: parameter for name, parameter in named if name in self.cuts.units.parts}

    def count_traffic(self, unit: str) -> tuple[Traffic, Traffic, Traffic]:
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
        calls[:] = [(name, map_leaves(without_data, given)) for name, given in calls]


@dataclass(frozen=True)
class _Cuts:
    """How units are cut, whatever the batch.

    Attributes:
        units: The units, which can run on parts.
        group: The ranks that share them.
        head: The last projection, if the step ends with one.
        fake_parameters: With the shapes of parts.
    """

    units: TensorParallelUnits
    group: PlannedGroup
    head: str | None
    fake_parameters: FakeParameters


def cut_on_parts(
    units: Mapping[str, nn.Module],
    fake_parameters: FakeParameters,
    record: StepRecord,
    calls: Sequence[Call],
    ranks: TensorRanks,
    again: Again,
    like: OnParts | None = None,
) -> OnParts:
    """Finds how units are cut, and records the step with them on parts.

    Args:
        units: All units of the model, whole.
        fake_parameters: Those of the whole model.
        record: The step with whole units.
        calls: What these were called with.
        ranks: Who shares matrices.
        again: Records the step once more.
        like: The same with a batch of another size; the cuts are those then.

    Raises:
        ConfigurationError: The plan does not fit the model.
        SplitError: A unit cannot run on parts.
    """
    alike = AlikeUnits(record, units, fake_parameters.names)
    watch = _TrafficWatch(ranks.size, alike)
    cuts = _found(units, fake_parameters, record, calls, ranks) if like is None else like.cuts
    found, cut = cuts.units, cuts.fake_parameters
    cuts.group.on_communication = watch.note
    try:
        with found.running_on_parts():
            on_parts = replace(alike.filled(record, alike.recorded(again, cut)), num_tensor_ranks=ranks.size)
    finally:
        cuts.group.on_communication = lambda *_: None  # graphs on fakes keep the group alive
    cut.names = {name: cut.parameter(name) for name in cut.names}  # which does not keep the parameters themselves
    num_parameters = {name: sum(p.numel() for p in unit.parameters()) for name, unit in units.items()}
    for name in num_parameters:
        of_unit = [part for key, part in found.parts.items() if key.startswith(f"{name}.")]
        num_parameters[name] -= sum(part.shape.numel() - part.local_shape.numel() for part in of_unit)
    traffic = watch.by_unit(on_parts, cuts.head)
    if ranks.defers_logits and cuts.head is not None and any(key.startswith(f"{cuts.head}.") for key in found.parts):
        on_parts = _with_logits_of_a_rank(on_parts, cuts.head, ranks.size)
    return OnParts(ranks.size, cut, on_parts, num_parameters, found.report(), cuts, traffic)


def _with_logits_of_a_rank(record: StepRecord, head: str, size: int) -> StepRecord:
    """``record`` with logits of a rank's classes in what the end keeps for backward, if that is a cross entropy."""
    logits, memory = record.calls[-1].leaves[0], record.tail.memory
    is_deferred = head not in record.recomputed_units and not logits.edited_in_place
    if logits.spec is None or not is_deferred or not any("log_softmax" in work.name for work in record.tail.work):
        return record
    least = logits.spec.num_bytes // 2  # a causal model leaves out a row of each sample
    saved = {key: -(-number // size) if number >= least else number for key, number in memory.saved.items()}
    return replace(record, tail=replace(record.tail, memory=replace(memory, saved=saved)))


def _found(
    units: Mapping[str, nn.Module],
    fake_parameters: FakeParameters,
    record: StepRecord,
    calls: Sequence[Call],
    ranks: TensorRanks,
) -> _Cuts:
    module, names, group = fake_parameters.module, fake_parameters.names, PlannedGroup(ranks.size)
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
    return _Cuts(found, group, head, cut)


class _TrafficWatch:
    """Notes what units communicate in a dry run."""

    def __init__(self, size: int, alike: AlikeUnits) -> None:
        self._size, self._alike = size, alike
        # the run, index of the call, FLOPs of it before, bytes received in forward and in backward
        self._noted: list[tuple[DryRun, int, int, float, float]] = []

    def note(self, num_bytes: int, forward: int, backward: int) -> None:
        """Notes one communication."""
        run = self._alike.run
        if run is not None and run.record.calls:
            call, share = run.record.calls[-1], num_bytes * (self._size - 1) / self._size
            before = call.flops - call.flops_saved_by_policy
            self._noted.append((run, call.index, before, forward * share, backward * share))

    def by_unit(self, record: StepRecord, head: str | None) -> dict[str, tuple[Traffic, Traffic, Traffic, Traffic]]:
        """In F, in I, again in I by the unit itself, and again if the unit runs there up to the last tensor it keeps.

        The columns of ``head`` are gathered in a dry run; a cross entropy of parts of logits needs a few numbers only.
        """
        found: dict[str, tuple[Traffic, Traffic, Traffic, Traffic]] = {}
        last_of_region = {call.region: call.index for call in record.calls}
        by_call: dict[int, list[tuple[int, float, float]]] = {}
        for run, index, before, forward, backward in self._noted:
            if run is not self._alike.run:
                continue
            by_call.setdefault(index, []).append((before, forward, backward))
        for call, ran in zip(record.calls, self._alike.first, strict=True):
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
