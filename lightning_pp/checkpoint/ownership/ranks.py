"""The place of this process in the mesh, and how processes agree and exchange their parts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_pp.checkpoint._torch_private import tree_map_only
from lightning_pp.checkpoint.ownership.cuts import NO_CUTS, Cuts
from lightning_pp.errors import CheckpointError

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, as pipelines: row ``p`` of ``grid`` has the global ranks at pipeline rank ``p``.

    The ranks of a row hold the same parameters, replicated, sharded or cut; the first of them speaks for the row.
    """

    grid: tuple[tuple[int, ...], ...]
    pipeline_rank: int
    data_parallel_rank: int

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> Ranks:
        """Flatten the other axes of a mesh whose first axis is the pipeline."""
        grid = mesh.mesh.flatten(1) if mesh.ndim > 1 else mesh.mesh.unsqueeze(1)
        pipeline_rank, data_parallel_rank = (grid == dist.get_rank()).nonzero()[0].tolist()
        return cls(tuple(tuple(row) for row in grid.tolist()), pipeline_rank, data_parallel_rank)

    @property
    def root(self) -> int:
        """The global rank that gathers and that writes what is written once."""
        return self.grid[0][0]

    @property
    def share(self) -> tuple[int, int]:
        """``(index, number)`` of this process among all, for work that each does a part of."""
        number_of_each = {rank: number for number, rank in enumerate(rank for row in self.grid for rank in row)}
        return number_of_each[self.grid[self.pipeline_rank][self.data_parallel_rank]], len(number_of_each)

    @property
    def is_root(self) -> bool:
        return (self.pipeline_rank, self.data_parallel_rank) == (0, 0)


@contextmanager
def fail_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run the body on every rank; an exception on any rank becomes a :class:`CheckpointError` on all of them.

    The body must not communicate: a rank that failed would be missing there.

    Args:
        group: All ranks, for a thread beside the training, whose collectives must not meet those of the default group.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # reported below, on every rank
        error = caught
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else _describe(error), group=group)
    by_message: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        if message is not None:
            by_message.setdefault(message, []).append(rank)
    if by_message:
        text = "\n".join(f"{message} (on {_ranks(ranks)})" for message, ranks in by_message.items())
        raise CheckpointError(text) from error


def fail_together_if_several(ranks: Ranks | None) -> AbstractContextManager[None]:
    """:func:`fail_together`; nothing for a process alone."""
    return nullcontext() if ranks is None else fail_together()


def from_root(value: Any, ranks: Ranks) -> Any:
    """The root's ``value``, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=ranks.root)
    return box[0]


def gather_entries(
    entries: Mapping[Key, Any], ranks: Ranks, cuts: Cuts = NO_CUTS, *, on_all: bool = False
) -> dict[Key, Any]:
    """Collect what the pipeline ranks hold on the root, or on every rank, one tensor at a time.

    Args:
        entries: Tensors, DTensors or picklable objects that this pipeline rank is to contribute; on all ranks of a row
            the same keys in the same order. A key is contributed by one row only.
        ranks: The processes.
        cuts: Which parameters are cut; keys are names, or begin with them.
        on_all: Whether every rank gets them.

    Returns:
        On the root, or on every rank, all entries, whole and on the CPU; on other ranks nothing.
    """
    objects = {k: _unsharded_on_cpu(k, v, cuts) for k, v in entries.items() if not isinstance(v, torch.Tensor)}
    tensors = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
    own_specs = {key: (tuple(cuts.shape(_name(key), value)), value.dtype) for key, value in tensors.items()}
    described: list[Any] = [None] * dist.get_world_size()
    mine = (objects, own_specs) if ranks.data_parallel_rank == 0 else None
    dist.all_gather_object(described, mine)
    found: dict[Key, Any] = {}
    gets_all = on_all or ranks.is_root
    for number, row in enumerate(ranks.grid):
        row_objects, specs = described[row[0]]
        found.update(row_objects if gets_all else {})
        is_mine = number == ranks.pipeline_rank
        for key, (shape, dtype) in specs.items() if is_mine or gets_all else ():
            # of its own row a rank takes part in a collective
            whole = _unsharded_on_cpu(key, tensors[key], cuts) if is_mine else torch.empty(shape, dtype=dtype)
            if whole.numel():
                _pass_on(whole, row[0], ranks, is_mine=is_mine, on_all=on_all)
            if gets_all:
                found[key] = whole
    return found


def _pass_on(whole: torch.Tensor, source: int, ranks: Ranks, *, is_mine: bool, on_all: bool) -> None:
    """From ``source`` to all or to the root, as bytes, since backends differ in the dtypes that they know."""
    if not on_all and (source == ranks.root or dist.get_rank() not in (source, ranks.root)):
        return
    data = whole.contiguous().reshape(-1).view(torch.uint8).to(_transport_device())
    if on_all:
        dist.broadcast(data, source)
    elif dist.get_rank() == source:
        dist.send(data, ranks.root)
    else:
        dist.recv(data, source)
    if not is_mine:
        whole.reshape(-1).view(torch.uint8).copy_(data)


def _name(key: Any) -> Any:
    return key[0] if isinstance(key, tuple) else key


def _unsharded_on_cpu(key: Hashable, value: Any, cuts: Cuts) -> Any:
    """``value`` with every tensor in it whole, detached, and copied to the CPU."""

    def unsharded(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)

    return tree_map_only(torch.Tensor, unsharded, cuts.whole(_name(key), value))


def _transport_device() -> torch.device:
    """The CPU where the default process group can carry its tensors, else the accelerator (NCCL carries only those)."""
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == dist.get_world_size():
        return "all ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
