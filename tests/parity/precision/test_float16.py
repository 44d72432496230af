"""16-mixed: losses scaled alike on all stages and shards, steps skipped by all of them together.

Torch computes float16 under autocast, and scales losses, on CPUs as well. So everything is real there but the refusal
of the device, which is left out here. The same runs on CUDA are marked ``gpu``, with how many devices they need.
"""

from __future__ import annotations

import math
import os
from typing import Any
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from one_device import TIMEOUT_S, placed
from parity_run import QUIET, whole_weights
from pool import WorkerPool
from small_models import Descends
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.strategy.step import refusals

WIDTH, NUM_BLOCKS, BATCH_SIZE, NUM_STEPS = 16, 4, 8, 8
INITIAL_SCALE, GROWTH_INTERVAL = 64.0, 2
# step: the block and the row of its vector where an infinity appears in the gradient, for one sample
BAD_STEPS = {1: (0, 0), 4: (NUM_BLOCKS - 1, WIDTH - 1)}
# grows after two good steps in a row, halves after a bad one
SCALES = [64.0, 32.0, 32.0, 64.0, 32.0, 32.0, 64.0, 64.0]


class Spike(torch.autograd.Function):
    """The identity; backward gives an infinity in one row."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, row: int) -> Tensor:
        ctx.row = row
        return vector.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        gradient[ctx.row] = math.inf
        return gradient, None


class Block(nn.Module):
    """A vector's gradient goes nowhere else, so that an infinity there is in one shard of one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: Tensor, spike: int | None) -> Tensor:
        shift = self.shift if spike is None else Spike.apply(self.shift, spike)
        return x + torch.tanh(self.linear(x)) + shift


class Model(Descends):
    lr = 0.3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.history: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, first = batch
        bad_block, row = BAD_STEPS.get(batch_idx, (None, None)) if bool(first.any()) else (None, None)
        for index, block in enumerate(self.blocks):
            x = block(x, row if index == bad_block else None)
        return F.mse_loss(self.head(x).float().squeeze(-1), y)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        # unscaled by now, and about to be clipped
        own = [local(p.grad) for p in self.parameters() if p.grad is not None]
        self.history.append(
            {
                "weights": [local(p).clone() for p in self.parameters()],
                "is_finite": all(bool(gradient.isfinite().all()) for gradient in own),
            }
        )

    def on_train_batch_end(self, *_: Any) -> None:
        before = self.history[-1].pop("weights")
        after = [local(p) for p in self.parameters()]
        self.history[-1]["moved"] = any(bool((a != b).any()) for a, b in zip(after, before, strict=True))
        self.history[-1]["scale"] = self.trainer.precision_plugin.scaler.get_scale()


def local(tensor: Any) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def fitted(device: str, strategy: dict[str, Any] | None) -> dict[str, Any]:
    """Trains in float16; one bad sample in the bad steps, which only one microbatch of one replica has."""
    replicas = 1 if strategy is None else strategy["data_parallel_size"]
    num_ranks = 1 if strategy is None else strategy["pipeline_parallel_size"] * replicas
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_STEPS * BATCH_SIZE, WIDTH, generator=generator)
    is_first = torch.arange(len(x)) % BATCH_SIZE == 0
    replica = int(os.environ.get("RANK", "0")) % replicas
    data = TensorDataset(*(column[replica::replicas] for column in (x, x.sum(-1).tanh(), is_first)))
    module = Model()
    scaler = torch.amp.GradScaler(device, init_scale=INITIAL_SCALE, growth_interval=GROWTH_INTERVAL)
    trainer = L.Trainer(
        **{**QUIET, **placed(device, num_ranks)},
        strategy="auto"
        if strategy is None
        else PipelineParallelStrategy(num_microbatches=2, **strategy, check_first_batches=False),
        plugins=MixedPrecision("16-mixed", device, scaler),
        gradient_clip_val=0.05,
        max_epochs=1,
        use_distributed_sampler=False,
    )
    refused = mock.patch.object(refusals, "refuse_precision") if device == "cpu" else mock.MagicMock()
    with refused:
        trainer.fit(module, DataLoader(data, batch_size=BATCH_SIZE // replicas))
    return {
        "weights": whole_weights(module),
        "history": module.history,
        "state": trainer.precision_plugin.scaler.state_dict(),
    }


def layout(pipeline: int, replicas: int, schedule: str, **options: Any) -> dict[str, Any]:
    return {"pipeline_parallel_size": pipeline, "data_parallel_size": replicas, "schedule": schedule, **options}


LAYOUTS = [
    layout(2, 2, "zb_h1", sharding="full_shard"),
    layout(2, 2, "1f1b", sharding="replicate"),
    layout(2, 1, "zb_v"),
    layout(1, 2, "1f1b", sharding="shard_grad_op", cpu_offload=True),
]
ON_DEVICES = [
    *(pytest.param("cpu", strategy, id=f"cpu-{index}") for index, strategy in enumerate(LAYOUTS)),
    pytest.param("cuda", layout(1, 1, "1f1b"), id="cuda-alone", marks=pytest.mark.gpu),
    pytest.param("cuda", layout(1, 1, "1f1b", cpu_offload=True), id="cuda-offloaded", marks=pytest.mark.gpu),
    *(
        pytest.param("cuda", strategy, id=f"cuda-{index}", marks=pytest.mark.gpu)
        for index, strategy in enumerate(LAYOUTS)
    ),
]


@pytest.mark.by_day(5)
@pytest.mark.parametrize(("device", "strategy"), ON_DEVICES)
def test_scale_and_skipped_steps_are_those_of_one_device(
    pool: WorkerPool, device: str, strategy: dict[str, Any]
) -> None:
    """An infinity in one shard of one stage's gradient skips the step on all; clipping sees unscaled gradients."""
    expected = pool.run(fitted, device, None, world_size=1)[0]
    num_ranks = strategy["pipeline_parallel_size"] * strategy["data_parallel_size"]
    results = pool.run(fitted, device, strategy, world_size=num_ranks, timeout=TIMEOUT_S)
    assert [step["scale"] for step in expected["history"]] == SCALES
    weights: dict[str, Tensor] = {}
    for result in results:
        assert [step["scale"] for step in result["history"]] == SCALES
        assert [not step["moved"] for step in result["history"]] == [step in BAD_STEPS for step in range(NUM_STEPS)]
        assert result["state"] == results[0]["state"]
        weights |= result["weights"]
    for step, (block, _) in BAD_STEPS.items():
        is_sharded = strategy.get("sharding", "shard_grad_op") != "replicate"
        num_bad = sum(not result["history"][step]["is_finite"] for result in results)
        assert num_bad == (1 if is_sharded else strategy["data_parallel_size"]), (step, block)
    before = dict(Model().named_parameters())
    for name, value in expected["weights"].items():
        update = (value - before[name].detach()).abs().max()
        # had scaled gradients been clipped, updates would be 32 to 64 times smaller
        assert float((weights[name] - value).abs().max() / update) < 0.02, name
