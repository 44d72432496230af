"""The key-value store of ``torchrun``, which it serves to all the processes that it starts, and starts again.

Processes tell one another in it where they go on, before they have made a process group. They make that over the store,
too, each attempt under a name of its own: torch 2.13 uses the same names in all attempts, so that a rank may find there
the address of a process of the attempt before, and fail when it tries to connect to that.

Which processes are of one attempt is nothing that a launcher tells. With one ``torchrun`` on each node every one counts
the failures of its own processes (``TORCHELASTIC_RESTART_COUNT``), and the round of their rendezvous stays with them.
So the processes agree on a name: see :func:`agreed_name`.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined] # torch exports them without saying so
    DistError,
    DistStoreError,
    PrefixStore,
    TCPStore,
)

_PREFIX = "lightning_pp/launch"
_CONNECT_SECONDS = 60.0
_POLL_SECONDS = 0.05
_MOST_NAMED = 8


class LauncherStore:
    """Texts by name, the same for all ranks of a job and for all attempts of it.

    Args:
        store: The store of the launcher.
    """

    def __init__(self, store: TCPStore) -> None:
        self._store = store

    def tell(self, name: str, text: str) -> None:
        """Puts a text; a text of that name is replaced."""
        self._store.set(f"{_PREFIX}/{name}", text)

    def told(self, name: str) -> str | None:
        """The text of that name; None where nobody has put one yet."""
        if not self._store.check([f"{_PREFIX}/{name}"]):
            return None
        return self.wait_for(name)

    def wait_for(self, name: str) -> str:
        """The text of that name, once it is there; waits five minutes.

        Raises:
            TimeoutError: Nobody has put one in that time.
        """
        try:
            told: bytes = self._store.get(f"{_PREFIX}/{name}")
        except DistStoreError as error:
            raise TimeoutError(f"Nothing has come to the store of torchrun ({_address()}) under {name}.") from error
        return told.decode()

    def count(self, name: str, more: int = 1) -> int:
        """Adds to a number, which is 0 at first; returns what it is then."""
        counted: int = self._store.add(f"{_PREFIX}/{name}", more)
        return counted


def launcher_store() -> LauncherStore | None:
    """The store of the torchrun that has started this process; None where there is none that outlives an attempt.

    Raises:
        ConnectionError: It does not answer.
    """
    if not _outlives_attempts():
        return None
    store = _connected()
    store.set_timeout(timedelta(minutes=5))
    return LauncherStore(store)


def store_of_attempt(timeout: timedelta) -> PrefixStore | None:
    """For the process group: what no process of another attempt writes to, and no earlier process group has.

    Every rank of the job has to call it.

    Args:
        timeout: How long to wait for the others, and for what another rank puts there.

    Returns:
        None where nothing outlives an attempt.

    Raises:
        ConnectionError: The store does not answer.
        TimeoutError: Not all ranks have come in that time.
    """
    if not _outlives_attempts():
        return None
    store = _connected()
    store.set_timeout(timeout)
    return PrefixStore(f"{_PREFIX}/attempt/{agreed_name(LauncherStore(store), *ranks_of_launcher(), timeout)}", store)


def ranks_of_launcher() -> tuple[int, int]:
    """The rank of this process and the number of ranks, as torchrun has set them."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def agreed_name(store: LauncherStore, rank: int, num_ranks: int, timeout: timedelta) -> str:
    """A name that is new, and that rank 0 has given to exactly one process of each rank: to those that are there now.

    What processes of other attempts have left in the store, or still write to it, is never taken for an answer. Each
    process makes an identifier, which nobody has seen before, and puts it under its rank. Rank 0 gives its name to each
    identifier that it finds, dead ones too, whose answers nobody reads. A process that gets a name says so under that
    name. When rank 0 finds that all those now under the ranks have said so, it declares the name complete, and all
    return it. A rank 0 that is started anew gives another name to the processes that still wait, and they follow it;
    but first they look whether the former name was completed, as it then was before they got the other.

    Every rank of the job has to call it as often as the others.

    Args:
        store: Of the launcher.
        rank: Of this process.
        num_ranks: Processes of an attempt.
        timeout: How long to wait for all of them.

    Raises:
        TimeoutError: They have not all come in that time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    missing = f"in {timeout.total_seconds():.0f} s, so the ranks cannot agree on which processes are of this attempt"
    if rank == 0:
        late = _give_name(store, name := uuid.uuid4().hex, num_ranks, deadline)
        if late:
            which = ", ".join(map(str, late[:_MOST_NAMED])) + (", ..." if len(late) > _MOST_NAMED else "")
            raise TimeoutError(
                f"{len(late)} of {num_ranks} ranks ({which}) have not come to the store of torchrun ({_address()}) "
                f"{missing}. Start the job again, on all nodes."
            )
        return name
    given = _take_name(store, rank, num_ranks, deadline)
    if given is None:
        raise TimeoutError(
            f"Rank {rank} has got no answer of rank 0 for all {num_ranks} ranks from the store of torchrun "
            f"({_address()}) {missing}. Start the job again, on all nodes."
        )
    return given


def _give_name(store: LauncherStore, name: str, num_ranks: int, deadline: float) -> list[int]:
    """Gives all other ranks the name of rank 0; returns those that have not taken it when the time is over."""
    answered: dict[int, str] = {}
    seen = -1
    late = list(range(1, num_ranks))
    while late:
        news = store.count(f"{num_ranks}/news", 0)
        if news != seen:
            seen, late = news, []
            for rank in range(1, num_ranks):
                identifier = store.told(f"{num_ranks}/rank/{rank}")
                if identifier is None or store.told(f"{name}/taken/{rank}") != identifier:
                    late.append(rank)
                if identifier is not None and answered.get(rank) != identifier:
                    answered[rank] = identifier
                    store.tell(f"{identifier}/name", name)
        elif time.monotonic() > deadline:
            return late
        else:
            time.sleep(_POLL_SECONDS)
    store.tell(f"{name}/complete", "")
    return late


def _take_name(store: LauncherStore, rank: int, num_ranks: int, deadline: float) -> str | None:
    """The name that a rank 0 has given this process and completed; None when the time is over."""
    identifier = uuid.uuid4().hex
    store.tell(f"{num_ranks}/rank/{rank}", identifier)
    store.count(f"{num_ranks}/news")
    name: str | None = None
    while time.monotonic() < deadline:
        newest = store.told(f"{identifier}/name")  # before what is asked next: see agreed_name
        if name is not None and store.told(f"{name}/complete") is not None:
            return name
        if newest != name:
            name = newest
            store.tell(f"{name}/taken/{rank}", identifier)
            store.count(f"{num_ranks}/news")
        else:
            time.sleep(_POLL_SECONDS)
    return None


def _outlives_attempts() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _connected() -> TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait = timedelta(seconds=_CONNECT_SECONDS)
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
    except DistError as error:
        raise ConnectionError(
            f"The store of torchrun ({_address()}) does not answer in {_CONNECT_SECONDS:.0f} s: the torchrun of the "
            "first node has ended, or cannot be reached from this one. Start the job again, on all nodes."
        ) from error
