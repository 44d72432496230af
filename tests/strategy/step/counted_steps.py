"""Training steps whose collectives and gathers are counted as they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from parity_run import QUIET
from small_models import WIDTH, TiedModule
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy

NUM_MICROBATCHES = 8
GATHER, SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
# methods of process groups, some of which torch 2.13 renamed
_OPERATIONS = {
    "_allgather_base": GATHER,
    "all_gather_single": GATHER,
    "allgather": GATHER,
    "_reduce_scatter_base": SCATTER,
    "reduce_scatter_single": SCATTER,
    "reduce_scatter": SCATTER,
    "allreduce": ALL_REDUCE,
    "broadcast": "broadcast",
}


@contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Counts the collectives of all process groups by operation and name of the group."""
    counts: Counter[tuple[str, str]] = Counter()
    # what getattr gives is no method any more, and would break the class when it is put back
    originals = {name: vars(dist.ProcessGroup)[name] for name in _OPERATIONS if name in vars(dist.ProcessGroup)}

    def counting(name: str) -> Callable[..., Any]:
        def call(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            counts[_OPERATIONS[name], self.group_name] += 1
            return originals[name](self, *args, **kwargs)

        return call

    for name in originals:
        setattr(dist.ProcessGroup, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


@contextmanager
def gathered_bytes() -> Iterator[list[int]]:
    """Notes, at every gather and free of a unit, how many bytes are gathered or being gathered from then on."""
    held: dict[FSDPModule, int] = {}
    noted: list[int] = []
    unshard, reshard = FSDPModule.unshard, FSDPModule.reshard

    def noting_unshard(self: Any, async_op: bool = False) -> Any:
        if self not in held:
            held[self] = sum(p.numel() * p.element_size() for p in self.parameters())
        noted.append(sum(held.values()))
        return unshard(self, async_op=async_op)

    def noting_reshard(self: Any) -> None:
        held.pop(self, None)
        reshard(self)

    FSDPModule.unshard, FSDPModule.reshard = noting_unshard, noting_reshard  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        FSDPModule.unshard, FSDPModule.reshard = unshard, reshard  # type: ignore[method-assign]


class _CountBatches(L.Callback):
    def __init__(self, counts: Counter[tuple[str, str]]) -> None:
        self.counts = counts
        self.batches: list[Counter[tuple[str, str]]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.counts.clear()

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches.append(Counter(self.counts))


def fit(
    module: L.LightningModule, *, num_batches: int, accumulate: int = 1, validate: bool = False, **arguments: Any
) -> tuple[PipelineParallelStrategy, list[Counter[tuple[str, str]]], list[int]]:
    """In a worker: trains; returns the collectives of each batch, and the gathered bytes over time."""
    # the check of the first batches has gathers of its own
    strategy = PipelineParallelStrategy(num_microbatches=NUM_MICROBATCHES, check_first_batches=False, **arguments)
    with counted() as counts, gathered_bytes() as gathered:
        counter = _CountBatches(counts)
        trainer = L.Trainer(
            **QUIET,
            devices=dist.get_world_size() if dist.is_initialized() else strategy_size(arguments),
            strategy=strategy,
            max_epochs=1,
            accumulate_grad_batches=accumulate,
            use_distributed_sampler=False,
            callbacks=[counter],
        )
        shape = (NUM_MICROBATCHES, 3, WIDTH) if isinstance(module, TiedModule) else (NUM_MICROBATCHES, WIDTH)
        torch.manual_seed(0)
        batches = DataLoader([torch.randn(shape) for _ in range(num_batches)], batch_size=None)  # type: ignore[arg-type]
        trainer.fit(module, batches, batches if validate else None)
    return strategy, counter.batches, gathered


def strategy_size(arguments: dict[str, Any]) -> int:
    """Processes of a strategy."""
    return int(arguments["pipeline_parallel_size"]) * int(arguments["data_parallel_size"])


def named(strategy: PipelineParallelStrategy, batches: list[Counter[tuple[str, str]]]) -> list[dict[str, int]]:
    """The counts of each batch in the groups that parameters are sharded over, by operation."""
    mesh = strategy.device_mesh
    names = {mesh.get_group(axis).group_name for axis in mesh.mesh_dim_names or () if axis.startswith("data_parallel")}
    return [{operation: number for (operation, group), number in batch.items() if group in names} for batch in batches]
