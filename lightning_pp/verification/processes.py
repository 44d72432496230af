"""A training in processes of the CPU: what each rank wrote down, or why there are no values."""

from __future__ import annotations

import pickle
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it without saying so

from lightning_pp.rank_processes import Outcome, RankJob, run_processes, variables_on_this_host
from lightning_pp.strategy import PipelineParallelStrategy
from lightning_pp.verification.recording import Facts, Job, train_twice

_GRACE_S = 30.0
_HINT = (
    "If verify() is called at the top of a script, it has to stand under "
    '`if __name__ == "__main__":`, since each process reads the script again.'
)


@dataclass(frozen=True)
class Failure:
    """Why a run has no values.

    Attributes:
        kind: Name of the exception.
        message: Its text; of one that is not of this package, the traceback below.
    """

    kind: str
    message: str


def run(job: Job) -> list[Facts] | Failure:
    """Trains in ``job.num_processes`` processes of the CPU; each rank's facts, or the first failure."""
    job.folder.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    number = job.num_processes
    jobs = [
        RankJob(
            rank,
            pickle.dumps(partial(_train, job, rank)),
            job.folder / f"rank{rank}.log",
            variables_on_this_host(rank, number, store.port) if number > 1 else {},
        )
        for rank in range(number)
    ]
    try:
        outcomes = run_processes(jobs, "lightning_pp.verification.recording", grace_s=_GRACE_S)
    except BrokenPipeError:  # while one was started
        return Failure("RuntimeError", f"a process could not be started. {_HINT}")
    failed = sorted((outcome for outcome in outcomes if not outcome.has_returned), key=lambda outcome: outcome.seconds)
    failures = [_failure(outcome) for outcome in failed if outcome.error or outcome.exit_code is not None]
    # a rank that only hears of another's failure may be the first to say so
    own = [failure for failure in failures if failure.kind != "RankStoppedError"]
    return next(iter([*own, *failures]), None) or [outcome.value for outcome in outcomes]


def _failure(outcome: Outcome) -> Failure:
    if outcome.error:
        return Failure(outcome.error.partition(":")[0], outcome.noted)
    told = f"a process has ended with exit code {outcome.exit_code} and without a result"
    lines = "".join(f"\n  {line}" for line in outcome.output.splitlines()[-8:])
    return Failure("RuntimeError", f"{told}. Its last lines:{lines}" if lines else f"{told}. {_HINT}")


def _train(job: Job, rank: int, note: Callable[[str], None]) -> Facts:
    torch.set_num_threads(1)  # the same sums in the same order, with and without a pipeline
    try:
        if job.num_processes > 1:
            PipelineParallelStrategy()  # prepares the process as the user's own did, which is only unpickled here
        with warnings.catch_warnings(record=True) as caught:
            facts = train_twice(job, rank)
        facts.warnings = list(dict.fromkeys(str(each.message) for each in caught))
        return facts
    except BaseException as error:
        is_own = type(error).__module__.startswith("lightning_pp")
        note(str(error) if is_own else f"{error}\n{traceback.format_exc()}")
        raise
