"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from pool import WorkerPool
from small_models import Stack
from trained_parts import largest_difference, loader, make_trainer, together, weights

from lightning_pp.checkpoint.storage import torch_storage as storage
from lightning_pp.checkpoint.writing import sharded as sharded_module
from lightning_pp.strategy.checkpoints.checkpoints import Checkpoints


class Snapshots(pl.Callback):
    """The weights at the end of each batch; lets the save after a step go on when the next step has ended."""

    def __init__(self) -> None:
        self.after_step: dict[int, dict[str, torch.Tensor]] = {}
        self.went_on = [threading.Event() for _ in range(5)]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.after_step[trainer.global_step] = weights(pl_module)
        self.went_on[trainer.global_step - 1].set()

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.went_on[trainer.global_step].set()


def train(folder: Path, sharded: bool, fail_at: int = -1, **checkpoint: Any) -> dict[str, Any]:
    """Four steps with a save after each, which lasts until the next batch has ended; one may fail on rank 1."""
    number, write_data, write_file = 0, storage.TyingWriter.write_data, Checkpoints._write_file
    held_up = []

    def hold_up() -> None:
        nonlocal number
        number += 1
        held_up.append(snapshots.went_on[number].wait(30))
        if number == fail_at and torch.distributed.get_rank() == 1:
            raise OSError(28, "No space left on device")

    def slow_write(self: Any, *arguments: Any) -> Any:
        hold_up()
        return write_data(self, *arguments)

    def slow_file(self: Any, *arguments: Any) -> None:
        hold_up()
        write_file(self, *arguments)

    storage.TyingWriter.write_data = slow_write  # type: ignore[method-assign]
    Checkpoints._write_file = slow_file  # type: ignore[method-assign]
    snapshots = Snapshots()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **checkpoint)
    try:
        options = {"async_checkpoint": True, "save_distributed_checkpoint": sharded}
        trainer = make_trainer((2, 1), folder, options, callbacks=[snapshots, saver], enable_checkpointing=True)
        module = Stack().double()
        error = ""
        try:
            trainer.fit(module, loader())
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        return {
            "error": error,
            "snapshots": snapshots.after_step,
            "went_on": held_up,
            "threads": [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"],
        }
    finally:
        storage.TyingWriter.write_data = write_data  # type: ignore[method-assign]
        Checkpoints._write_file = write_file  # type: ignore[method-assign]


def read_back(path: Path) -> dict[str, Any]:
    trainer = make_trainer((2, 1), path.parent)
    module = Stack().double()
    trainer.validate(module, loader(), ckpt_path=path, verbose=False)
    return weights(module)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "single_file"])
def test_training_goes_on_and_the_save_is_of_its_moment(pool: WorkerPool, tmp_path: Path, sharded: bool) -> None:
    results = pool.run(train, tmp_path, sharded, save_top_k=2, monitor="step", mode="max", save_last="link")
    for result in results:
        assert result["error"] == "" and result["threads"] == []
        assert result["went_on"] == [True] * 4, "the next batch waited for the save"
    # what is no longer among the best is gone, the link is there, and nothing unfinished is left
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert os.readlink(tmp_path / "last.ckpt") == "step=4.ckpt"
    for name, step in (("step=3.ckpt", 3), ("last.ckpt", 4)):
        expected = together([result["snapshots"][step] for result in results])
        assert largest_difference(together(pool.run(read_back, tmp_path / name)), expected) == 0


def test_what_a_failed_save_was_to_replace_stays(pool: WorkerPool, tmp_path: Path) -> None:
    """The third save fails on one rank: all ranks end with its reason, and the second is still there and linked."""
    options = {"save_top_k": 1, "monitor": "step", "mode": "max", "save_last": "link"}
    results = pool.run(train, tmp_path, True, fail_at=3, **options)
    for result in results:
        assert result["error"].startswith("CheckpointError") and result["threads"] == []
        assert "No space left on device (on rank 1)" in result["error"]
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=2.ckpt"]
    assert os.readlink(tmp_path / "last.ckpt") == "step=2.ckpt"
    expected = together([result["snapshots"][2] for result in results])
    assert largest_difference(together(pool.run(read_back, tmp_path / "last.ckpt")), expected) == 0


class Failing(Stack):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise RuntimeError("the step failed")
        return super().training_step(batch, batch_idx)


def fail_during_save(folder: Path) -> None:
    write = sharded_module.ShardedSave.write

    def slow(self: Any, group: Any = None) -> None:
        time.sleep(0.3)
        write(self, group)

    sharded_module.ShardedSave.write = slow  # type: ignore[method-assign]
    try:
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=2)
        options = {"async_checkpoint": True}
        trainer = make_trainer((2, 1), folder, options, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(Failing().double(), loader())
    finally:
        sharded_module.ShardedSave.write = write  # type: ignore[method-assign]


def test_an_exception_waits_for_the_save(pool: WorkerPool, tmp_path: Path) -> None:
    report = pool.run(fail_during_save, tmp_path, expect_failure=True)
    assert any(failure is not None and "the step failed" in failure.message for failure in report.failures)
    assert os.listdir(tmp_path) == ["step=2.ckpt"]
    assert together(pool.run(read_back, tmp_path / "step=2.ckpt"))


def with_plugin(folder: Path, sharded: bool) -> str:
    options = {"save_distributed_checkpoint": sharded}
    saver = ModelCheckpoint(folder, "{step}")
    trainer = make_trainer(
        (2, 1), folder, options, plugins=[AsyncCheckpointIO()], callbacks=[saver], enable_checkpointing=True
    )
    try:
        trainer.fit(Stack().double(), loader())
    except Exception as error:
        return str(error)
    return ""


def test_lightnings_plugin_for_single_files(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(with_plugin, tmp_path, False) == ["", ""]
    assert os.listdir(tmp_path) == ["step=4.ckpt"]  # the end of the run has waited for the plugin
    for message in pool.run(with_plugin, tmp_path, True):
        assert "AsyncCheckpointIO writes single files" in message and "async_checkpoint=True" in message
