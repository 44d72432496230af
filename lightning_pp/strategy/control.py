"""Small messages between the ranks of a pipeline, and between the replicas of the last stage, over CPU groups."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# Most messages (a few logged values) fit into one frame, so they cost one collective; longer ones cost two.
_FRAME_BYTES = 4096
_LENGTH_BYTES = 8


@dataclass(frozen=True)
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
            payload = _pickled((False, produced), what)
        except Exception as error:
            _broadcast(_pickled_error(error), self.pipeline, self.last_stage_rank)
            raise
        _broadcast(payload, self.pipeline, self.last_stage_rank)
        return produced

    def gather(self, item: T) -> list[T]:
        """The ``item`` of every replica, in the order of the replicas; every rank of the group has to call this."""
        if self.data_parallel is None or self.num_replicas == 1:
            return [item]
        return [pickle.loads(payload) for payload in _all_gather(pickle.dumps(item), self.data_parallel)]

    def gather_in_pipeline(self, item: T) -> list[T]:
        """Returns the ``item`` of every rank of the pipeline, in order; every one of them has to call it."""
        if self.pipeline is None or self.pipeline_size == 1:
            return [item]
        return [pickle.loads(payload) for payload in _all_gather(pickle.dumps(item), self.pipeline)]

    def broadcast_tensor(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Overwrites ``tensor`` with the last stage's; any dtype, contiguous, on a device that ``group`` supports."""
        group = group or self.pipeline
        if group is not None and self.pipeline_size > 1 and tensor.numel() > 0:
            # As bytes, because backends differ in the dtypes they know.
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=group, group_src=self.last_stage_rank)


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


def _pickled(outcome: tuple[bool, Any], what: str) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be sent from the last stage to the other ranks, because pickling it fails "
            f"({type(error).__name__}: {error}). Use tensors, numbers, strings, and containers of these."
        ) from error


def _pickled_error(error: Exception) -> bytes:
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


def _all_gather(payload: bytes, group: dist.ProcessGroup) -> list[bytes]:
    frames = [torch.empty(_FRAME_BYTES, dtype=torch.uint8) for _ in range(group.size())]
    dist.all_gather(frames, _frame(payload), group=group)
    opened = [_open_frame(frame) for frame in frames]
    longest = max(length - len(head) for length, head in opened)
    if longest == 0:
        return [head for _, head in opened]
    rests = [torch.empty(longest, dtype=torch.uint8) for _ in opened]
    dist.all_gather(rests, _rest(payload, longest), group=group)
    return [
        head + rest.numpy().tobytes()[: length - len(head)] for (length, head), rest in zip(opened, rests, strict=True)
    ]
