"""Small messages between the ranks of a pipeline, and between the replicas of the last stage, over CPU groups."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.distributed.loopback import gloo_on_loopback
from lightning_pp.errors import ConfigurationError

T = TypeVar("T")

# Most messages (a few logged values) fit into one frame, so they cost one collective; longer ones cost two.
_FRAME_BYTES = 4096
_LENGTH_BYTES = 8
# of a message that nobody sends
_TAG_OF_NOTHING = (1 << 30) + 5


@dataclass
class ControlGroups:
    """Who talks to whom outside the pipeline's schedule.

    Attributes:
        pipeline: CPU (gloo) group of the ranks of this replica's pipeline; None for a pipeline of one rank.
        data_parallel: CPU (gloo) group of the ranks at this rank's place in every replica; None for one replica.
        last_stage_rank: Rank within ``pipeline`` that holds the last stage, hence the losses, logs and metrics.
    """

    pipeline: dist.ProcessGroup | None = None
    data_parallel: dist.ProcessGroup | None = None
    last_stage_rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.last_stage_rank < self.pipeline_size:
            raise ValueError(
                f"last_stage_rank={self.last_stage_rank} is not a rank of a pipeline of {self.pipeline_size} ranks"
            )

    @property
    def pipeline_size(self) -> int:
        return 1 if self.pipeline is None else self.pipeline.size()

    @property
    def num_replicas(self) -> int:
        return 1 if self.data_parallel is None else self.data_parallel.size()

    @property
    def replica(self) -> int:
        return 0 if self.data_parallel is None else self.data_parallel.rank()

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline is None or self.pipeline.rank() == self.last_stage_rank

    def abandon(self) -> None:
        """After an error: ends what the other ranks wait for, and the groups with it; nothing is sent here again."""
        for group in (self.pipeline, self.data_parallel):
            hang_up(group)

    def replace_by(self, others: ControlGroups) -> None:
        """Frees the groups and takes on others of the same ranks."""
        for group in (self.pipeline, self.data_parallel):
            if group is not None:
                dist.destroy_process_group(group)
        self.pipeline, self.data_parallel = others.pipeline, others.data_parallel

    def share(self, produce: Callable[[], T], what: str) -> T:
        """Calls ``produce`` on the last stage and returns its result on every rank of the pipeline.

        Every rank of the pipeline has to call this. The last stage returns the object itself, the others a copy.

        Args:
            produce: Makes an object that can be pickled; called on the last stage only.
            what: Names the object in error messages.

        Raises:
            Exception: What ``produce`` raised, on every rank of the pipeline.
            TypeError: The object cannot be pickled, on every rank of the pipeline.
        """
        if self.pipeline is None or self.pipeline_size == 1:
            return produce()
        if not self.is_last_stage:
            failed, result = pickle.loads(_broadcast(b"", self.pipeline, self.last_stage_rank))
            if failed:
                raise result
            return result  # type: ignore[no-any-return]
        try:
            produced = produce()
            payload = pickled((False, produced), what)
        except Exception as error:
            _broadcast(pickled_error(error), self.pipeline, self.last_stage_rank)
            raise
        _broadcast(payload, self.pipeline, self.last_stage_rank)
        return produced

    def gather(self, item: T, what: str) -> list[T]:
        """The ``item`` of every replica, in the order of the replicas; every rank of the group has to call this.

        Args:
            item: Can be pickled.
            what: Names it. Replicas that have come to different places tell each other different things.

        Raises:
            ConfigurationError: Another replica gathers something else; on every rank of the group.
        """
        return self.start_gather(item, what)()

    def start_gather(self, item: T, what: str) -> Callable[[], list[T]]:
        """:meth:`gather`, waited for when the returned function is called; nothing is gathered here before that."""
        if self.data_parallel is None or self.num_replicas == 1:
            return lambda: [item]
        finish = _start_all_gather(pickle.dumps((what, item)), self.data_parallel)

        def finished() -> list[T]:
            told = [pickle.loads(payload) for payload in finish()]
            _check_same_place([place for place, _ in told])
            return [found for _, found in told]

        return finished

    def gather_in_pipeline(self, item: T) -> list[T]:
        """Returns the ``item`` of every rank of the pipeline, in order; every one of them has to call it."""
        if self.pipeline is None or self.pipeline_size == 1:
            return [item]
        return [pickle.loads(payload) for payload in _start_all_gather(pickle.dumps(item), self.pipeline)()]

    def all_or_none(self, work: Callable[[], T], what: str) -> list[T]:
        """Calls ``work`` and returns what it returned on every rank of the pipeline, in order.

        How ``work`` ended is known to all ranks before any of them goes on. Every rank of the pipeline has to call
        this, and ``work`` must wait for no other rank.

        Args:
            work: Makes an object that can be pickled.
            what: Names the object in error messages.

        Raises:
            Exception: ``work`` raised it, on one rank or several: the same one on every rank of the pipeline.
        """
        if self.pipeline is None:
            return [work()]
        mine: Exception | None = None
        try:
            payload = pickled((False, work()), what)
        except Exception as error:
            mine, payload = error, pickled_error(error)
        told = [pickle.loads(each) for each in _start_all_gather(payload, self.pipeline)()]
        failures = [(rank, outcome) for rank, (failed, outcome) in enumerate(told) if failed]
        if failures:
            rank, failure = failures[-1]
            raise mine if mine is not None and rank == self.pipeline.rank() else failure
        return [outcome for _, outcome in told]


@gloo_on_loopback()
def make_control_groups(
    num_pipeline_ranks: int, num_replicas: int, last_stage_rank: int, timeout: timedelta | None
) -> ControlGroups:
    """Makes the groups of this rank, global rank = pipeline rank x replicas + replica; every rank has to call it.

    Args:
        num_pipeline_ranks: Ranks along the pipeline.
        num_replicas: Replicas of the pipeline.
        last_stage_rank: Pipeline rank that holds the last stage.
        timeout: How long a message may take.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0

    def group_among(candidates: list[list[int]]) -> dist.ProcessGroup | None:
        mine = None
        for members in candidates:
            group = dist.new_group(members, backend="gloo", timeout=timeout) if len(members) > 1 else None
            mine = group if rank in members else mine
        return mine

    ranks = [[place * num_replicas + replica for place in range(num_pipeline_ranks)] for replica in range(num_replicas)]
    return ControlGroups(
        group_among(ranks), group_among([list(row) for row in zip(*ranks, strict=True)]), last_stage_rank
    )


