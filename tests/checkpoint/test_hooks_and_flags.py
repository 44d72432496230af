"""What hooks make of a checkpoint is what is loaded; flags reach the file; a run's own state continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from pool import WorkerPool
from small_models import WIDTH, Stack
from trained_parts import largest_difference, loader, make_trainer, together, weights
from training_script import ResumableLoader


class Renamed(Stack):
    """The same model after its author renamed the head, doubled the scale and added a block."""

    def __init__(self) -> None:
        super().__init__(num_blocks=5)
        self.out = self.head
        del self.head

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        for block in self.blocks:
            x = x + self.scale * torch.tanh(block(x))
        return torch.nn.functional.mse_loss(self.out(x).squeeze(-1), y)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.replace("head.", "out."): value for name, value in state.items()}
        checkpoint["state_dict"]["scale"] = state["scale"] * 2
        checkpoint["state_dict"]["blocks.4.weight"] = torch.eye(WIDTH, dtype=torch.float64)
        checkpoint["state_dict"]["blocks.4.bias"] = torch.cat([state["blocks.3.bias"][:2], state["blocks.0.bias"][2:]])


def train_and_save(layout: tuple[int, int] | None, path: Path, sharded: bool, **stack: Any) -> dict[str, Any]:
    options = {"save_distributed_checkpoint": sharded}
    trainer = make_trainer(layout, path.parent, options)
    module = Stack(**stack).double()
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    return weights(module)


def load_renamed(layout: tuple[int, int] | None, path: Path) -> tuple[dict[str, Any], float]:
    trainer = make_trainer(layout, path.parent)
    module = Renamed().double()
    (metrics,) = trainer.validate(module, loader(), ckpt_path=path, verbose=False)
    return weights(module), metrics["val_loss"]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "single_file"])
def test_edits_of_on_load_checkpoint_are_loaded(pool: WorkerPool, tmp_path: Path, sharded: bool) -> None:
    """Renamed, computed, cut, joined and added entries, in a layout that is not the saved one."""
    path = tmp_path / "model.ckpt"
    saved = together(pool.run(train_and_save, (2, 1), path, sharded))
    results = pool.run(load_renamed, (1, 2), path)
    expected = {name.replace("head.", "out."): value for name, value in saved.items()}
    expected["scale"] = saved["scale"] * 2
    expected["blocks.4.weight"] = torch.eye(WIDTH, dtype=torch.float64)
    expected["blocks.4.bias"] = torch.cat([saved["blocks.3.bias"][:2], saved["blocks.0.bias"][2:]])
    for found, _ in results:
        assert largest_difference(found, expected) == 0
    plain = tmp_path / "plain.ckpt"
    torch.save({"state_dict": expected, "pytorch-lightning_version": pl.__version__}, plain)
    trainer, module = make_trainer(None, tmp_path), Renamed().double()
    module.on_load_checkpoint = lambda checkpoint: None  # type: ignore[method-assign]
    (metrics,) = trainer.validate(module, loader(), ckpt_path=plain, verbose=False)
    assert abs(results[0][1] - metrics["val_loss"]) < 1e-12


class Trusting(Stack):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["where"] = Path("here")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.where = checkpoint["where"]


def flags(path: Path, sharded: bool) -> list[str]:
    """Messages of resuming, and of validating, with each value of weights_only; the trainer is what passes it on."""
    trainer = make_trainer((2, 1), path.parent, {"save_distributed_checkpoint": sharded})
    module = Trusting().double()
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    messages = []
    for weights_only in (None, True, False):
        trainer = make_trainer((2, 1), path.parent, max_epochs=2)
        module = Trusting().double()
        try:
            trainer.fit(module, loader(), ckpt_path=path, weights_only=weights_only)
            messages.append(f"loaded {module.where}")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    for weights_only in (False, None):  # the same trainer: what one run was told is not told to the next
        try:
            trainer.validate(module, loader(), ckpt_path=path, weights_only=weights_only, verbose=False)
            messages.append(f"validated {module.where}")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


@pytest.mark.by_day(1)
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "single_file"])
def test_weights_only_by_default_and_the_flag_reaches_the_file(pool: WorkerPool, tmp_path: Path, sharded: bool) -> None:
    for messages in pool.run(flags, tmp_path / "model.ckpt", sharded):
        by_default, safe, trusting, validated, not_told = messages
        for refused in (by_default, safe, not_told):
            assert refused.startswith("CheckpointError") and "pass weights_only=False" in refused
            assert str(tmp_path / "model.ckpt") in refused
        assert trusting == "loaded here"
        assert validated == "validated here"


class Placed(ResumableLoader):
    """A loader whose state says which replica it belongs to."""

    replica = 0
    loaded = -1

    def state_dict(self) -> dict[str, int]:
        return {"replica": self.replica, **super().state_dict()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.loaded = state["replica"]


def with_dropout(layout: tuple[int, int], folder: Path, path: Path | None) -> tuple[list[float], int]:
    """Losses of a training with dropout, from a checkpoint or the start; and which loader's state came back."""
    saver = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    arguments: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True}
    trainer = make_trainer(layout, folder, max_epochs=2, **arguments)
    pl.seed_everything(4, verbose=False)
    module = Stack(dropout=0.4).double()
    data = loader(replicas=layout[1])
    placed = Placed(data.dataset, batch_size=data.batch_size, sampler=data.sampler)
    placed.replica = trainer.strategy.global_rank % layout[1]  # type: ignore[attr-defined]
    trainer.fit(module, placed, ckpt_path=path)
    return module.losses, placed.loaded


def test_random_numbers_and_loaders_continue(pool: WorkerPool, tmp_path: Path) -> None:
    """In one layout a training with dropout continues as if it had not stopped, and each replica's loader with it."""
    layout = (1, 2)
    whole = pool.run(with_dropout, layout, tmp_path / "whole", None)
    second = pool.run(with_dropout, layout, tmp_path / "second", tmp_path / "whole" / "step=2.ckpt")
    for rank in range(2):
        losses = whole[rank][0]
        assert len(losses) == 8
        assert max(abs(a - b) for a, b in zip(second[rank][0], losses[2:], strict=True)) < 1e-12
        assert second[rank][1] == rank
