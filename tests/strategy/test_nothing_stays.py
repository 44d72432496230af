"""What a batch made is freed with it, without a collection of garbage: a reference cycle would keep its tensors. What a
training made is freed after it.

A device's memory would otherwise grow until Python happens to collect, since Python does not see how large tensors are.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from live_memory import LiveMemory
from parity_run import QUIET
from pool import WorkerPool
from pool_worker import num_threads_of_groups
from torch import Tensor, distributed, nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_pp import PipelineParallelStrategy

WIDTH, NUM_BATCHES, SETTLED = 16, 11, 3
THRESHOLD_BYTES = 512
Batch = dict[str, Tensor]


class Rows(IterableDataset[Batch]):
    """Makes each batch when it is asked for."""

    def __init__(self, shrinks: bool) -> None:
        self.shrinks = shrinks

    def __iter__(self) -> Iterator[Batch]:
        for number in range(NUM_BATCHES):
            size = 16 - 4 * (number % 2) if self.shrinks else 16
            yield {"x": torch.randn(size, 4, WIDTH), "y": torch.randint(-1, WIDTH, (size, 4))}


class Chain(L.LightningModule):
    """A stack of residual blocks; its loss is a mean over what is not masked."""

    def __init__(self, logs: bool, penalty: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.logs, self.penalty = logs, penalty

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        h = self.stem(batch["x"])
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        loss = F.cross_entropy(h.flatten(0, 1), batch["y"].flatten(), ignore_index=-1)
        if self.penalty and (batch["y"] >= 0).any():
            loss = loss + 1e-3 * h.square().sum() / (batch["y"] >= 0).sum()
        if not self.logs:
            return loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("share", (batch["y"] >= 0).float().mean(), on_epoch=True)
        return {"loss": loss, "mean": h.mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Living(L.Callback):
    """Live bytes of what was made since the training began, before each update."""

    def __init__(self) -> None:
        self.live = LiveMemory(THRESHOLD_BYTES)
        self.found: list[int] = []

    def on_train_start(self, *_: Any) -> None:
        gc.disable()
        self.live.__enter__()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.found.append(self.live.live_bytes)

    def on_train_end(self, *_: Any) -> None:
        self.live.__exit__(None, None, None)
        gc.enable()


def bytes_in_updates(options: dict[str, Any], logs: bool, penalty: bool, shrinks: bool) -> list[int]:
    """In a worker."""
    living = Living()
    strategy = PipelineParallelStrategy(num_microbatches=4, check_first_batches=False, **options)
    devices = NUM_RANKS.get(str(options), 2)
    trainer = L.Trainer(**{**QUIET, "devices": devices}, strategy=strategy, max_epochs=1, callbacks=[living])
    trainer.fit(Chain(logs, penalty), DataLoader(Rows(shrinks), batch_size=None))
    return living.found


PLAIN: dict[str, Any] = {"pipeline_parallel_size": 2, "schedule": "1f1b"}
ZB_V: dict[str, Any] = {"pipeline_parallel_size": 2, "schedule": "zb_v"}
SHARDED: dict[str, Any] = {**PLAIN, "schedule": "zb_h1", "data_parallel_size": 2, "sharding": "full_shard"}
TENSOR: dict[str, Any] = {**PLAIN, "pipeline_parallel_size": 1, "tensor_parallel_size": 2}
NUM_RANKS = {str(PLAIN): 2, str(ZB_V): 2, str(SHARDED): 4, str(TENSOR): 2}


@pytest.mark.by_day(3)
@pytest.mark.parametrize(
    ("options", "logs", "penalty", "shrinks"),
    [
        pytest.param(ZB_V, True, True, False, id="logs and counts"),
        pytest.param({**PLAIN, "dynamic_step": True}, True, False, True, id="dynamic"),
        pytest.param({**PLAIN, "activation_checkpointing": True}, False, True, False, id="checkpointed"),
        pytest.param(SHARDED, True, False, False, id="sharded"),
        pytest.param(TENSOR, False, True, False, id="tensor ranks"),
    ],
)
def test_bytes_of_batches_do_not_stay(
    pool: WorkerPool, options: dict[str, Any], logs: bool, penalty: bool, shrinks: bool
) -> None:
    num_ranks = NUM_RANKS.get(str(options), 2)
    for found in pool.run(bytes_in_updates, options, logs, penalty, shrinks, world_size=num_ranks, timeout=120):
        # logs that are gathered over an epoch are single numbers
        assert len(found) == NUM_BATCHES
        for first in (SETTLED, SETTLED + 1):
            of_one_size = found[first::2]  # sizes alternate
            # one batch may hold more, while a message or collective is under way; what stays is held by all to come
            assert min(of_one_size[2:]) <= min(of_one_size[:2]), found


class Kept:
    """What units are given, and keep something in, as caches of transformers."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []


class KeepingBlock(nn.Module):
    """Two products; the result goes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor, kept: Kept) -> Tensor:
        h = self.down(torch.tanh(self.up(h)))
        kept.values.append(h)
        return h


class Keeping(Chain):
    """Its blocks keep what they compute."""

    def __init__(self) -> None:
        super().__init__(logs=False, penalty=False)
        self.blocks = nn.ModuleList(KeepingBlock() for _ in range(2))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h, kept = self.stem(batch["x"]), Kept()
        for block in self.blocks:
            h = h + block(h, kept)
        return F.cross_entropy(h.flatten(0, 1), batch["y"].flatten(), ignore_index=-1)


class Remembering(nn.Linear):
    """Keeps a loss of its own with its graph, as mixtures of experts keep their balance."""

    def forward(self, h: Tensor) -> Tensor:
        h = super().forward(h)
        self.balance = h.square().mean()
        return h


def left_by_a_training(options: dict[str, Any]) -> tuple[list[str], int]:
    """In a worker: classes of what is still there after a training, and how many threads of process groups it left."""

    def train() -> list[weakref.ref[Any]]:
        strategy = PipelineParallelStrategy(num_microbatches=2, **options)
        trainer = L.Trainer(**{**QUIET, "devices": NUM_RANKS.get(str(options), 2)}, strategy=strategy, max_epochs=1)
        module = Keeping() if "tensor_parallel_size" in options else Chain(logs=True, penalty=False)
        module.stem = Remembering(WIDTH, WIDTH)
        trainer.fit(module, DataLoader(Rows(False), batch_size=None))
        return [weakref.ref(each) for each in (module, module.stem, strategy, trainer)]

    before = num_threads_of_groups()  # of other tests in this worker
    references = train()
    distributed.destroy_process_group()
    _clear_sharding_prop_cache()  # torch keeps meshes there
    gc.collect()
    threads = num_threads_of_groups() - before
    return [type(each).__name__ for each in (reference() for reference in references) if each is not None], threads


@pytest.mark.by_day(2)
@pytest.mark.parametrize("options", [ZB_V, SHARDED, TENSOR, {**TENSOR, "compile": {"backend": "aot_eager"}}], ids=str)
def test_nothing_of_a_training_stays(pool: WorkerPool, options: dict[str, Any]) -> None:
    for found in pool.run(left_by_a_training, options, world_size=NUM_RANKS.get(str(options), 2), timeout=120):
        assert not found[0] and found[1] <= 0
