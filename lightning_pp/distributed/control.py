"""Small messages between the ranks of a pipeline, and between the replicas of the last stage, over CPU groups."""

from __future__ import annotations

import contextlib
import math
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
FRAME_BYTES = 4096
_LENGTH_BYTES = 8
# of a message that nobody sends
_TAG_OF_NOTHING = (1 << 30) + 5


@dataclass
class ControlGroups:
    """The groups for messages outside the pipeline's schedule.

    Attributes:
        pipeline: CPU (gloo) group of the ranks of this rank's pipeline, in its order; None for a pipeline of one rank.
        data_parallel: CPU (gloo) group of the ranks at this rank's place in every replica; None for one replica.
        last_stage_rank: Rank within ``pipeline`` that holds the last stage, hence the losses, logs and metrics.
        batch: CPU (gloo) group of all ranks that see this rank's batches: without tensor parallelism ``pipeline``, with
            it the tensor ranks of the first pipeline rank, those of the second, and so on.
        same_stages: CPU (gloo) group of all ranks that hold this rank's stages: without tensor parallelism
            ``data_parallel``, with it the tensor ranks of all replicas.
    """

    pipeline: dist.ProcessGroup | None = None
    data_parallel: dist.ProcessGroup | None = None
    last_stage_rank: int = 0
    batch: dist.ProcessGroup | None = None
    same_stages: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        self.batch, self.same_stages = self.batch or self.pipeline, self.same_stages or self.data_parallel
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
    def num_tensor_ranks(self) -> int:
        return 1 if self.batch is None else self.batch.size() // self.pipeline_size

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline is None or self.pipeline.rank() == self.last_stage_rank

    @property
    def source(self) -> int:
        """Rank within ``batch`` that tells the others: the last stage, of it the first tensor rank."""
        return self.last_stage_rank * self.num_tensor_ranks

    @property
    def is_source(self) -> bool:
        return self.batch is None or self.batch.rank() == self.source

    @property
    def all(self) -> list[dist.ProcessGroup]:
        """Every group once."""
        groups = (self.pipeline, self.data_parallel, self.batch, self.same_stages)
        return list(dict.fromkeys(group for group in groups if group is not None))

    def abandon(self) -> None:
        """After an error: ends what the other ranks wait for, and the groups with it; nothing is sent here again."""
        for group in self.all:
            hang_up(group)

    def replace_by(self, others: ControlGroups) -> None:
        """Frees the groups and takes on others of the same ranks."""
        for group in self.all:
            dist.destroy_process_group(group)
        self.pipeline, self.data_parallel = others.pipeline, others.data_parallel
        self.batch, self.same_stages = others.batch, others.same_stages

    def share(self, produce: Callable[[], T], what: str) -> T:
        """Calls ``produce`` on the last stage and returns its result on every rank of the pipeline.

        Every rank of the pipeline, with all its tensor ranks, has to call this. The last stage's first tensor rank
        returns the object itself, the others a copy.

        Args:
            produce: Makes an object that can be pickled; called on the last stage only.
            what: Names the object in error messages.

        Raises:
            Exception: What ``produce`` raised, on every rank of the pipeline.
            TypeError: The object cannot be pickled, on every rank of the pipeline.
        """
        if self.batch is None or self.batch.size() == 1:
            return produce()
        if not self.is_source:
            failed, result = pickle.loads(_broadcast(b"", self.batch, self.source))
            if failed:
                raise result
            return result  # type: ignore[no-any-return]
        try:
            produced = produce()
            payload = pickled((False, produced), what)
        except Exception as error:
            _broadcast(pickled_error(error), self.batch, self.source)
            raise
        _broadcast(payload, self.batch, self.source)
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
            outcomes = [pickle.loads(payload) for payload in finish()]
            _check_same_place([place for place, _ in outcomes])
            return [found for _, found in outcomes]

        return finished

    def gather_in_pipeline(self, item: T) -> list[T]:
        """Returns the ``item`` of every rank of ``batch``, in order; every one of them has to call it."""
        if self.batch is None or self.batch.size() == 1:
            return [item]
        return [pickle.loads(payload) for payload in _start_all_gather(pickle.dumps(item), self.batch)()]

    def all_or_none(self, work: Callable[[], T], what: str) -> list[T]:
        """Calls ``work`` and returns what it returned on every rank of the pipeline, in order.

        How ``work`` ended is known to all ranks before any of them goes on. Every rank of ``batch`` has to call
        this, and ``work`` must wait for no other rank. Of tensor ranks the first one's result is returned.

        Args:
            work: Makes an object that can be pickled.
            what: Names the object in error messages.

        Raises:
            Exception: ``work`` raised it, on one rank or several: the same one on every rank of the pipeline.
        """
        if self.batch is None:
            return [work()]
        mine: Exception | None = None
        try:
            payload = pickled((False, work()), what)
        except Exception as error:
            mine, payload = error, pickled_error(error)
        outcomes = [pickle.loads(each) for each in _start_all_gather(payload, self.batch)()]
        failures = [(rank, outcome) for rank, (failed, outcome) in enumerate(outcomes) if failed]
        if failures:
            rank, failure = failures[-1]
            raise mine if mine is not None and rank == self.batch.rank() else failure
        return [outcome for _, outcome in outcomes[:: self.num_tensor_ranks]]


