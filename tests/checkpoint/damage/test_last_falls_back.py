"""``ckpt_path="last"`` takes the newest checkpoint that is whole; a path that is named is never replaced."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from pool import WorkerPool
from small_models import Stack
from trained_parts import largest_difference, loader, make_trainer, together, weights

from lightning_pp.errors import CheckpointError


def fit(folder: Path, sharded: bool, steps: int, ckpt_path: str | None) -> dict[str, Any]:
    saved = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1, save_last=True)
    trainer = make_trainer(
        (2, 1),
        folder,
        {"save_distributed_checkpoint": sharded},
        max_epochs=-1,
        max_steps=steps,
        enable_checkpointing=True,
        callbacks=[saved],
    )
    module = Stack().double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader(), ckpt_path=ckpt_path)
            error = ""
        except CheckpointError as failure:
            error = str(failure)
    told = [str(warning.message) for warning in caught if "ckpt_path='last'" in str(warning.message)]
    return {"error": error, "told": told, "step": trainer.global_step, "weights": weights(module)}


def garble(path: Path) -> None:
    """Flips a bit in the middle of each shard, or of the file."""
    for file in [path] if path.is_file() else path.glob("*.distcp"):
        content = bytearray(file.read_bytes())
        weight = content.find(b"archive/data/0") + 128
        content[weight] ^= 1
        file.write_bytes(content)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "single_file"])
def test_last_falls_back(pool: WorkerPool, tmp_path: Path, sharded: bool) -> None:
    pool.run(fit, tmp_path, sharded, 3, None)
    expected = pool.run(fit, tmp_path / "other", sharded, 4, str(tmp_path / "step=2.ckpt"))
    garble(tmp_path / "last.ckpt")
    garble(tmp_path / "step=3.ckpt")
    named = pool.run(fit, tmp_path, sharded, 4, str(tmp_path / "last.ckpt"))
    for result in named:
        assert str(tmp_path / "last.ckpt") in result["error"] and not result["told"]

    results = pool.run(fit, tmp_path, sharded, 4, "last")
    assert [(result["error"], result["step"]) for result in results] == [("", 4)] * 2
    (told,) = results[0]["told"]
    assert f"takes {tmp_path / 'step=2.ckpt'}" in told and "last.ckpt" in told and "CRC-32" in told
    found = together([result["weights"] for result in results])
    assert largest_difference(found, together([result["weights"] for result in expected])) == 0