def hang_up(group: dist.ProcessGroup | None) -> None:
    """Ends a gloo group: who waits in it for this rank, or will, gets an error now; the group is of no more use.

    There is no call for it, and destroying a group waits for what is under way. A receive that times out does it: to
    gloo, a timeout is the end of all connections of the group.
    """
    if group is None:
        return
    for peer in range(group.size()):
        if peer != group.rank():
            # one by one: with a peer that has hung up already, it fails at once and ends nothing
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                work = dist.irecv(nothing, group=group, group_src=peer, tag=_TAG_OF_NOTHING)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


def _check_same_place(told: Sequence[str]) -> None:
    """Raises :class:`ConfigurationError` if replicas, in order, have told each other different things."""
    other = next((replica for replica, what in enumerate(told) if what != told[0]), None)
    if other is not None:
        raise ConfigurationError(
            f"Replicas are at different points of the run: replica 0 tells {told[0]}, and replica {other} tells "
            f"{told[other]}. Their data have different numbers of batches, or your code took different branches on "
            'them. For data of unequal length set unequal_data="shortest" on the strategy: all replicas then end '
            "when the first one runs out of data."
        )


def pickled(outcome: tuple[bool, Any], what: str) -> bytes:
    """What :meth:`ControlGroups.share` sends; raises ``TypeError`` with the name of ``what`` cannot be pickled."""
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be sent from the last stage to the other ranks, because pickling it fails "
            f"({type(error).__name__}: {error}). Use tensors, numbers, strings, and containers of these."
        ) from error


def pickled_error(error: Exception) -> bytes:
    """An error as :func:`pickled` would give it; one that does not survive pickling is described."""
    try:
        payload = pickle.dumps((True, error))
        pickle.loads(payload)  # exceptions with their own __init__ may pickle and yet not come back
    except Exception:
        payload = pickle.dumps((True, RuntimeError(f"the last stage failed: {type(error).__name__}: {error}")))
    return payload


def _frame(payload: bytes) -> Tensor:
    frame = bytearray(_FRAME_BYTES)
    frame[:_LENGTH_BYTES] = len(payload).to_bytes(_LENGTH_BYTES, "little")
    head = payload[: _FRAME_BYTES - _LENGTH_BYTES]
    frame[_LENGTH_BYTES : _LENGTH_BYTES + len(head)] = head
    return torch.frombuffer(frame, dtype=torch.uint8)


def _open_frame(frame: Tensor) -> tuple[int, bytes]:
    content = frame.numpy().tobytes()
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    return length, content[_LENGTH_BYTES : _LENGTH_BYTES + length]


def _rest(payload: bytes, num_bytes: int) -> Tensor:
    rest = payload[_FRAME_BYTES - _LENGTH_BYTES :]
    return torch.frombuffer(bytearray(rest.ljust(num_bytes, b"\0")), dtype=torch.uint8)


def _broadcast(payload: bytes, group: dist.ProcessGroup, source: int) -> bytes:
    frame = _frame(payload)
    dist.broadcast(frame, group=group, group_src=source)
    length, head = _open_frame(frame)
    if (missing := length - len(head)) == 0:
        return head
    rest = _rest(payload, missing)
    dist.broadcast(rest, group=group, group_src=source)
    return head + rest.numpy().tobytes()


def _start_all_gather(payload: bytes, group: dist.ProcessGroup) -> Callable[[], list[bytes]]:
    frames = [torch.empty(_FRAME_BYTES, dtype=torch.uint8) for _ in range(group.size())]
    work = dist.all_gather(frames, _frame(payload), group=group, async_op=True)

    def finish() -> list[bytes]:
        assert work is not None
        work.wait()
        opened = [_open_frame(frame) for frame in frames]
        longest = max(length - len(head) for length, head in opened)
        if longest == 0:
            return [head for _, head in opened]
        rests = [torch.empty(longest, dtype=torch.uint8) for _ in opened]
        dist.all_gather(rests, _rest(payload, longest), group=group)
        return [
            head + rest.numpy().tobytes()[: length - len(head)]
            for (length, head), rest in zip(opened, rests, strict=True)
        ]

    return finish
