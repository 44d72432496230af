"""Optimizers that published modules make in unusual places train, save and resume as on one device, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from feature_parts import Data, check_on_every_rank, make
from feature_parts import make_unchecked_trainer as make_trainer
from parity_run import Layout
from pool import WorkerPool
from small_models import Classifier
from torch import nn

LAYOUTS = [Layout("1f1b", 2, 1, 2), Layout("zb_h1", 3, 1, 2), Layout("1f1b", 2, 2, 2)]


class MadeInInit(Classifier):
    """Adagrad has state from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.double()  # the state has the dtype that the parameters have now
        self.optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05, initial_accumulator_value=0.3)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def configure_optimizers(self) -> Any:
        return [self.optimizer], [self.scheduler]


class WithoutOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        return None


class ForeignParameters(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(5, 2))], lr=0.1)


def whole_weights(trainer: Any, module: Any) -> dict[str, Any]:
    """Of the trained module, on every rank."""
    if hasattr(trainer.strategy, "gather_module"):
        trainer.strategy.gather_module()
    return {name: value.clone() for name, value in module.state_dict().items()}


def trained_once(layout: Layout | None, kind: type[Classifier], as_file: bool, path: str) -> tuple[Any, Any]:
    """The trainer and the module after a fit, saved at ``path``."""
    options = (
        {}
        if layout is None
        else {"strategy": layout.strategy(save_distributed_checkpoint=not as_file, check_first_batches=False)}
    )
    module, trainer = make(kind), make_trainer(layout, **options)
    trainer.fit(module, Data())
    trainer.save_checkpoint(path)
    return trainer, module


def resumed_weights(layout: Layout | None, kind: type[Classifier], path: str) -> dict[str, Any]:
    """After a fit that goes on from ``path``, to the third epoch."""
    options = {} if layout is None else {"strategy": layout.strategy(check_first_batches=False)}
    module, trainer = make(kind), make_trainer(layout, max_epochs=3, **options)
    trainer.fit(module, Data(), ckpt_path=path)
    return whole_weights(trainer, module)


def trained_twice(layout: Layout | None, kind: type[Classifier], as_file: bool, folder: str) -> Any:
    """Weights after a fit that goes on, and after another that resumes from its checkpoint in between."""
    path = f"{folder}/{'one' if layout is None else 'many'}.ckpt"
    trainer, module = trained_once(layout, kind, as_file, path)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, Data())
    learning_rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    went_on = whole_weights(trainer, module)
    return went_on, learning_rates, resumed_weights(layout, kind, path)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("as_file", [False, True], ids=["folder", "file"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_made_in_init(pool: WorkerPool, layout: Layout, as_file: bool, tmp_path: Any) -> None:
    check_on_every_rank(pool, trained_twice, layout, MadeInInit, as_file, str(tmp_path))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("as_file", [False, True], ids=["folder", "file"])
def test_none(pool: WorkerPool, as_file: bool, tmp_path: Any) -> None:
    check_on_every_rank(pool, trained_twice, LAYOUTS[0], WithoutOptimizer, as_file, str(tmp_path))


def fit(layout: Layout, kind: type[Classifier]) -> None:
    make_trainer(layout).fit(make(kind), Data())


def test_parameters_of_nobody(pool: WorkerPool) -> None:
    for message in pool.refusals("ConfigurationError", fit, LAYOUTS[0], ForeignParameters, world_size=2):
        assert "returned SGD with 1 parameters that are not the module's, of shapes (5, 2)" in message
