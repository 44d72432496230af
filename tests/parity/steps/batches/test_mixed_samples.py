"""Steps that mix the samples of a batch (mixup): the user's line is told, and the advice trains as one device does."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from feature_parts import assert_equal_trees
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Descends
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy

Batch = tuple[Tensor, Tensor]


class Mixup:
    """As timm's, in place, with targets for classes: mixes each sample with its opposite in the batch, or with any."""

    def __init__(self, permutes: bool) -> None:
        self.permutes = permutes

    def __call__(self, x: Tensor, classes: Tensor) -> Batch:
        lam, targets = float(np.random.beta(0.4, 0.4)), nn.functional.one_hot(classes, 8).to(x)
        if self.permutes:
            order = torch.randperm(len(x))
            others, targets_of_others = x[order], targets[order]
        else:
            others, targets_of_others = x.flip(0), targets.flip(0)
        x.mul_(lam).add_(others.mul_(1.0 - lam))
        return x, targets * lam + targets_of_others * (1.0 - lam)


MIXUPS = {"timm": Mixup(permutes=False), "timm_permuting": Mixup(permutes=True)}
HOWS = ["roll", "randperm", *MIXUPS]


def mixed(batch: Batch, how: str) -> Batch:
    x, y = batch
    if how in MIXUPS:
        return MIXUPS[how](x, y[:, 0].abs().mul(4).long().clamp(max=7))
    others = x[torch.randperm(len(x))] if how == "randperm" else x.roll(1, 0)
    return 0.7 * x + 0.3 * others, y


LINES = {
    "roll": f"{__file__}:{mixed.__code__.co_firstlineno + 4} in mixed",
    "timm": f"{__file__}:{Mixup.__call__.__code__.co_firstlineno + 6} in __call__",
    "randperm": f"{__file__}:{mixed.__code__.co_firstlineno + 4} in mixed",
    "timm_permuting": f"{__file__}:{Mixup.__call__.__code__.co_firstlineno + 3} in __call__",
}


class Mixing(Descends):
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
        return nn.functional.cross_entropy(h, y) if self.how in MIXUPS else nn.functional.mse_loss(h, y)


def trained(how: str, in_hook: bool, strategy: Any = "auto") -> dict[str, Tensor]:
    module, generator = Mixing(how, in_hook), torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(32, 8, generator=generator, dtype=torch.float64) for _ in range(2)))
    torch.manual_seed(9)
    np.random.seed(9)
    trainer(1 if strategy == "auto" else 2, strategy).fit(module, DataLoader(data, batch_size=16))
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters() if not parameter.is_meta}


def piped(how: str, in_hook: bool) -> dict[str, Tensor]:
    return trained(how, in_hook, PipelineParallelStrategy(2, num_microbatches=4))


@pytest.mark.by_day(2)
@pytest.mark.parametrize("how", HOWS)
def test_mixing_in_the_hook_of_batches_is_that_of_one_device(pool: WorkerPool, how: str) -> None:
    expected = trained(how, in_hook=True)
    first, second = pool.run(piped, how, True, world_size=2)
    assert not first.keys() & second.keys()
    assert_equal_trees({**first, **second}, expected)


@pytest.mark.parametrize(("how", "by"), [("roll", "roll"), ("timm", "flip")])
def test_mixing_in_the_step_is_refused_by_line(pool: WorkerPool, how: str, by: str) -> None:
    for message in pool.refusals(None, piped, how, False, world_size=2):
        assert f"{LINES[how]} by `{by}`" in message
        assert "move it to on_after_batch_transfer" in message and "whole_batch_loss" not in message


def warned(how: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        piped(how, False)
    return [str(warning.message) for warning in caught if "permutes" in str(warning.message)]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("how", ["randperm", "timm_permuting"])
def test_a_permutation_in_the_step_is_told_once(pool: WorkerPool, how: str) -> None:
    (told,), nothing = pool.run(warned, how, world_size=2)
    assert told.startswith(f"{LINES[how]} permutes the samples of each microbatch.")
    assert "move it to on_after_batch_transfer" in told and not nothing
