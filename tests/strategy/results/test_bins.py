"""Numbers that a step logs for groups of its samples, those of a batch that a microbatch may not have."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parity_run import Layout
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Residual
from test_formulas import Logged
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_GROUPS = 4


class Groups(Residual):
    """The mean error of each group, as steps of diffusion log it by time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, group = batch
        error = (self(x) - x).square().mean(-1)
        self.log_groups(error.detach(), group)
        return error.mean()

    def log_groups(self, error: Tensor, group: Tensor) -> None:
        for number in range(NUM_GROUPS):
            chosen = group == number
            if chosen.any():
                self.log(f"error_{number}", error[chosen].mean())


class Skips(Groups):
    """The same with a quotient, and a function that the loop calls."""

    def log_groups(self, error: Tensor, group: Tensor) -> None:
        for number in range(NUM_GROUPS):
            self.log_one(error, group == number, f"error_{number}")

    def log_one(self, error: Tensor, chosen: Tensor, name: str) -> None:
        if chosen.sum() == 0:
            return
        self.log(name, (error * chosen).sum() / chosen.sum())


class Data(pl.LightningDataModule):
    """Batches of 16 samples of all replicas together; each microbatch lacks some groups."""

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(2)
        data = TensorDataset(
            torch.randn(32, 8, generator=generator), torch.randint(NUM_GROUPS, (32,), generator=generator)
        )
        shares = self.trainer.distributed_sampler_kwargs
        sampler = DistributedSampler(data, shuffle=False, **(shares or {"num_replicas": 1, "rank": 0}))
        return DataLoader(data, batch_size=16 // sampler.num_replicas, sampler=sampler)


def logged(layout: Layout | None, kind: type[Groups]) -> tuple[list[dict[str, float]], list[str]]:
    torch.manual_seed(1)
    module, noted = kind(), Logged()
    strategy = layout.strategy() if layout else "auto"
    run = trainer(layout.world_size if layout else 1, strategy, precision="64-true", max_epochs=1, callbacks=[noted])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, datamodule=Data())
    return noted.values, [
        str(each.message) for each in caught if "depends on how the batch is cut" in str(each.message)
    ]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", [Groups, Skips], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("layout", [Layout("1f1b", 2, 1, 4), Layout("zb_h1", 2, 2, 4)], ids=str)
def test_as_on_one_device(pool: WorkerPool, layout: Layout, kind: type[Groups]) -> None:
    [(expected, _)] = pool.run(logged, None, kind, world_size=1)
    for found, warned in pool.run(logged, layout, kind, world_size=layout.world_size):
        assert warned == []
        assert found == [pytest.approx(each, rel=1e-9) for each in expected]
