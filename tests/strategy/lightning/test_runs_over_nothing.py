"""A run whose limits leave no batch makes no loader and runs no step, as with a plain Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor

from lightning_pp import PipelineParallelStrategy
from lightning_pp.callbacks import PipelineMonitor

NOTHING = {f"limit_{kind}_batches": 0 for kind in ("train", "val", "test", "predict")}


class Recorded(Blocks):
    """Writes down which of its hooks are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def _loader(self, kind: str) -> Any:
        self.calls.append(kind)
        return loader()

    def train_dataloader(self) -> Any:
        return self._loader("train")

    def val_dataloader(self) -> Any:
        return self._loader("val")

    def test_dataloader(self) -> Any:
        return self._loader("test")

    def predict_dataloader(self) -> Any:
        return self._loader("predict")

    def loss(self, batch: Any) -> Tensor:
        self.calls.append("step")
        return super().loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        self.calls.append("optimizers")
        return super().configure_optimizers()

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def on_fit_start(self) -> None:
        self.calls.append("fit start")

    def on_fit_end(self) -> None:
        self.calls.append("fit end")

    def on_validation_start(self) -> None:
        self.calls.append("validation start")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")


def run_over_nothing(loop: str, stages: int | None) -> tuple[Any, list[str], dict[str, Tensor]]:
    module = Recorded()
    strategy = "auto" if stages is None else PipelineParallelStrategy(stages)
    found = getattr(trainer(stages or 1, strategy, **NOTHING), loop)(module)
    return found, module.calls, module.state_dict()


@pytest.mark.parametrize("loop", ["fit", "validate", "test", "predict"])
def test_hooks_and_weights_are_those_of_a_plain_trainer(pool: WorkerPool, loop: str) -> None:
    found, calls, weights = run_over_nothing(loop, None)
    assert not {"step", "train", "val", "test", "predict"} & set(calls)
    for other in (run_over_nothing(loop, 1), *pool.run(run_over_nothing, loop, 2, world_size=2)):
        assert other[:2] == (found, calls)
        assert other[2].keys() == weights.keys()
        assert all(torch.equal(other[2][name], value) for name, value in weights.items())


def train_afterwards(stages: int | None) -> tuple[int, float, list[str]]:
    """Validates, then fits over nothing with a monitor, then trains with the same trainer."""
    module, monitor = Recorded(), PipelineMonitor()
    strategy = "auto" if stages is None else PipelineParallelStrategy(stages, num_microbatches=2)
    run = trainer(stages or 1, strategy, callbacks=[monitor], max_epochs=2, **NOTHING)
    run.validate(module)
    run.fit(module)
    module.calls.clear()
    run.limit_train_batches = run.limit_val_batches = 1.0
    run.fit(module)
    return run.global_step, float(run.callback_metrics["val_loss"]), sorted(set(module.calls) - {"step"})


def test_the_same_trainer_trains_afterwards(pool: WorkerPool) -> None:
    step, loss, calls = train_afterwards(None)
    for found in (train_afterwards(1), *pool.run(train_afterwards, 2, world_size=2)):
        assert found == (step, pytest.approx(loss, rel=1e-5), calls)
    assert step == 6


def validate_from(path: str) -> dict[str, Tensor]:
    module = Recorded()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    trainer(2, **NOTHING).validate(module, ckpt_path=path)
    return module.state_dict()


def save_trained(path: str) -> dict[str, Tensor]:
    module = Blocks()
    run = trainer(2)
    run.fit(module, loader())
    run.save_checkpoint(path)
    return module.state_dict()


def test_a_checkpoint_is_loaded_all_the_same(pool: WorkerPool, tmp_path: Any) -> None:
    path = str(tmp_path / "trained.ckpt")
    saved = pool.run(save_trained, path, world_size=2)
    for found, expected in zip(pool.run(validate_from, path, world_size=2), saved, strict=True):
        assert found.keys() == expected.keys() and found
        assert all(torch.equal(found[name], value) for name, value in expected.items())