@gloo_on_loopback()
def make_control_groups(grid: Tensor, timeout: timedelta | None) -> ControlGroups:
    """Makes the groups of this rank; every rank has to call it.

    Args:
        grid: Global ranks, of shape (pipeline ranks, replicas, tensor ranks).
        timeout: How long a message may take.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0

    def group_along(*axes: int) -> dist.ProcessGroup | None:
        others = [axis for axis in range(3) if axis not in axes]
        size, mine = math.prod(grid.shape[axis] for axis in axes), None
        for members in grid.permute(*others, *axes).reshape(-1, size).tolist():
            group = dist.new_group(members, backend="gloo", timeout=timeout) if size > 1 else None
            mine = group if rank in members else mine
        return mine

    pipeline, data_parallel = group_along(0), group_along(1)
    if grid.shape[2] == 1:
        return ControlGroups(pipeline, data_parallel)
    return ControlGroups(pipeline, data_parallel, 0, group_along(0, 2), group_along(1, 2))


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


def _check_same_place(places: Sequence[str]) -> None:
    """Raises :class:`ConfigurationError` if replicas, in order, have reported different places."""
    other = next((replica for replica, what in enumerate(places) if what != places[0]), None)
    if other is not None:
        raise ConfigurationError(
            f"Replicas are at different points of the run: replica 0 reports {places[0]}, replica {other} reports "
            f"{places[other]}. Their data have different numbers of batches, or your code took different branches "
            'on them. For data of unequal length set unequal_data="shortest" on the strategy: all replicas then end '
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


def frame_of(payload: bytes) -> Tensor:
    """The first part of a message, of a fixed size: its length, and as much of it as there is room for."""
    frame = bytearray(FRAME_BYTES)
    frame[:_LENGTH_BYTES] = len(payload).to_bytes(_LENGTH_BYTES, "little")
    head = payload[: FRAME_BYTES - _LENGTH_BYTES]
    frame[_LENGTH_BYTES : _LENGTH_BYTES + len(head)] = head
    return torch.frombuffer(frame, dtype=torch.uint8)


def open_frame(frame: Tensor) -> tuple[int, bytes]:
    """The length of a message, and what its frame has of it."""
    content = frame.numpy().tobytes()
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    return length, content[_LENGTH_BYTES : _LENGTH_BYTES + length]


def rest_of(payload: bytes, num_bytes: int) -> Tensor:
    """What its frame has not of a message, filled up to ``num_bytes``."""
    rest = payload[FRAME_BYTES - _LENGTH_BYTES :]
    return torch.frombuffer(bytearray(rest.ljust(num_bytes, b"\0")), dtype=torch.uint8)


def _broadcast(payload: bytes, group: dist.ProcessGroup, source: int) -> bytes:
    frame = frame_of(payload)
    dist.broadcast(frame, group=group, group_src=source)
    length, head = open_frame(frame)
    if (missing := length - len(head)) == 0:
        return head
    rest = rest_of(payload, missing)
    dist.broadcast(rest, group=group, group_src=source)
    return head + rest.numpy().tobytes()


def _start_all_gather(payload: bytes, group: dist.ProcessGroup) -> Callable[[], list[bytes]]:
    frames = [torch.empty(FRAME_BYTES, dtype=torch.uint8) for _ in range(group.size())]
    work = dist.all_gather(frames, frame_of(payload), group=group, async_op=True)

    def finish() -> list[bytes]:
        assert work is not None
        work.wait()
        opened = [open_frame(frame) for frame in frames]
        longest = max(length - len(head) for length, head in opened)
        if longest == 0:
            return [head for _, head in opened]
        rests = [torch.empty(longest, dtype=torch.uint8) for _ in opened]
        dist.all_gather(rests, rest_of(payload, longest), group=group)
        return [
            head + rest.numpy().tobytes()[: length - len(head)]
            for (length, head), rest in zip(opened, rests, strict=True)
        ]

    return finish
