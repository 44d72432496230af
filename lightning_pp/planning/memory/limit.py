"""Cuts within a memory limit: for parameters, gradients, optimizer state, activations and buffers together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.optim import Optimizer

from lightning_pp.errors import ConfigurationError, SplitError
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.stage_costs import BYTES_PER_GIB
from lightning_pp.planning.stage_model import RecordedModel, SplitModel, places_of
from lightning_pp.schedule import Placement, Schedule, StageCosts
from lightning_pp.schedule.simulation.memory import peak_memory
from lightning_pp.split.cut.moved_cuts import moved_partitions
from lightning_pp.split.cut.partition import Partition, UnitMemory, inseparable_groups
from lightning_pp.split.dry_run.weight_updates import Updates
from lightning_pp.split.memory.estimate import MemoryEstimate, RankMemory
from lightning_pp.split.memory.state_memory import parameter_sizes

# Cuts the units within what they and the ranks may hold; None: without a limit.
Cut = Callable[[UnitMemory | None], Partition]

_MOST_CORRECTIONS = 8
_MOST_MOVES_TRIED = 200
_BISECTIONS = 12


@dataclass(frozen=True, eq=False)
class DeviceMemory:
    """The memory limit of a rank, and its memory under a cut.

    Attributes:
        limit_gib: The limit; every rank has the same.
        model: How bytes are counted.
        recording: The model with a dry run of its step on one microbatch.
        updates: Parameters that hooks write into, and those that they compute their new values from.
        communicators_bytes: What the communicators of collectives have taken of each rank's device.
    """

    limit_gib: float
    model: MemoryModel
    recording: RecordedModel
    updates: Updates
    communicators_bytes: int = 0

    def estimate(self, partition: Partition, placement: Placement, schedule: Schedule | None = None) -> MemoryEstimate:
        """What stages and ranks hold."""
        places = places_of(self.recording, partition, self.updates)
        counted = self.recording.counted
        sizes = parameter_sizes(counted.fake_parameters, self.recording.units, places.owners, places.direct)
        return self.model.estimate(counted.record, places.partition, placement, sizes, schedule)

    def needs(self, partition: Partition, placement: Placement, schedule: Schedule | None) -> list[RankMemory]:
        """What each rank holds under ``schedule``; None: at the least, with one microbatch at a time."""
        return self._needs(self.estimate(partition, placement, schedule), placement)

    def excess(self, partition: Partition, placement: Placement, schedule: Schedule | None) -> list[float]:
        """By how many bytes each rank is over the limit; negative where there is room."""
        try:
            needs = self.needs(partition, placement, schedule)
        except SplitError:  # no cut that could be made
            return [float("inf")] * placement.num_ranks
        return [need.peak_bytes - self.limit_gib * BYTES_PER_GIB for need in needs]

    def fits(self, partition: Partition, placement: Placement, schedule: Schedule | None) -> bool:
        """Whether every rank is within the limit."""
        return max(self.excess(partition, placement, schedule)) <= 0

    def check(self, partition: Partition, placement: Placement, schedule: Schedule | None) -> None:
        """Raises :class:`ConfigurationError` unless every rank is within the limit."""
        self._check(self.needs(partition, placement, schedule), partition, placement, schedule, "this cut")

    def check_split(self, split: SplitModel, optimizer: Optimizer, schedule: Schedule) -> None:
        """Raises :class:`ConfigurationError` if a split model is over the limit when it trains with ``optimizer``.

        Nothing is done if it was cut for that.
        """
        model = replace(self.model.with_optimizer(optimizer), trains=True)
        if model != self.model:
            sizes, record = split.parameter_sizes, split.counted.record
            estimate = model.estimate(record, split.partition, split.placement, sizes, schedule)
            what = f"training with {type(optimizer).__name__} (the model was not cut for it)"
            self._check(self._needs(estimate, split.placement), split.partition, split.placement, schedule, what)

    def _check(
        self,
        needs: Sequence[RankMemory],
        partition: Partition,
        placement: Placement,
        schedule: Schedule | None,
        what: str,
    ) -> None:
        if max(need.peak_bytes for need in needs) > self.limit_gib * BYTES_PER_GIB:
            begins = f"device_memory_gib={self.limit_gib:g} is too little for {what} {_order_text(schedule)}: it needs"
            raise self._refusal(begins, needs, partition, placement, schedule)

    def _needs(self, estimate: MemoryEstimate, placement: Placement) -> list[RankMemory]:
        needs = []
        for rank in estimate.ranks:
            own = placement.stages_of_rank(rank.rank)
            one = sum(max(estimate.held_after_forward[stage], estimate.held_after_input[stage]) for stage in own)
            held = one if rank.activations_bytes is None else rank.activations_bytes
            needs.append(replace(rank, activations_bytes=held, communicators_bytes=self.communicators_bytes))
        return needs

    def room_gib(self, partition: Partition, placement: Placement) -> tuple[float, ...]:
        """What is left for activations on each rank; ``memory_limit`` of a search for a schedule."""
        limit = self.limit_gib * BYTES_PER_GIB - self.communicators_bytes
        ranks = self.estimate(partition, placement).ranks
        return tuple((limit - rank.bytes_beside_activations) / BYTES_PER_GIB for rank in ranks)

    # ---------------------------------------------------------------- cuts

    def fitting_partition(self, cut: Cut, placement: Placement, held_by: Schedule | None) -> Partition:
        """A balanced cut within the limit; the one without a limit, if that is.

        What units hold is taken to add up, which it nearly does; where the exact count is over the limit, a rank gets
        that much less, and where no cut is found so, cuts are moved from the one that holds about the least.

        Args:
            cut: Cuts the model.
            placement: Which rank holds which stages.
            held_by: The schedule by which the limit is to be kept; None: with one microbatch at a time.

        Raises:
            ConfigurationError: No cut is found; the message has the one that needs least.
        """
        unlimited = cut(None)
        if self.fits(unlimited, placement, held_by):
            return unlimited
        found = [unlimited]
        counted = self.recording.counted.record
        units = self._unit_memory(
            unlimited, placement, self.model.with_offloading(counted, unlimited, placement, held_by)
        )
        if units is not None:
            found += self._within_lower_limits(cut, units, placement, held_by)
            if self.fits(found[-1], placement, held_by):
                return found[-1]
            found.append(_roomiest(cut, placement, units))
        least = min(found, key=lambda partition: max(self.excess(partition, placement, held_by)))
        least = self._moved(least, placement, held_by)
        if self.fits(least, placement, held_by):
            return least
        begins = (
            f"No cut of the model into {placement.num_stages} stages keeps every rank within "
            f"device_memory_gib={self.limit_gib:g} {_order_text(held_by)}: the best one needs"
        )
        needs = self.needs(least, placement, held_by)
        raise self._refusal(begins, needs, least, placement, held_by, units)

    def _within_lower_limits(
        self, cut: Cut, units: UnitMemory, placement: Placement, held_by: Schedule | None
    ) -> list[Partition]:
        """Cuts by what units hold, each with less for the ranks that were over the limit, until none is."""
        found: list[Partition] = []
        limits = [self.limit_gib * BYTES_PER_GIB] * placement.num_ranks
        for _ in range(_MOST_CORRECTIONS):
            try:
                found.append(cut(replace(units, limit_bytes=limits)))
            except ConfigurationError:
                break
            excess = self.excess(found[-1], placement, held_by)
            limits = [limit - max(0.0, over) for limit, over in zip(limits, excess, strict=True)]
            if max(excess) <= 0 or min(limits) <= 0:
                break
        return found

    def _unit_memory(self, partition: Partition, placement: Placement, held_by: Schedule | None) -> UnitMemory | None:
        """What the units hold, each taken for a stage of its own; None where they cannot all be.

        Args:
            partition: Any partition.
            placement: Which rank holds which stages.
            held_by: Says how many microbatches a stage holds at a time; None: one.
        """
        groups = inseparable_groups(self.recording.record)
        stage_of_unit = {unit: index for index, group in enumerate(groups) for unit in group}
        called = list(stage_of_unit)  # in the order of calls, in every process
        previous = 0
        for unit in self.recording.num_parameters:  # those that are not called are beside the one before
            previous = stage_of_unit.setdefault(unit, previous)
        try:
            apart = Partition(len(groups), stage_of_unit, partition.unit_costs)
            stages = self.estimate(apart, Placement.interleaved(1, len(groups))).stages
        except SplitError:
            return None
        fixed, held = dict.fromkeys(called, 0.0), dict.fromkeys(called, 0.0)
        is_window = self.model.state.sharding == "full_shard"  # of a few units, however many there are
        for stage, group in zip(stages, groups, strict=True):
            gathered = stage.state.gathered_parameters_bytes
            fixed[group[0]] = float(stage.state.total_bytes - (gathered if is_window else 0))
            held[group[0]] = float(max(stage.held_after_forward_bytes, stage.held_after_input_bytes))
        total = sum(stage.held_after_forward_bytes for stage in stages)
        after_input = min(1.0, sum(stage.held_after_input_bytes for stage in stages) / total) if total else 1.0
        num_held = [_most_held(held_by, stage, after_input) for stage in range(placement.num_stages)]
        return UnitMemory(fixed, held, num_held, [self.limit_gib * BYTES_PER_GIB] * placement.num_ranks)

    def _moved(self, partition: Partition, placement: Placement, held_by: Schedule | None) -> Partition:
        """Moves cuts as long as the fullest rank holds less by it, or until all are within the limit."""
        best, tried, improved = max(self.excess(partition, placement, held_by)), 0, True
        while best > 0 and improved and tried < _MOST_MOVES_TRIED:
            improved = False
            for candidate in moved_partitions(self.recording.record, partition):
                tried += 1
                excess = max(self.excess(candidate, placement, held_by))
                if excess < best:
                    partition, best, improved = candidate, excess, True
                    break
        return partition

    # ---------------------------------------------------------------- messages

    def _refusal(
        self,
        begins: str,
        needs: Sequence[RankMemory],
        partition: Partition,
        placement: Placement,
        schedule: Schedule | None,
        units: UnitMemory | None = None,
    ) -> ConfigurationError:
        """Why the limit cannot be kept, by what ranks need under a cut."""
        need = max(needs, key=lambda need: need.peak_bytes)
        rank, state = need.rank, need.state
        parts: dict[str, float] = {
            "parameters": state.parameters_bytes,
            "parameters that are gathered or cast": state.gathered_parameters_bytes,
            "gradients": state.gradients_bytes,
            "optimizer state": state.optimizer_state_bytes,
            "copies for post_validation": state.copies_bytes,
            "communicators": need.communicators_bytes,
        }
        if need.running_bytes >= need.reducing_bytes:
            parts["activations"] = (need.activations_bytes or 0) + need.recomputed_bytes
            parts["messages"] = need.edge_buffers_bytes
        else:
            parts["the reduction of gradients"] = need.reducing_bytes
        text = ", ".join(f"{_gib(num_bytes)} of {part}" for part, num_bytes in parts.items() if num_bytes)
        lone = None if units is None else self._lone_unit(units)
        ways = self._ways_out(
            need, schedule, more_ranks=lone is None and placement.num_ranks < len(partition.unit_costs)
        )
        return ConfigurationError(
            f"{begins} {_gib(need.peak_bytes)} GiB on rank {rank} of the pipeline "
            f"({'; '.join(_units_text(partition, stage) for stage in placement.stages_of_rank(rank))}): {text}. "
            f"{lone or ''}What helps: {', '.join(ways)}, or a larger device_memory_gib."
        )

    def _lone_unit(self, units: UnitMemory) -> str | None:
        """The unit that no number of ranks makes room for."""
        alone = {unit: units.fixed_bytes[unit] + units.held_bytes[unit] for unit in units.fixed_bytes}
        largest = max(alone, key=lambda unit: alone[unit])
        if alone[largest] <= self.limit_gib * BYTES_PER_GIB:
            return None
        return f"The unit {largest!r} alone needs {_gib(alone[largest])} GiB, so more ranks do not help. "

    def _ways_out(self, need: RankMemory, schedule: Schedule | None, *, more_ranks: bool) -> list[str]:
        ways = ["more pipeline ranks"] if more_ranks else ["smaller units (units=)"]
        if self.model.state.num_shards == 1 or self.model.state.sharding == "replicate":
            ways.append("sharding over data-parallel ranks (data_parallel_size, sharding)")
        else:
            ways.append("sharding over more data-parallel ranks")
        if not self.model.state.cpu_offload:
            ways.append("cpu_offload=True")
        if need.state.copies_bytes:
            ways.append("post_validation=False")
        if need.activations_bytes and need.running_bytes >= need.reducing_bytes:
            record = self.recording.record
            by_model = any(call.region is not None or call.num_regions_inside for call in record.calls)
            if not record.recomputed_units and not by_model:
                ways.append("activation_checkpointing=True")
            if schedule is not None and schedule.whole_batch_loss:
                ways.append("fewer samples in a batch (fewer microbatches of the same size)")
                return ways
            ways.append("smaller microbatches (a larger num_microbatches, or fewer samples in a batch)")
            if schedule is not None:
                ways.append("a schedule that holds fewer microbatches (v_half, v_min, auto)")
        return ways


def _roomiest(cut: Cut, placement: Placement, units: UnitMemory) -> Partition:
    """The cut whose fullest rank holds about the least, if what units hold adds up."""
    high = sum(units.fixed_bytes.values()) + max(units.num_held) * sum(units.held_bytes.values())
    low, partition = 0.0, cut(None)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        try:
            partition, high = cut(replace(units, limit_bytes=[middle] * placement.num_ranks)), middle
        except ConfigurationError:
            low = middle
    return partition


def _most_held(program: Schedule | None, stage: int, after_input: float) -> float:
    """The most microbatches that ``stage`` holds at a time; between I and W one counts as ``after_input``."""
    if program is None:
        return 1.0
    number = program.placement.num_stages
    only = [float(other == stage) for other in range(number)]
    after = [after_input * share for share in only]
    costs = StageCosts(0.0, 0.0, 0.0, held_after_forward=only, held_after_input=after, held_on_host=only)
    return peak_memory(program.programs[program.placement.rank_of_stage[stage]], costs, number)


def _order_text(schedule: Schedule | None) -> str:
    if schedule is None:
        return "with one microbatch at a time"
    held = ", all of them held at once for whole_batch_loss" if schedule.whole_batch_loss else ""
    return f"under {schedule.name} with {schedule.num_microbatches} microbatches{held}"


def _units_text(partition: Partition, stage: int) -> str:
    units: Sequence[str] = [unit for unit in partition.units_of_stage(stage) if unit in partition.unit_costs]
    return f"stage {stage}: {units[0] if len(units) == 1 else f'{units[0]} to {units[-1]}'}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / BYTES_PER_GIB:.3g}"
