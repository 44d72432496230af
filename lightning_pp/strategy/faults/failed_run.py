"""After a failure on one rank the others learn of it, name the rank, and end."""

from __future__ import annotations

import atexit
import itertools
import os
import socket
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pp.distributed.meeting import among_all_ranks, end_world
from lightning_pp.distributed.watch.processes import this_machine
from lightning_pp.distributed.watch.table import RankFailure, Table
from lightning_pp.distributed.watch.this_rank import RankStoppedError, ThisRank
from lightning_pp.distributed.watch.watchdog import Watchdog, end_process
from lightning_pp.runtime.executor import failed_action
from lightning_pp.strategy._torch_private import job_store
from lightning_pp.strategy.faults.tracebacks import tell_shortly, user_frames

# what others died of is known by then: an exception is told at once, a killed process is seen in a second
_CAUSE_S = 6.0
# a rank that has timed out asks where the others stand before one that has lost its connection by that
_CAUSE_OF_TIMEOUT_S = 4.0
# what backends say of a rank that did not answer
_SIGNS_OF_OTHERS = (
    *("gloo", "Gloo", "NCCL"),
    *("Connection closed", "caused pair closure", "Connection reset", "Broken pipe"),
)

_numbers = itertools.count(1)


class FailedRuns:
    """The failures of one strategy's runs, between :meth:`start` and :meth:`end` of each."""

    def __init__(self) -> None:
        self._watchdog: Watchdog | None = None
        self._rank = 0

    def start(self, this_rank: ThisRank) -> None:
        """Watches the other ranks from here on; every rank has to call it."""
        self.end()
        rank, num_ranks = this_rank.rank, this_rank.num_ranks
        self._rank = rank
        if num_ranks == 1 or not dist.is_initialized():
            return
        # told at once, so that nobody has to ask for it of a process that may have been stopped
        own = (next(_numbers), this_machine(), os.getpid())
        gathered: list[Any] = [None] * num_ranks
        with among_all_ranks():
            dist.all_gather_object(gathered, own)
        run, machine = gathered[0][0], own[1]
        pids = {other: pid for other, (_, its, pid) in enumerate(gathered) if other != rank and machine == its != ""}

        def wake() -> None:
            this_rank.wake()
            end_world()

        self._watchdog = Watchdog(
            Table.of_job(job_store(), run, num_ranks, rank),
            replace(this_rank, wake=wake, place=lambda: _on_host(this_rank.place())),
            pids,
            store_is_of_rank_0=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        )
        atexit.register(self.end)

    def note(self, error: BaseException, place: str) -> None:
        """Reports ``error``, which ends the run on this rank, to the others, or adds to it which rank failed.

        An error that says no more than that another rank has gone gets a new message.

        Args:
            error: The exception.
            place: Where the rank is and what it was doing.
        """
        watchdog = self._watchdog
        if watchdog is None:
            return
        if isinstance(error, SIGTERMException):  # all ranks end before the same batch
            self.end()
            return
        if _is_about_others(error):
            failure = self._failure_of_others(watchdog, error)
            if failure is not None and failure.code != 1:
                end_process(failure)
            if failure is not None:
                cause = (str(failure) if failure.rank != self._rank else f"it {failure.what}").removesuffix(".")
                error.args = (f"This rank ended because {cause}.",)
                tell_shortly(error, f"rank {self._rank} ended because {cause}.")
                watchdog.wait_until_known(failure)
                self.end(failed=True)
                return
            error.args = (f"{error} (No rank has reported a failure of its own.)",)
        what = f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if isinstance(error, SystemExit):
            what = f"called exit({error.code!r})"
        action = failed_action(error)
        place = _on_host(place, action)
        failure = RankFailure(self._rank, place, what, user_frames(error))
        watchdog.post(failure)
        watchdog.wait_until_known(failure)
        if not isinstance(error, SystemExit):
            tell_shortly(error, f"rank {failure.rank} ({place}) failed.", with_frames=True)
        self.end(failed=True)

    def end_all(self, what: str, place: str, code: int) -> None:
        """Ends this process, and those of all other ranks once they learn of it, with the exit code ``code``."""
        failure = RankFailure(self._rank, _on_host(place), what, is_gone=True, code=code)
        watchdog = self._watchdog
        if watchdog is not None:
            failure = watchdog.post(failure)
            watchdog.wait_until_known(failure)
        end_process(failure)

    @staticmethod
    def _failure_of_others(watchdog: Watchdog, error: BaseException) -> RankFailure | None:
        """What ``error``, which is about other ranks, comes of; None if there is nothing to be found."""
        if any(sign in str(error) for sign in ("imed out", "imeout")):
            return watchdog.wait(_CAUSE_OF_TIMEOUT_S) or watchdog.stuck_rank()
        # a rank whose time-out has ended this one's connection has asked by then, and will tell what it found
        return watchdog.wait(_CAUSE_S) or watchdog.stuck_rank() or watchdog.wait(_CAUSE_S - _CAUSE_OF_TIMEOUT_S)

    def end(self, *, failed: bool = False) -> None:
        """The run has ended on this rank, one way or the other."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.end(failed=failed)
            atexit.unregister(self.end)


def _on_host(*parts: str) -> str:
    return ", ".join(part for part in (f"on {socket.gethostname()}", *parts) if part)


def _is_about_others(error: BaseException) -> bool:
    """Whether ``error`` says no more than that another rank did not answer."""
    if isinstance(error, (RankStoppedError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_OTHERS)
