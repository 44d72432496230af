"""The stages of each rank of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_pp.errors import ScheduleError


@dataclass(frozen=True)
class Placement:
    """Map between the stages of a model and the ranks of a pipeline.

    Attributes:
        num_ranks: Number of ranks, ``p`` in formulas.
        rank_of_stage: For each stage, in the order of the model, the rank that holds it.
    """

    num_ranks: int
    rank_of_stage: tuple[int, ...]
    _stages_of_rank: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ScheduleError(f"num_ranks is {self.num_ranks}: a pipeline has at least 1 rank")
        stages: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.rank_of_stage):
            if not 0 <= rank < self.num_ranks:
                raise ScheduleError(f"stage {stage} is placed on rank {rank}, but ranks are 0 to {self.num_ranks - 1}")
            stages[rank].append(stage)
        empty = [rank for rank, held in enumerate(stages) if not held]
        if empty:
            raise ScheduleError(
                f"rank {empty[0]} holds no stage: {len(self.rank_of_stage)} stages are placed on {self.num_ranks} "
                "ranks. Give every rank at least one"
            )
        object.__setattr__(self, "_stages_of_rank", tuple(map(tuple, stages)))

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return len(self.rank_of_stage)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in the order of the model."""
        return self._stages_of_rank[rank]

    @property
    def kind(self) -> str:
        """``"one chunk"``, ``"interleaved"``, ``"V"`` or ``"custom"``: what a person calls this placement."""
        num_stages, num_ranks = self.num_stages, self.num_ranks
        if self.rank_of_stage == tuple(stage % num_ranks for stage in range(num_stages)):
            return "one chunk" if num_stages == num_ranks else "interleaved"
        return "V" if self.rank_of_stage == Placement.v_shaped(num_ranks).rank_of_stage else "custom"

    @classmethod
    def interleaved(cls, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Stage ``s`` on rank ``s % num_ranks``; with ``stages_per_rank=1`` the plain pipeline."""
        if stages_per_rank < 1:
            raise ScheduleError(f"stages_per_rank is {stages_per_rank}: give at least 1")
        return cls(num_ranks, tuple(stage % num_ranks for stage in range(num_ranks * stages_per_rank)))

    @classmethod
    def v_shaped(cls, num_ranks: int) -> Placement:
        """Two stages a rank, the second half folded back: rank ``r`` holds stages ``r`` and ``2p - 1 - r``.

        The first and the last stage are both on rank 0, so no transfer happens between the two halves.
        """
        down = tuple(range(num_ranks))
        return cls(num_ranks, down + down[::-1])
