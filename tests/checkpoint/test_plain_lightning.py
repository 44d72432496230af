"""Checkpoints go to and come from a Trainer that has no pipeline."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _METADATA_FILENAME, _load_distributed_checkpoint
from pipeline_parts import Model, batches, build, differences, load_checkpoint, make_part, save_sharded, world_size
from pipelined_fit import trainer
from pool import WorkerPool

from lightning_pp import PipelineParallelStrategy
from lightning_pp.checkpoint.storage.folder import TRAINER_STATE_FILENAME


def train(folder: Path, max_epochs: int, resume_from: Path | None = None, **arguments: Any) -> tuple[Path, Model]:
    """A plain Trainer on one device; returns its checkpoint."""
    module = build(**arguments)
    run = trainer(1, "auto", max_epochs=max_epochs, default_root_dir=folder)
    run.fit(module, batches(), ckpt_path=resume_from, weights_only=False)
    path = folder / f"plain_{max_epochs}.ckpt"
    run.save_checkpoint(path)
    return path, module


def through_the_pipeline(source: Path, target: Path, layout: tuple[int, int], **arguments: Any) -> None:
    """Load a checkpoint of any kind into a pipeline and save it as a single file."""
    part = make_part(layout, **arguments)
    trainer_state = load_checkpoint(source, part.held)
    whole = part.whole()
    if torch.distributed.get_rank() == 0:
        torch.save({**trainer_state, **whole}, target)


def to_folder(source: Path, target: Path, layout: tuple[int, int], **arguments: Any) -> None:
    """Load a checkpoint of any kind into a pipeline and save it as a sharded folder."""
    part = make_part(layout, **arguments)
    trainer_state = load_checkpoint(source, part.held)
    save_sharded(target, part.held, trainer_state)


def saved_twice(folder: Path, *, is_sharded: bool) -> str:
    """What is told when a run saves; a plain Trainer's module is made of what it has saved, if it is a file."""
    told, log = io.StringIO(), logging.getLogger("lightning.pytorch")
    handler = logging.StreamHandler(told)
    log.addHandler(handler)
    strategy = PipelineParallelStrategy(num_microbatches=2, save_distributed_checkpoint=is_sharded)
    run = trainer(2, strategy, limit_train_batches=1)
    run.fit(build(), batches())
    for name in ("first.ckpt", "second.ckpt"):
        run.save_checkpoint(folder / name)
    log.removeHandler(handler)
    if not is_sharded:
        Model.load_from_checkpoint(folder / "second.ckpt", weights_only=False)
    return told.getvalue()


def test_a_run_tells_once_that_its_checkpoints_are_folders(pool: WorkerPool, tmp_path: Path) -> None:
    told, _ = pool.run(saved_twice, tmp_path / "folders", is_sharded=True)
    assert told.count("is a folder") == 1 and "first.ckpt" in told and "lightning-pp-export" in told
    told, _ = pool.run(saved_twice, tmp_path / "files", is_sharded=False)
    assert "is a folder" not in told


@pytest.mark.by_day(1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad", "adamw_named"])
def test_round_trip_of_a_single_file_is_exact(pool: WorkerPool, tmp_path: Path, optimizer: str) -> None:
    plain, _ = train(tmp_path, 1, optimizer=optimizer)
    original = torch.load(plain, weights_only=False)
    for layout in [(2, 1), (1, 2), (2, 2)]:
        target = tmp_path / "piped.ckpt"
        arguments: dict[str, Any] = {"optimizer": optimizer, "world_size": world_size(layout), "process_group": True}
        pool.run(through_the_pipeline, plain, target, layout, **arguments)
        piped = torch.load(target, weights_only=False)
        assert set(piped) == set(original)
        assert not differences({key: piped[key] for key in original}, original)
        assert piped["state_dict"]._metadata == original["state_dict"]._metadata


@pytest.mark.by_day(1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_plain_trainer_resumes_with_the_same_weights(pool: WorkerPool, tmp_path: Path, optimizer: str) -> None:
    plain, _ = train(tmp_path, 1, optimizer=optimizer)
    _, uninterrupted = train(tmp_path, 2, optimizer=optimizer)
    folder, target = tmp_path / "sharded.ckpt", tmp_path / "piped.ckpt"
    arguments: dict[str, Any] = {"optimizer": optimizer, "process_group": True}
    pool.run(to_folder, plain, folder, (2, 2), world_size=4, **arguments)
    pool.run(through_the_pipeline, folder, target, (2, 1), **arguments)
    _, resumed = train(tmp_path, 2, resume_from=target, optimizer=optimizer)
    assert not differences(resumed.state_dict(), uninterrupted.state_dict())
    Model.load_from_checkpoint(target, weights_only=False)


def test_lightning_reads_the_folder(pool: WorkerPool, tmp_path: Path) -> None:
    """The keys inside are Lightning's own, so that its tools for sharded checkpoints read them."""
    assert TRAINER_STATE_FILENAME == _METADATA_FILENAME
    plain, _ = train(tmp_path, 1)
    pool.run(to_folder, plain, tmp_path / "sharded.ckpt", (2, 2), world_size=4, process_group=True)
    original = torch.load(plain, weights_only=False)
    merged = _load_distributed_checkpoint(tmp_path / "sharded.ckpt")
    assert not differences(merged["state_dict"], dict(original["state_dict"]))
    names = [n for n, _ in Model().named_parameters()]
    saved = merged["optimizer_0"]
    groups = original["optimizer_states"][0]["param_groups"]
    flat = [name for group in saved["param_groups"] for name in group["params"]]
    assert sorted(flat) == sorted(names)
    for group, expected in zip(saved["param_groups"], groups, strict=True):
        assert not differences({**group, "params": expected["params"]}, expected)
    by_index = {flat.index(name): state for name, state in saved["state"].items()}
    assert not differences(by_index, original["optimizer_states"][0]["state"])
    assert merged["global_step"] == 4
