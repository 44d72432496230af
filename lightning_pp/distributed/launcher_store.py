"""The key-value store that ``torchrun`` serves to the processes that it starts and restarts.

Processes tell one another in it where they go on, before they have made a process group. They make that over the store,
too, each attempt under a name of its own: torch 2.13 uses the same names in all attempts, so that a rank may find there
the address of a process of the attempt before, and fail when it tries to connect to that.

With one ``torchrun`` on each node every one counts the failures of its own processes (``TORCHELASTIC_RESTART_COUNT``),
and the round of their rendezvous stays with them, so the processes agree on a name: see :func:`meeting.meet`.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined] # torch exports them without saying so
    DistError,
    PrefixStore,
    TCPStore,
)

from lightning_pp.distributed.meeting import TextStore, meet

_PREFIX = "lightning_pp/launch"
_CONNECT_SECONDS = 60.0


def launcher_store() -> TextStore | None:
    """The store of the torchrun that has started this process; None where there is none that outlives an attempt.

    Raises:
        ConnectionError: It does not answer.
    """
    if not _outlives_attempts():
        return None
    store = _connected()
    store.set_timeout(timedelta(minutes=5))
    return _texts(store)


def attempt_store(timeout: timedelta) -> PrefixStore | None:
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
    name, _ = meet(_texts(store), *ranks_of_launcher(), timeout)
    return PrefixStore(f"{_PREFIX}/attempt/{name}", store)


def ranks_of_launcher() -> tuple[int, int]:
    """The rank of this process and the number of ranks, as torchrun has set them."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _texts(store: TCPStore) -> TextStore:
    return TextStore(store, _PREFIX, f"the store of torchrun ({_address()})")


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
            f"The store of torchrun ({_address()}) did not answer within {_CONNECT_SECONDS:.0f} s. The torchrun of "
            "the first node has ended, or this node cannot reach it. Start the job again, on all nodes."
        ) from error
