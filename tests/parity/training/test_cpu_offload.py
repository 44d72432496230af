"""Training with parameters, gradients and optimizer states on the host is the training of one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from parity_run import QUIET, Layout
from pool import WorkerPool
from test_resume import FILE, ONE_DEVICE, SETTINGS, Chain, check_chain
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy

OFFLOADED = {"cpu_offload": True}
MIB = 2**20


@pytest.mark.nightly
def test_clipped_training_that_moves_on_and_off_the_host(pool: WorkerPool, tmp_path: Path) -> None:
    """A tied embedding on one rank, then on two, with one replica; then another kind of checkpoint on one device."""
    chain: Chain = [
        (Layout("zb_v", 2, 2, 2), {"options": {**OFFLOADED, "sharding": "full_shard"}}),
        (Layout("zb_h1", 2, 1, 3), {"options": OFFLOADED, **FILE}),
        (ONE_DEVICE, FILE),
    ]
    check_chain(pool, tmp_path, chain, replace(SETTINGS, scheduler=False, clip_val=0.05, clip_algorithm="norm"))


class Wide(L.LightningModule):
    """Layers of 4 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))
        self.places: set[str] = set()
        self.are_pinned: set[bool] = set()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = batch + layer(batch).tanh()
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            state = [value for value in optimizer.state[parameter].values() if value.dim()]
            gradients = [] if parameter.grad is None else [parameter.grad]
            self.places.update(tensor.device.type for tensor in (parameter, *gradients, *state))
            self.are_pinned.add(getattr(parameter, "_local_tensor", parameter).is_pinned())


def peak_on_gpu(options: dict[str, Any]) -> tuple[int, set[str], set[bool], list[Tensor]]:
    """Peak of the device's memory in the second of two steps, where everything lies, and the weights; in a worker."""
    torch.manual_seed(0)
    module = Wide()

    class Peak(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            torch.cuda.reset_peak_memory_stats()

    trainer = L.Trainer(
        **{**QUIET, "accelerator": "gpu"},
        devices=1,
        strategy=PipelineParallelStrategy(1, 1, 2, sharding="full_shard", **options),
        max_steps=2,
        callbacks=[Peak()],
    )
    trainer.fit(module, DataLoader(torch.randn(8, 1024), batch_size=4))
    weights = [getattr(p, "_local_tensor", p).detach().cpu() for p in module.parameters()]
    return torch.cuda.max_memory_allocated(), module.places, module.are_pinned, weights


@pytest.mark.gpu
def test_the_device_holds_a_window_only(pool: WorkerPool) -> None:
    on_device, places, _, expected = pool.run(peak_on_gpu, {}, world_size=1)[0]
    assert places == {"cuda"}
    options = {**OFFLOADED, "unshard_budget": 8 * MIB}
    offloaded, places, are_pinned, weights = pool.run(peak_on_gpu, options, world_size=1)[0]
    assert places == {"cpu"} and are_pinned == {True}
    # all but 8 MiB of 32 MiB of parameters, and 64 MiB of AdamW's states
    assert offloaded < on_device - 80 * MIB
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, other)
