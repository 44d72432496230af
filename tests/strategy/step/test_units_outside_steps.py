"""Units and losses that a hook or a callback calls: only their own rank has the weights; nobody may guess values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from pipelined_fit import fit, loader
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor, nn

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",  # this and the next two are called within the optimizer's closure
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class WithLossModule(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.MSELoss()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return self.criterion(self(x), y)


def backward(module: Any) -> None:
    module.loss((torch.ones(2, 8), torch.ones(2))).backward()  # the line that the message names


def log(module: Any) -> None:
    module.log("seen", module(torch.ones(2, 8)).mean())  # the line that the message names


def read(module: Any) -> None:
    float(module(torch.ones(2, 8)).mean())  # the line that the message names


def write(module: Any) -> None:
    torch.zeros(2).copy_(module(torch.ones(2, 8)))  # the line that the message names


def look_at_shape(module: Any) -> None:
    assert module(torch.ones(2, 8)).shape == (2,)


def compute_without_weights(module: Any) -> None:
    assert float(module.criterion(torch.ones(2), 3 * torch.ones(2))) == 4.0


class Uses(pl.Callback):
    def __init__(self, hook: str, use: Callable[[Any], None]) -> None:
        def run(_: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            use(module)

        setattr(self, hook, run)


def weights_after(hook: str, use: Callable[[Any], None], devices: int) -> dict[str, Tensor]:
    module = WithLossModule()
    fit(module, devices, callbacks=[Uses(hook, use)])
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def weights_without() -> dict[str, Tensor]:
    module = WithLossModule()
    pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    ).fit(module, loader())
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.by_day(3)
@pytest.mark.parametrize(
    ("hook", "use", "error", "said"),
    [
        ("on_before_optimizer_step", backward, "LostEditError", "training_step|Compute values to log"),
        ("on_before_zero_grad", backward, "LostEditError", "Compute values to log"),
        ("on_train_batch_end", log, "NeedsDataError", r"self\.log\('seen'\).*Compute it in training_step"),
        ("on_after_backward", read, "NeedsDataError", "Outside a step a rank has only the weights of its own stages"),
        ("on_before_backward", write, "LostEditError", r"a tensor of shape \(2,\)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("devices", [2, 3])
def test_values_of_other_stages_are_refused(
    pool: WorkerPool, hook: str, use: Callable[[Any], None], error: str, said: str, devices: int
) -> None:
    report = pool.run(weights_after, hook, use, devices, world_size=devices, expect_failure=True)
    for failure in report.failures:
        assert failure is not None and failure.type == error
        assert f"test_units_outside_steps.py:{use.__code__.co_firstlineno + 1} in {use.__name__}" in failure.message
        assert re.search(said, failure.message)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("use", [compute_without_weights, look_at_shape])
def test_what_needs_no_values_trains_as_without(pool: WorkerPool, use: Callable[[Any], None]) -> None:
    expected = weights_without()
    for hook in HOOKS:
        found = pool.run(weights_after, hook, use, 2, world_size=2)
        assert set(found[0]) | set(found[1]) == set(expected)
        for weights in found:
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[name])
