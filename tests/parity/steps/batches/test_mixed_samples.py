"""Steps that mix the samples of a batch (mixup): the user's line is told, and the advice trains as one device does."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from feature_parts import assert_equal_trees
from pipelined_fit import trainer
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy

Batch = tuple[Tensor, Tensor]


def mixed(batch: Batch, how: str) -> Batch:
    x, y = batch
    others = x[torch.randperm(len(x))] if how == "randperm" else x.roll(1, 0)
    return 0.7 * x + 0.3 * others, y


LINE = f"{__file__}:{mixed.__code__.co_firstlineno + 2} in mixed"


class Mixing(pl.LightningModule):
    """Mixes in its step, or in the hook of its batches."""

    def __init__(self, how: str, in_hook: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.how, self.in_hook = how, in_hook
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.double()

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return mixed(batch, self.how) if self.in_hook else batch

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        h, y = batch if self.in_hook else mixed(batch, self.how)
        for block in self.blocks:
            h = block(h)
        return nn.functional.mse_loss(h, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(how: str, in_hook: bool, strategy: Any = "auto") -> dict[str, Tensor]:
    module, generator = Mixing(how, in_hook), torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(32, 8, generator=generator, dtype=torch.float64) for _ in range(2)))
    torch.manual_seed(9)
    trainer(1 if strategy == "auto" else 2, strategy).fit(module, DataLoader(data, batch_size=16))
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters() if not parameter.is_meta}


def piped(how: str, in_hook: bool) -> dict[str, Tensor]:
    return trained(how, in_hook, PipelineParallelStrategy(2, num_microbatches=4))


@pytest.mark.parametrize("how", ["roll", "randperm"])
def test_mixing_in_the_hook_of_batches_is_that_of_one_device(pool: WorkerPool, how: str) -> None:
    expected = trained(how, in_hook=True)
    first, second = pool.run(piped, how, True, world_size=2)
    assert not first.keys() & second.keys()
    assert_equal_trees({**first, **second}, expected)


def test_mixing_in_the_step_is_refused_by_line(pool: WorkerPool) -> None:
    report = pool.run(piped, "roll", False, world_size=2, expect_failure=True)
    for failure in report.failures:
        assert failure is not None and f"{LINE} by `roll`" in failure.message, failure
        assert "move it to on_after_batch_transfer" in failure.message and "whole_batch_loss" not in failure.message


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        piped("randperm", False)
    return [str(warning.message) for warning in caught if "permutes" in str(warning.message)]


def test_a_permutation_in_the_step_is_told_once(pool: WorkerPool) -> None:
    (told,), nothing = pool.run(warned, world_size=2)
    assert told.startswith(f"{LINE} permutes the samples of each microbatch.")
    assert "move it to on_after_batch_transfer" in told and not nothing
