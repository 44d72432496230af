"""Checks that a training ends if one rank fails, and that it names this rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_pp.doctor.checks.trainings import Batch, Chain, batches, loader, num_blocks_for, trainer_for
from lightning_pp.doctor.findings import Check, Finding, Rank, Status
from lightning_pp.rank_processes import Outcome

_AT_BATCH = 2
_MOST_S = 60.0
_FAILING = "failing"


def _raise(device: torch.device) -> None:
    raise ValueError("the doctor's own error")


def _die(device: torch.device) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _take_all_memory(device: torch.device) -> None:
    if device.type == "cpu":
        torch.empty(1 << 60, dtype=torch.uint8)
    kept = [torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(10_000)]
    raise AssertionError(f"the device gave {len(kept)} GiB")


_WAYS: dict[str, Callable[[torch.device], None]] = {
    "an exception": _raise,
    "SIGKILL": _die,
    "out of memory": _take_all_memory,
}


class Failing(Chain):
    """Fails on one rank, in a batch after the first ones."""

    def __init__(self, rank: Rank, way: str) -> None:
        super().__init__(num_blocks_for(rank))
        self._rank, self._way = rank, way

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == _AT_BATCH and self._rank.rank == failing_rank(self._rank.num_ranks):
            self._rank.note(_FAILING)
            _WAYS[self._way](self._rank.device)
        return super().training_step(batch, batch_idx)


def fail(rank: Rank, way: str) -> None:
    """A training of which the last rank fails."""
    trainer = trainer_for(rank, callbacks=[])
    trainer.fit(Failing(rank, way), loader(batches(_AT_BATCH + 3)))


def judge_ends(outcomes: Sequence[Outcome]) -> list[Finding]:
    """All processes have to end, none of them well, and every one that survives says whose failure it was."""
    number = failing_rank(len(outcomes))
    victim, others = outcomes[number], [outcome for outcome in outcomes if outcome.rank != number]
    at = victim.noted_after_s
    late = [outcome for outcome in outcomes if outcome.exit_code is None or outcome.seconds - at > _MOST_S]
    unaware = [outcome for outcome in others if outcome.has_returned]
    silent = [outcome for outcome in others if f"because rank {number} " not in f"{outcome.error}{outcome.output}"]
    if victim.noted != _FAILING:
        found = f"The training did not reach batch {_AT_BATCH}: {victim}."
    elif victim.has_returned:
        found = f"Rank {number} should have failed but did not."
    elif late:
        ranks = ", ".join(str(outcome.rank) for outcome in late)
        found = f"Ranks {ranks} had not ended {max(o.seconds for o in late) - at:.0f} s after rank {number} failed."
    elif unaware:
        found = f"Rank {unaware[0].rank} ended as if nothing had happened when rank {number} failed."
    elif silent:
        found = f"Rank {silent[0].rank} ended without saying that rank {number} failed: {silent[0]}."
    else:
        seconds = max(outcome.seconds for outcome in outcomes) - at
        found = f"All ended {seconds:.1f} s after rank {number} failed, and the others named it."
        return [Finding(Status.OK, found)]
    return [Finding(Status.FAILURE, found, _ADVICE)]


def failing_rank(num_ranks: int) -> int:
    """The rank that fails: the last one, so that the one that prints survives."""
    return num_ranks - 1


_ADVICE = "A job that fails may hang here: set a timeout= of the strategy and watch jobs; attach the JSON to an issue."
CHECKS = [
    Check(
        "failures",
        "a training of which one rank fails ends within a minute on all ranks, which name it",
        fail,
        way=way,
        arguments={"way": way},
        limit_s=_MOST_S + 30,
        judge_ends=judge_ends,
    )
    for way in _WAYS
]
