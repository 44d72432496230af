"""Steps that need what hooks of a run set, or how long its loaders are: they train as on one device, on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from feature_parts import check_on_every_rank, make_trainer, plain
from parity_run import Layout
from pipelined_fit import loader
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor, nn

from lightning_pp import PipelineParallelStrategy

LAYOUTS = [Layout("1f1b", 2, 1, 2), Layout("zb_h1", 3, 1, 4), Layout("zb_v", 2, 2, 2)]


class SetInHooks(Blocks):
    """What every step uses comes from a hook before it; no value of it is there when the module is made."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.seen: list[float] = []

    def on_fit_start(self) -> None:
        self.of_fit = torch.tensor([0.5, 2.0], dtype=torch.float64)

    def on_train_start(self) -> None:
        self.of_training = 3.0

    def on_train_epoch_start(self) -> None:
        self.of_epoch = 1.0 + self.current_epoch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.of_batch = {"scale": 1.0 / (1 + batch_idx)}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x * self.of_fit[0]
        loss = self.of_training * nn.functional.mse_loss(self(x), y * self.of_fit[1])
        self.log("loss", loss)
        return loss * self.of_epoch * self.of_batch["scale"]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


class NeedsItLater(SetInHooks):
    """The step fails after some of its units."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks[:2]:
            x = x + torch.tanh(block(x))
        x = x * self.of_fit[0]
        for block in self.blocks[2:]:
            x = x + torch.tanh(block(x))
        return nn.functional.mse_loss(self.head(x).squeeze(-1) * self.temperature, y)


class AsksForLoaders(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number = len(self.trainer.train_dataloader)  # type: ignore[arg-type]
        total = int(self.trainer.num_training_batches) * int(self.trainer.max_epochs or 1)
        return self.loss(batch) * (1 + self.global_step / total) / number

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


class NeedsItInAUnit(Blocks):
    """The unit itself is what a hook configures."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.Scaled(8, 8)
        self.seen: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.blocks[1].factor = 0.5 + self.current_epoch

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


class UsesItsOwnWeights(SetInHooks):
    """The last stage's parameters, beside the unit that holds them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.head.weight.pow(2).sum()


MODULES = [SetInHooks, NeedsItLater, AsksForLoaders, NeedsItInAUnit, UsesItsOwnWeights]


def trained(layout: Layout | None, kind: type[Blocks]) -> Any:
    torch.manual_seed(3)
    module: Any = kind()
    options: dict[str, Any] = {} if layout is None else {"strategy": layout.strategy(sharding="full_shard")}
    trainer = make_trainer(layout, limit_val_batches=0, **options)
    trainer.fit(module, loader())
    if layout is not None:
        trainer.strategy.gather_module()
    return module.seen, plain(dict(trainer.callback_metrics)), dict(module.state_dict())


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_is_that_of_one_device(pool: WorkerPool, layout: Layout, kind: type[Blocks]) -> None:
    losses, *_ = check_on_every_rank(pool, trained, layout, kind)
    assert len(losses) > 2


class UsesWeightsOfAnother(SetInHooks):
    """Which stages use a parameter outside of its unit cannot be known before the step runs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.blocks[0].weight.pow(2).sum()


class RunsBackwards(SetInHooks):
    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = x + torch.tanh(block(x))
        return self.head(x).squeeze(-1)


class IsWrong(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * self.never_set


class FailsOnOneRank(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1.0 if self.trainer.is_global_zero else self.never_set)


ADVICE = r"Set what the step needs in __init__ or setup\(\)"
ERRORS = [
    (UsesWeightsOfAnother, {}, rf"blocks.0.weight.*\n.*AttributeError at .*of_fit.*{ADVICE}"),
    (RunsBackwards, {}, rf"blocks\.\d.*\n.*AttributeError at .*of_fit.*{ADVICE}"),
    (IsWrong, {}, r"'IsWrong' object has no attribute 'never_set'"),
    (FailsOnOneRank, {}, r"never_set"),
    (SetInHooks, {"schedule": "auto"}, r"AttributeError at .*of_fit.*schedule='auto' needs to know"),
    (SetInHooks, {"memory_limit_gib": 1.0}, r"AttributeError at .*of_fit.*memory_limit_gib needs to know"),
    (SetInHooks, {"device_memory_gib": 1.0}, r"AttributeError at .*of_fit.*device_memory_gib needs to know"),
]


def fit_refused(kind: type[Blocks], options: dict[str, Any]) -> None:
    strategy = PipelineParallelStrategy(2, num_microbatches=2, **options)
    trainer = make_trainer(Layout("zb_h1", 2, 1, 2), strategy=strategy, limit_val_batches=0)
    trainer.fit(kind(), loader())


@pytest.mark.by_day(2)
@pytest.mark.parametrize(("kind", "options", "pattern"), ERRORS)
def test_what_cannot_be_known_is_told_in_the_first_batch(
    pool: WorkerPool, kind: type[Blocks], options: dict[str, Any], pattern: str
) -> None:
    messages = pool.refusals(None, fit_refused, kind, options, world_size=2, timeout=60.0)
    assert any(re.search(pattern, message, re.DOTALL) for message in messages), messages
    assert len(messages) == 2
