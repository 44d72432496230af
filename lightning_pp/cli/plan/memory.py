"""What a step holds on every rank, for any cut and schedule of one model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.schedule import Schedule, StageCosts
from lightning_pp.schedule.simulation.memory import held_after_each, peaks_of
from lightning_pp.split.memory.estimate import MemoryEstimate


@dataclass(frozen=True)
class RankBytes:
    """One rank of the pipeline; all in bytes.

    Attributes:
        rank: Its place in the pipeline.
        parameters: Between steps, whole or a shard.
        gathered: What is gathered or cast of them during a step, besides.
        gradients: While microbatches add to them.
        optimizer_state: What the optimizer keeps, and the copies of ``post_validation``.
        activations: The most that microbatches hold at a time; what a checkpointed unit holds while it runs again
            included.
        buffers: What is received ahead of need, and what is being sent.
        peak: The most at any time of a step, the reduction of gradients included.
        host: With ``cpu_offload`` or ``activation_offload``, the most that lies on the host; in none of the others.
    """

    rank: int
    parameters: int
    gathered: int
    gradients: int
    optimizer_state: int
    activations: int
    buffers: int
    peak: int
    host: int


class PlanMemory:
    """Counts what ranks hold under any cut and schedule of one model.

    Args:
        model: How bytes are counted.
    """

    def __init__(self, model: MemoryModel) -> None:
        self._model = model

    @property
    def whole_batch_loss(self) -> bool:
        """Whether the last stage joins all microbatches."""
        return self._model.whole_batch_loss

    @property
    def without_whole_batch_loss(self) -> PlanMemory:
        """What ranks hold where it does not."""
        return PlanMemory(replace(self._model, whole_batch_loss=False))

    def held(self, split: SplitModel) -> tuple[list[float], list[float]]:
        """What one microbatch holds on each stage after F and after I."""
        estimate = self._estimate(split)
        after_forward, after_input = estimate.held_after_forward, estimate.held_after_input
        if self.whole_batch_loss:  # the difference would count for each microbatch of a batch
            return [*map(float, after_forward)], [*map(float, after_input)]
        # the search asks that I frees, and never takes more; where nothing is saved, what is queued was there before
        return [*map(float, map(max, after_forward, after_input))], [*map(float, after_input)]

    def offloadable(self, split: SplitModel) -> list[int]:
        """What of one microbatch may wait on the host, on each stage."""
        return [stage.offloadable_bytes for stage in self._estimate(split).stages]

    def ranks(self, split: SplitModel, schedule: Schedule) -> list[RankBytes]:
        """What each rank holds under ``schedule``."""
        estimate = self._estimate(split, schedule)
        moved = StageCosts(0, 0, 0, 0, 0, 0, held_on_host=[stage.offloadable_bytes for stage in estimate.stages])
        moved, number = schedule.priced(moved), len(estimate.stages)
        on_host = [-held_after_each(program, moved, number).min(initial=0.0) for program in schedule.programs]
        return [
            RankBytes(
                rank.rank,
                rank.state.parameters_bytes,
                rank.state.gathered_parameters_bytes,
                rank.state.gradients_bytes,
                rank.state.optimizer_state_bytes + rank.state.copies_bytes,
                (rank.activations_bytes or 0) + rank.recomputed_bytes,
                rank.edge_buffers_bytes,
                rank.peak_bytes,
                rank.state.host_bytes + round(on_host[rank.rank]),
            )
            for rank in estimate.ranks
        ]

    def microbatches(self, split: SplitModel, schedule: Schedule) -> tuple[float, ...]:
        """The most microbatches on each rank that have begun F and not ended their backward, at a time.

        On one of two stages a microbatch counts half. What of it waits on the host does not count.
        """
        stages = self._estimate(split).stages if schedule.offloads else ()
        on_host = [stage.offloadable_bytes / max(1, stage.held_after_forward_bytes) for stage in stages]
        peaks = peaks_of(schedule, StageCosts(0.0, 0.0, 0.0, held_on_host=on_host or 0.0))
        own = map(schedule.placement.stages_of_rank, range(len(peaks)))
        return tuple(peak / len(stages) for peak, stages in zip(peaks, own, strict=True))

    def room(self, split: SplitModel, limit_bytes: float) -> list[float]:
        """What is left for activations on each rank of a limit; negative where nothing is."""
        return [limit_bytes - rank.bytes_beside_activations for rank in self._estimate(split).ranks]

    def _estimate(self, split: SplitModel, schedule: Schedule | None = None) -> MemoryEstimate:
        record, sizes = split.counted.record, split.parameter_sizes
        return self._model.estimate(record, split.partition, split.placement, sizes, schedule)
