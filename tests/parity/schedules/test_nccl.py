"""Pipelines on CUDA devices, or on one that all ranks share, train over NCCL as one CPU does, in float64."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from one_device import TIMEOUT_S, placed
from parity_run import QUIET, whole_weights
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy

WIDTH, VOCABULARY, BATCH_SIZE, NUM_STEPS = 16, 12, 8, 4


class Model(L.LightningModule):
    """Tied embedding and head, attention, and a block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def tensor_size(strategy: dict[str, Any] | None) -> int:
    return 1 if strategy is None else int(strategy.get("tensor_parallel_size", 1))


def ranks_of(strategy: dict[str, Any]) -> int:
    return int(strategy["pipeline_parallel_size"] * strategy["data_parallel_size"]) * tensor_size(strategy)


def fitted(strategy: dict[str, Any] | None) -> dict[str, Tensor]:
    """The weights after training that this rank has."""
    replicas, num_ranks = (1, 1) if strategy is None else (strategy["data_parallel_size"], ranks_of(strategy))
    replica = int(os.environ.get("RANK", "0")) // tensor_size(strategy) % replicas
    tokens = torch.randint(VOCABULARY, (NUM_STEPS * BATCH_SIZE, 6), generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(
        **{**QUIET, **placed("cpu" if strategy is None else "cuda", num_ranks)},
        strategy="auto" if strategy is None else PipelineParallelStrategy(num_microbatches=4, **strategy),
        precision="64-true",
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        max_epochs=1,
        use_distributed_sampler=False,
    )
    module = Model()
    trainer.fit(module, DataLoader(TensorDataset(tokens[replica::replicas]), batch_size=BATCH_SIZE // replicas))
    return whole_weights(module)


def layout(pipeline: int, replicas: int, schedule: str, **options: Any) -> Any:
    arguments = {"pipeline_parallel_size": pipeline, "data_parallel_size": replicas, "schedule": schedule, **options}
    tensor = [options["tensor_parallel_size"]] if "tensor_parallel_size" in options else []
    return pytest.param(
        arguments, id="x".join(map(str, (pipeline, replicas, *tensor))) + f"-{schedule}", marks=pytest.mark.gpu
    )


@pytest.mark.parametrize(
    "strategy",
    [
        layout(1, 1, "1f1b"),
        layout(2, 1, "zb_v"),
        layout(2, 1, "zb_h1", activation_checkpointing=True),
        layout(1, 2, "1f1b", sharding="full_shard", cpu_offload=True),
        layout(2, 2, "zb_h1", sharding="full_shard"),
        layout(2, 2, "interleaved_1f1b", sharding="shard_grad_op"),
        layout(1, 4, "1f1b", sharding="full_shard", data_parallel_replicate_size=2),
        layout(1, 1, "zb_h1", tensor_parallel_size=2),
        layout(2, 1, "zb_v", tensor_parallel_size=2, sequence_parallel=True),
        layout(1, 2, "1f1b", tensor_parallel_size=2, sharding="full_shard"),
    ],
)
def test_training_is_that_of_one_device(pool: WorkerPool, strategy: dict[str, Any]) -> None:
    expected = pool.run(fitted, None, world_size=1)[0]
    weights: dict[str, Tensor] = {}
    for result in pool.run(fitted, strategy, world_size=ranks_of(strategy), timeout=TIMEOUT_S):
        weights |= result
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-8, atol=1e-9)
