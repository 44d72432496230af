"""Which process watches which ranks: one process watches all, or each process of a launcher its own rank."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # torch exports it without saying so
from torch.distributed.rendezvous import rendezvous

from lightning_pp.distributed.launcher_store import attempt_store
from lightning_pp.doctor.sharing import variables_of_rank
from lightning_pp.rank_processes import Outcome, variables_on_this_host, variables_to_meet

_SLACK = timedelta(seconds=90)
_PREFIX = "lightning_pp_doctor_"
_OWN_OF_LAUNCHER = (
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("NODE_RANK",),
)


class Team:
    """All ranks on this host, watched by this process.

    Args:
        num_ranks: Of each check.
        shares_device: Whether all ranks are on one device.

    Attributes:
        num_ranks: As given.
        shares_device: As given.
        is_leader: Whether this process judges and prints.
    """

    def __init__(self, num_ranks: int, *, shares_device: bool = False) -> None:
        self.num_ranks = num_ranks
        self.shares_device = shares_device
        self.is_leader = True
        self._kept: list[Any] = []

    def begin(self, number: int, limit_s: float) -> tuple[dict[int, dict[str, str]], Path, float]:
        """Before the processes of a check start.

        Args:
            number: Of the check.
            limit_s: The seconds that it has; the leader's count.

        Returns:
            The variables of each rank that this process watches, a folder for all, and the leader's ``limit_s``.
        """
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self._kept = [store, folder]  # those of the check before go
        of_ranks = {
            rank: {
                **variables_on_this_host(rank, self.num_ranks, store.port),
                **(variables_of_rank(rank, self.num_ranks) if self.shares_device else {}),
            }
            for rank in range(self.num_ranks)
        }
        return of_ranks, Path(folder.name), limit_s

    def share(self, number: int, outcomes: Sequence[Outcome], limit_s: float) -> list[Outcome]:
        """How the processes of all ranks ended, on the leader; elsewhere nothing."""
        return list(outcomes)

    def end(self) -> None:
        """All checks are done."""
        self._kept.clear()


class LauncherTeam(Team):
    """One rank for each process of ``torchrun`` or another launcher, on its host and with its device.

    Every check needs processes that may hang, fail or be killed, so that each process of the launcher starts one, and
    watches it.
    """

    def __init__(self) -> None:
        of_attempt = attempt_store(timedelta(minutes=10))
        store, rank, num_ranks = next(iter(rendezvous("env://")))
        super().__init__(int(num_ranks))
        self._store: Any = PrefixStore("lightning_pp/doctor", of_attempt or store)
        self._rank = int(rank)
        self.is_leader = rank == 0

    def begin(self, number: int, limit_s: float) -> tuple[dict[int, dict[str, str]], Path, float]:
        num_ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        if self.is_leader:
            server = TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False)
            # a folder of one host would not be seen by the others; the working folder of a job usually is
            is_one_node = num_ranks_here == self.num_ranks
            folder = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=None if is_one_node else os.getcwd())
            self._kept = [server, folder]
            self._store.set(f"{number}/begin", pickle.dumps((server.port, folder.name, limit_s)))
        self._store.set_timeout(timedelta(minutes=10))  # the leader may yet wait for a rank of the check before
        port, name, limit_s = pickle.loads(self._store.get(f"{number}/begin"))
        mine = {name: os.environ[name] for name in _OWN_OF_LAUNCHER if name in os.environ}
        mine["LOCAL_RANK"] = os.environ.get("LOCAL_RANK", str(self._rank))
        mine.setdefault("LOCAL_WORLD_SIZE", str(num_ranks_here))
        mine |= variables_to_meet(self._rank, self.num_ranks, os.environ["MASTER_ADDR"], port)
        return {self._rank: mine}, Path(name), limit_s

    def share(self, number: int, outcomes: Sequence[Outcome], limit_s: float) -> list[Outcome]:
        self._store.set(f"{number}/outcome/{self._rank}", pickle.dumps(outcomes[0]))
        if not self.is_leader:
            return []
        self._store.set_timeout(timedelta(seconds=limit_s) + _SLACK)
        found: list[Outcome] = []
        for rank in range(self.num_ranks):
            try:
                found.append(pickle.loads(self._store.get(f"{number}/outcome/{rank}")))
            except dist.DistStoreError as error:
                found.append(Outcome(rank, error=f"nothing: its process of the launcher does not answer ({error})"))
        return found

    def end(self) -> None:
        self._store.set_timeout(_SLACK)
        self._store.set(f"end/{self._rank}", b"")
        for rank in range(self.num_ranks) if self.is_leader else ():  # it may be who serves the store, and goes last
            self._store.get(f"end/{rank}")
        self._kept.clear()


def is_launched() -> bool:
    """Whether a launcher has started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
