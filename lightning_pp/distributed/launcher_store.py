"""The key-value store of ``torchrun``, which it serves to all the processes that it starts, and starts again.

Processes tell one another in it where they go on, before they have made a process group. They make that over the store,
too, each attempt under a name of its own: torch 2.13 uses the same names in all attempts, so that a rank may find there
the address of a process of the attempt before, and fail when it tries to connect to that.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # torch exports it without saying so

_PREFIX = "lightning_pp/launch"
_CONNECT_SECONDS = 60.0


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
            DistStoreError: Nobody has put one in that time.
        """
        told: bytes = self._store.get(f"{_PREFIX}/{name}")
        return told.decode()


def launcher_store() -> LauncherStore | None:
    """The store of the torchrun that has started this process; None where there is none that outlives an attempt."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = _connected()
    store.set_timeout(timedelta(minutes=5))
    return LauncherStore(store)


def store_of_attempt(timeout: timedelta) -> PrefixStore | None:
    """For the process group of an attempt after the first: what no other attempt has written to.

    Args:
        timeout: How long to wait for what another rank puts there.

    Returns:
        None in a first attempt, and where nothing outlives an attempt.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = _connected()
    store.set_timeout(timeout)
    return PrefixStore(f"{_PREFIX}/attempt/{attempt}", store)


def _connected() -> TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_SECONDS))
