"""One stage on one device is plain training: what Lightning allows, it allows, with the same numbers."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from parity_run import QUIET, Layout
from pipelined_fit import loader
from pool import WorkerPool
from small_models import Blocks, Stack
from torch import Tensor, nn

from lightning_pp import PipelineParallelStrategy


class TwoOptimizers(Blocks):
    """Manual optimization, which no pipeline can run."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), lr=0.1), torch.optim.Adam(self.head.parameters())


class OwnBackward(Blocks):
    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()


class SkipsBatches(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else self.loss(batch)


class AcrossSamples(Blocks):
    """Couples samples, reads values and nests what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[list[float]]] = {"losses": [[]]}

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        found = self(x)
        if float(found.mean()) > 0:
            found = found - found.mean()
        self.kept["losses"][0].append(float(found.std()))
        return nn.functional.mse_loss(found, y).sqrt()

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


def trainer(strategy: Any, **options: Any) -> L.Trainer:
    return L.Trainer(**{**QUIET, "devices": 1, "max_epochs": 2, **options}, strategy=strategy)


def one_stage(**options: Any) -> PipelineParallelStrategy:
    return PipelineParallelStrategy(pipeline_parallel_size=1, **options)


@pytest.mark.parametrize("module", [TwoOptimizers, OwnBackward, SkipsBatches, AcrossSamples])
def test_what_no_pipeline_runs_trains_as_with_a_plain_trainer(module: type[Blocks]) -> None:
    found = []
    for strategy in ("auto", one_stage()):
        model = module()
        trainer(strategy).fit(model, loader(), loader(seed=2))
        found.append((model.state_dict(), getattr(model, "kept", None)))
    (expected, expected_kept), (weights, kept) = found
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert kept == expected_kept


def test_a_module_goes_from_trainer_to_trainer_and_no_thread_stays() -> None:
    found, threads = [], set(threading.enumerate())
    for make in (lambda: "auto", one_stage):
        model = Stack()
        trainer(make()).fit(model, loader())
        trainer("auto").fit(model, loader())
        trainer(make()).fit(model, loader())
        trainer(make()).validate(model, loader(), verbose=False)
        found.append(model.losses)
    assert found[0] == found[1] and len(found[0]) == 18
    assert set(threading.enumerate()) == threads


def threads_after_runs() -> list[str]:
    before = set(threading.enumerate())
    run = trainer(Layout("1f1b", 2, 1, 2).strategy(), devices=2)
    model = Blocks()
    run.fit(model, loader(), loader(seed=2))
    run.validate(model, loader(), verbose=False)
    return [thread.name for thread in set(threading.enumerate()) - before]


def test_no_thread_of_two_stages_stays(pool: WorkerPool) -> None:
    assert pool.run(threads_after_runs, world_size=2) == [[], []]


def test_there_is_no_pipeline_to_ask_for(caplog: pytest.LogCaptureFixture) -> None:
    strategy = one_stage(num_microbatches=4)
    with caplog.at_level(logging.INFO):
        run = trainer(strategy)
        run.fit(Blocks(), loader())
    assert strategy.is_plain and "num_microbatches=4 has no effect with one stage" in caplog.text
    with pytest.raises(RuntimeError, match="one stage on one device trains as a plain Trainer does"):
        _ = strategy.engine
    strategy.gather_module()  # nothing to do
    with pytest.raises(AttributeError, match="Saving a checkpoint is only possible if a model is attached"):
        trainer(one_stage()).save_checkpoint("never.ckpt")


NEED_AN_ENGINE: list[dict[str, Any]] = [
    {"stages_per_rank": 2, "schedule": "interleaved_1f1b"},
    {"activation_checkpointing": True},
    {"device_memory_gib": 1.0},
    {"meta_init": True},
]


@pytest.mark.parametrize("option", NEED_AN_ENGINE, ids=lambda option: next(iter(option)))
def test_options_that_need_an_engine_get_one(pool: WorkerPool, option: dict[str, Any]) -> None:
    assert pool.run(engine_of_one, option, world_size=1) == [(False, option.get("stages_per_rank", 1))]


def engine_of_one(option: dict[str, Any]) -> tuple[bool, int]:
    strategy = one_stage(**option)
    trainer(strategy, max_steps=1).fit(Blocks(), loader())
    return strategy.is_plain, strategy.engine.placement.num_stages


def fitted(strategy: Any, devices: int, num_epochs: int, start: Path | None, end: Path | None) -> dict[str, Tensor]:
    """Trains until ``num_epochs``, from one checkpoint to another; the whole weights."""
    model = Blocks().double()  # Lightning restores weights before it converts the module
    run = trainer(strategy, devices=devices, precision="64-true", max_epochs=num_epochs)
    run.fit(model, loader(), ckpt_path=start)
    assert run.current_epoch == num_epochs and run.global_step == 3 * num_epochs
    if end is not None:
        run.save_checkpoint(end)
    if isinstance(strategy, PipelineParallelStrategy):
        strategy.gather_module()
    return model.state_dict()


def fitted_by_two(is_sharded: bool, *args: Any) -> dict[str, Tensor]:
    return fitted(Layout("1f1b", 2, 1, 2).strategy(save_distributed_checkpoint=is_sharded), 2, *args)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("is_sharded", [True, False])
def test_checkpoints_go_from_one_stage_to_two_and_back(pool: WorkerPool, tmp_path: Path, is_sharded: bool) -> None:
    expected = fitted("auto", 1, 3, None, None)
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    fitted(one_stage(), 1, 1, None, first)
    pool.run(fitted_by_two, is_sharded, 2, first, second, world_size=2)
    assert second.is_dir() == is_sharded
    torch.testing.assert_close(fitted(one_stage(), 1, 3, second, None), expected, rtol=1e-12, atol=1e-12)
