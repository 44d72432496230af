"""Averaged weights are those of one device, in checkpoints too; synchronised norms are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from pool import WorkerPool
from small_models import WIDTH, Stack
from trained_parts import largest_difference, loader, make_trainer, together, weights

from lightning_pp.cli.export import main

KINDS: dict[str, Any] = {
    "mean": lambda: WeightAveraging(),
    "ema": lambda: EMAWeightAveraging(decay=0.6, use_buffers=False),
}


class ValidationLosses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def train(
    layout: tuple[int, int] | None,
    kind: str,
    folder: Path,
    epochs: int,
    resume: Path | None = None,
    sharded: bool = False,
) -> tuple[dict[str, Any], list[float], list[float]]:
    """Validates twice an epoch, with the averaged weights, and saves at the end of the last epoch but before its end.

    Returns:
        The weights when training has ended, which are the averages; the losses; the validation losses.
    """
    validation = ValidationLosses()
    saver = pl.callbacks.ModelCheckpoint(folder, f"{kind}-{{epoch}}", every_n_epochs=1, save_top_k=-1)
    options = {"save_distributed_checkpoint": sharded}
    trainer = make_trainer(
        layout,
        folder,
        options,
        max_epochs=epochs,
        callbacks=[KINDS[kind](), validation, saver],
        val_check_interval=2,
        enable_checkpointing=True,
    )
    module = Stack().double()
    replicas = 1 if layout is None else layout[1]
    trainer.fit(module, loader(replicas), loader(replicas), ckpt_path=resume)
    return weights(module), module.losses, validation.losses


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("kind", "sharded"),
    [
        ("mean", True),
        ("ema", False),
        pytest.param("mean", False, marks=pytest.mark.nightly),
        pytest.param("ema", True, marks=pytest.mark.nightly),
    ],
)
def test_averages_are_those_of_one_device(pool: WorkerPool, tmp_path: Path, kind: str, sharded: bool) -> None:
    expected, _, expected_validation = train(None, kind, tmp_path / "one", 2)
    parts = pool.run(train, (2, 2), kind, tmp_path / "two", 2, sharded=sharded, world_size=4)
    assert largest_difference(together([part[0] for part in parts]), expected) < 1e-9
    for part in parts:
        assert max(abs(a - b) for a, b in zip(part[2], expected_validation, strict=True)) < 1e-9
    # the average and the current weights both come back, in another layout
    saved = tmp_path / "two" / f"{kind}-epoch=0.ckpt"
    resumed = pool.run(train, (2, 1), kind, tmp_path / "three", 2, resume=saved, sharded=sharded)
    assert largest_difference(together([part[0] for part in resumed]), expected) < 1e-9
    if not sharded:
        # one device reads what the pipeline wrote, and the pipeline what one device wrote
        back, _, _ = train(None, kind, tmp_path / "four", 2, resume=saved)
        assert largest_difference(back, expected) < 1e-9
        train(None, kind, tmp_path / "one", 1)
        plain = tmp_path / "one" / f"{kind}-epoch=0.ckpt"
        resumed = pool.run(train, (2, 1), kind, tmp_path / "five", 2, resume=plain)
        assert largest_difference(together([part[0] for part in resumed]), expected) < 1e-9
        one, two = (torch.load(path, weights_only=True) for path in (plain, saved))
        for key in ("state_dict", "current_model_state"):
            assert largest_difference(two[key], one[key]) < 1e-9


def refused(folder: Path) -> list[str]:
    messages = []
    normed = Stack()
    normed.norm = torch.nn.SyncBatchNorm(3)
    cases: list[tuple[pl.LightningModule, dict[str, Any]]] = [(normed, {}), (Stack(), {"sync_batchnorm": True})]
    for module, arguments in cases:
        try:
            make_trainer((2, 1), folder, **arguments).fit(module.double(), loader())
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_synchronised_norms_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    for messages in pool.run(refused, tmp_path):
        assert "norm is a SyncBatchNorm" in messages[0]
        assert "sync_batchnorm=True" in messages[1]
        assert all(message.startswith("ConfigurationError") for message in messages)


class Normalized(Stack):
    """Normalises over the samples of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(WIDTH) for _ in range(2))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        x = x + self.norms[0](torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x)))))
        x = x + self.norms[1](torch.tanh(self.blocks[3](torch.tanh(self.blocks[2](x)))))
        return torch.nn.functional.mse_loss(self.head(x).squeeze(-1), y)


def train_normalized(layout: tuple[int, int] | None, folder: Path) -> dict[str, Any]:
    """On one device with the pipeline's microbatches as accumulated batches."""
    accumulate = {} if layout is not None else {"accumulate_grad_batches": 2}
    trainer = make_trainer(layout, folder, **accumulate)
    module = Normalized().double()
    trainer.fit(module, loader() if layout is not None else loader(batch_size=2))
    if layout is None:
        return module.state_dict()
    trainer.save_checkpoint(folder / "normalized.ckpt")
    return {}


def test_batch_norm_is_that_of_accumulated_microbatches(pool: WorkerPool, tmp_path: Path) -> None:
    expected = train_normalized(None, tmp_path)
    pool.run(train_normalized, (2, 1), tmp_path)
    main([str(tmp_path / "normalized.ckpt"), str(tmp_path / "plain.ckpt")])
    found = torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"]
    assert found["norms.1.num_batches_tracked"] == 8
    assert largest_difference(dict(found), dict(expected)) < 1e-9
