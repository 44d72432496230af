"""Callbacks and hooks that look up names of the whole module on a stage: an error with the line."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parity_run import Layout
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

NUM_PARAMETERS = 10
HERE = r"test_missing_names.py:\d+ in "
STAGE = r"which is a parameter of another stage. On this rank named_parameters\(\) and state_dict\(\) have (4|6) of 10 "


class Average(pl.Callback):
    """Copies the whole module before the fit, and moves the copies by name."""

    def __init__(self, module: pl.LightningModule) -> None:
        self.copy = {name: value.clone() for name, value in module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, *_: Any) -> None:
        now = pl_module.state_dict()
        for name in self.copy:
            self.copy[name].lerp_(now[name], 0.1)


class OwnAverage(Average):
    """The same, of what this rank has."""

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, *_: Any) -> None:
        for name, value in pl_module.named_parameters():
            self.copy[name].lerp_(value.detach(), 0.1)


class LooksUp(Blocks):
    """Goes over all names in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.names = [name for name, _ in self.named_parameters()]

    def on_after_backward(self) -> None:
        held = dict(self.named_parameters())
        for name in self.names:
            held[name].grad.clamp_(-1, 1)


class Other(Blocks):
    """Looks up what is no parameter."""

    def on_after_backward(self) -> None:
        {"blocks": 1}["blocks.9.weight"]


def fitted(kind: type[Blocks], average: type[Average] | None, layout: Layout | None) -> dict[str, Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module = kind().double()
    callbacks = [] if average is None else [average(module)]
    run = trainer(*((1, "auto") if layout is None else (layout.world_size, layout.strategy())), callbacks=callbacks)
    run.fit(module, DataLoader(TensorDataset(x, x.sum(-1).tanh()), batch_size=8))
    held = {name for name, _ in module.named_parameters()}
    return {name: value for each in callbacks for name, value in each.copy.items() if name in held}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("kind", "average", "where"),
    [(Blocks, Average, "on_train_batch_end"), (LooksUp, None, "on_after_backward")],
    ids=["callback", "hook"],
)
def test_a_name_of_another_stage(pool: WorkerPool, kind: Any, average: Any, where: str) -> None:
    report = pool.run(fitted, kind, average, Layout("1f1b", 2), world_size=2, expect_failure=True)
    failures = [failure for failure in report.failures if failure is not None]
    told = [each for each in failures if re.search(rf"{HERE}{where} found no '[\w.]+', {STAGE}", each.message)]
    assert told, failures
    for each in told:
        assert each.type == "ConfigurationError" and "KeyError: " in each.traceback
        assert "WeightAveraging" in each.message and "strategy.gather_module() after the run" in each.message


def test_another_key_is_the_users_own_error(pool: WorkerPool) -> None:
    report = pool.run(fitted, Other, None, Layout("1f1b", 2), world_size=2, expect_failure=True)
    assert any(failure is not None and failure.type == "KeyError" for failure in report.failures), report
    assert not any(failure is not None and "another stage" in failure.message for failure in report.failures)


def test_an_average_of_own_names_is_that_of_one_device(pool: WorkerPool) -> None:
    expected = pool.run(fitted, Blocks, OwnAverage, None, world_size=1)[0]
    found = pool.run(fitted, Blocks, OwnAverage, Layout("1f1b", 2), world_size=2)
    assert sum(len(part) for part in found) == NUM_PARAMETERS == len(expected)
    for part in found:
        for name, value in part.items():
            assert float((value - expected[name]).abs().max()) < 1e-9, name
