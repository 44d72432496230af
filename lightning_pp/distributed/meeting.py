"""The ranks meet again for another run in the same processes, and make their process group anew where one has ended."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_pp.distributed._torch_private import groups_of_process
from lightning_pp.distributed.control import hang_up

_POLL_S = 0.02


class _Worlds:
    """What this process knows of its group of all ranks, without holding it: that would keep its sockets."""

    met: Any = None
    num_meetings = 0
    ended: Any = None


def end_world() -> None:
    """Ends what this process waits for in any group, from any thread. None of them can be used again."""
    _note_end()
    for group in groups_of_process():
        hang_up(group)


@contextmanager
def among_all_ranks() -> Iterator[None]:
    """Around a collective of all ranks. One that fails, as after a time-out, has ended the group."""
    try:
        yield
    except RuntimeError:
        _note_end()
        raise


def store_if_ended(store: Any, num_ranks: int, timeout: timedelta) -> Store | None:
    """Waits for all ranks. Where the group of all ranks has ended on one of them, every rank destroys all its groups.

    The ranks meet in the store, since a collective would fail, or wait for ever. Every rank has to call it as often.

    Args:
        store: Of the job.
        num_ranks: Of the job.
        timeout: How long to wait for the others.

    Returns:
        What to make the group of all ranks with; None if there is still one.

    Raises:
        RuntimeError: Not all ranks have come in that time.
    """
    if not _is_world(_Worlds.met):
        _Worlds.met, _Worlds.num_meetings = weakref.ref(cast(Any, dist.group.WORLD)), 0
    _Worlds.num_meetings += 1
    name = f"lightning_pp/meeting/{_Worlds.num_meetings}"
    if _is_world(_Worlds.ended):
        store.add(f"{name}/ended", 1)
    num_here = store.add(f"{name}/here", 1)
    end = time.monotonic() + timeout.total_seconds()
    while num_here < num_ranks:
        if time.monotonic() > end:
            raise RuntimeError(f"{num_here} of {num_ranks} ranks have come to begin another run in {timeout}.")
        time.sleep(_POLL_S)
        num_here = store.add(f"{name}/here", 0)
    if not store.check([f"{name}/ended"]):
        return None
    dist.destroy_process_group()
    return PrefixStore(name, store)


def _note_end() -> None:
    _Worlds.ended = weakref.ref(cast(Any, dist.group.WORLD))


def _is_world(noted: Any) -> bool:
    return noted is not None and noted() is dist.group.WORLD
