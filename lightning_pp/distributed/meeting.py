"""The ranks meet over a key-value store: before they have a process group, and again before another run.

Which processes are of one attempt is nothing that a launcher tells, and what processes of an earlier attempt, or of an
earlier meeting, have left in the store stays there. So the processes that are there now agree on a new name.
"""

from __future__ import annotations

import json
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_pp.distributed._torch_private import process_groups
from lightning_pp.distributed.control import hang_up

_POLL_S = 0.02
_MOST_NAMED = 8


class TextStore:
    """Texts by name, the same for all ranks.

    Args:
        store: Holds them; its timeout is that of :meth:`wait_for`.
        prefix: Of all names.
        description: Names the store, and where it is, in errors.
    """

    def __init__(self, store: Store, prefix: str, description: str) -> None:
        self._store: Any = store
        self._prefix = prefix
        self.description = description

    def write(self, name: str, text: str) -> None:
        """Puts a text; a text of that name is replaced."""
        self._store.set(f"{self._prefix}/{name}", text)

    def read(self, name: str) -> str | None:
        """The text of that name; None if there is none yet."""
        if not self._store.check([f"{self._prefix}/{name}"]):
            return None
        return self.wait_for(name)

    def wait_for(self, name: str) -> str:
        """The text of that name, once it is there.

        Raises:
            TimeoutError: Nobody has put one in the store's timeout.
        """
        try:
            text: bytes = self._store.get(f"{self._prefix}/{name}")
        except DistStoreError as error:
            raise TimeoutError(f"Nothing was written to {self.description} under {name}.") from error
        return text.decode()

    def count(self, name: str, more: int = 1) -> int:
        """Adds to a number, which is 0 at first; returns what it is then."""
        return int(self._store.add(f"{self._prefix}/{name}", more))


def meet(store: TextStore, rank: int, num_ranks: int, timeout: timedelta, telling: str = "") -> tuple[str, list[str]]:
    """Waits for all ranks. They get a new name, which rank 0 gives to one process of each rank, and what each tells.

    What other processes have left in the store, or still write to it, is never taken for an answer. Each process makes
    an identifier, which nobody has seen before, and puts it under its rank. Rank 0 gives its name to each identifier
    that it finds, dead ones too, whose answers nobody reads. A process that gets a name says so under that name. When
    rank 0 finds that all those now under the ranks have said so, it declares the name complete, and all return it. A
    rank 0 that is started anew gives another name to the processes that still wait, and they follow it; but first they
    look whether the former name was completed, as it then was before they got the other.

    Every rank has to call it as often as the others.

    Args:
        store: The same for all ranks.
        rank: Of this process.
        num_ranks: How many meet.
        timeout: How long to wait for all of them.
        telling: What this rank tells the others.

    Returns:
        The name, and what each rank tells.

    Raises:
        TimeoutError: They have not all come in that time.
    """
    if rank == 0:
        return _give_name(store, num_ranks, telling, timeout.total_seconds())
    return _take_name(store, rank, num_ranks, telling, timeout.total_seconds())


def _give_name(store: TextStore, num_ranks: int, telling: str, seconds: float) -> tuple[str, list[str]]:
    """Gives all other ranks a name, and what each tells."""
    deadline = time.monotonic() + seconds
    name = uuid.uuid4().hex
    texts: dict[int, str] = {0: f" {telling}"}
    seen = -1
    late = list(range(1, num_ranks))
    while late:
        news = store.count(f"{num_ranks}/news", 0)
        if news != seen:
            seen, late = news, []
            for rank in range(1, num_ranks):
                text = store.read(f"{num_ranks}/rank/{rank}")
                if text is None or store.read(f"{name}/taken/{rank}") != text:
                    late.append(rank)
                if text is not None and texts.get(rank) != text:
                    texts[rank] = text
                    store.write(f"{text.partition(' ')[0]}/name", name)
        elif time.monotonic() > deadline:
            which = ", ".join(map(str, late[:_MOST_NAMED])) + (", ..." if len(late) > _MOST_NAMED else "")
            raise TimeoutError(
                f"{len(late)} of {num_ranks} ranks ({which}) did not reach {store.description} within {seconds:.0f} "
                "s. Start the job again, on all nodes."
            )
        else:
            time.sleep(_POLL_S)
    messages = [texts[rank].partition(" ")[2] for rank in range(num_ranks)]
    store.write(f"{name}/complete", json.dumps(messages))
    return name, messages


def _take_name(store: TextStore, rank: int, num_ranks: int, telling: str, seconds: float) -> tuple[str, list[str]]:
    """Waits for a name that a rank 0 gives this process and completes, and for what all tell."""
    deadline = time.monotonic() + seconds
    identifier = uuid.uuid4().hex
    text = f"{identifier} {telling}"
    store.write(f"{num_ranks}/rank/{rank}", text)
    store.count(f"{num_ranks}/news")
    name: str | None = None
    while time.monotonic() < deadline:
        newest = store.read(f"{identifier}/name")  # before what is asked next: see meet
        if name is not None and (written := store.read(f"{name}/complete")) is not None:
            return name, json.loads(written)
        if newest != name:
            name = newest
            store.write(f"{name}/taken/{rank}", text)
            store.count(f"{num_ranks}/news")
        else:
            time.sleep(_POLL_S)
    raise TimeoutError(
        f"Rank {rank} got no answer from rank 0 (for all {num_ranks} ranks) through {store.description} within "
        f"{seconds:.0f} s. Start the job again, on all nodes."
    )


class _Ended:
    """The group of all ranks that has ended, not held: that would keep its sockets."""

    world: Any = None


def end_world() -> None:
    """Ends what this process waits for in any group, from any thread. None of them can be used again."""
    _note_end()
    for group in process_groups():
        hang_up(group)


@contextmanager
def among_all_ranks() -> Iterator[None]:
    """Around a collective of all ranks. One that fails, as after a time-out, has ended the group."""
    try:
        yield
    except RuntimeError:
        _note_end()
        raise


def store_if_ended(store: Store, rank: int, num_ranks: int, timeout: timedelta) -> Store | None:
    """Waits for all ranks. Where the group of all ranks has ended on one of them, every rank destroys all its groups.

    The ranks meet in the store, since a collective would fail, or wait for ever. Every rank has to call it as often.

    Args:
        store: Of the job.
        rank: Of this process.
        num_ranks: Of the job.
        timeout: How long to wait for the others.

    Returns:
        What to make the group of all ranks with; None if there is still one.

    Raises:
        TimeoutError: Not all ranks have come in that time.
    """
    has_ended = _Ended.world is not None and _Ended.world() is dist.group.WORLD
    texts = TextStore(store, "lightning_pp/meeting", "the job's key-value store to begin another run")
    name, messages = meet(texts, rank, num_ranks, timeout, "ended" if has_ended else "")
    if not any(messages):
        return None
    dist.destroy_process_group()
    return PrefixStore(f"lightning_pp/meeting/{name}", store)


def _note_end() -> None:
    _Ended.world = weakref.ref(cast(Any, dist.group.WORLD))
