"""Trainings as public code has them, saved and resumed as a pipeline: they go on as one device does uninterrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from extra_steps import Losses
from lightning.pytorch.callbacks import ModelCheckpoint
from parity_run import Layout
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

NUM_BATCHES = 3
LAYOUT = Layout("zb_h1", 2, num_microbatches=2)


class Module(Blocks):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class WithoutFrozen(Module):
    """Its frozen part is not in its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in [name for name in checkpoint["state_dict"] if name.startswith("blocks.0.")]:
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = self.state_dict()
        checkpoint["state_dict"] |= {name: value for name, value in own.items() if name.startswith("blocks.0.")}


class ByNumberOfSteps(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Average(pl.Callback):
    """Keeps an average of the weights by name, in its own state."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, weight in module.named_parameters():
            before = self.held.get(name, weight.detach().clone())
            self.held[name] = 0.9 * before + 0.1 * weight.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.held = state_dict["held"]


def data(seed: int = 1) -> DataLoader[Any]:
    x = torch.randn(8 * NUM_BATCHES, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(-1).tanh()), batch_size=8)


def run_of(layout: Layout | None, *, sharded: bool = True, **options: Any) -> pl.Trainer:
    strategy = (
        "auto" if layout is None else layout.strategy(save_distributed_checkpoint=sharded, check_first_batches=False)
    )
    options = {"precision": "64-true", "enable_checkpointing": False, **options}
    return trainer(1 if layout is None else layout.world_size, strategy, **options)


def uninterrupted(kind: type[Module], num_epochs: int) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker, on one device: all losses, and the averages in the end."""
    losses, average = Losses(), Average()
    run_of(None, max_epochs=num_epochs, callbacks=[losses, average]).fit(kind(), data())
    return losses.found, average.held


def resumed(kind: type[Module], path: str, *, sharded: bool, validates: bool) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: the losses of a second epoch that is resumed from the end of the first, and the averages then."""
    module = kind()
    first = run_of(LAYOUT, sharded=sharded, callbacks=[Average()])
    first.fit(module, data())
    if validates:
        first.validate(module, data(), verbose=False)
        first.test(module, data(), verbose=False)
    first.save_checkpoint(path)
    losses, average = Losses(), Average()
    second = run_of(LAYOUT, sharded=sharded, max_epochs=2, callbacks=[losses, average])
    second.fit(kind(), data(), ckpt_path=path)
    return losses.found, average.held


class Tested(Module):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


@pytest.mark.parametrize(
    "sharded", [pytest.param(True, id="folder"), pytest.param(False, id="file", marks=pytest.mark.nightly)]
)
def test_after_validation_and_test_the_optimizer_is_saved_and_callbacks_have_their_stage(
    pool: WorkerPool, tmp_path: Path, sharded: bool
) -> None:
    losses, averages = pool.run(uninterrupted, Tested, 2, world_size=1)[0]
    path = str(tmp_path / "a.ckpt")
    found = pool.run(resumed, Tested, path, sharded=sharded, validates=True, world_size=2, timeout=120)
    held: dict[str, Tensor] = {}
    for of_rank, own in found:
        assert of_rank == pytest.approx(losses[NUM_BATCHES:], rel=1e-9)
        held |= {name: value for name, value in own.items() if value.device.type != "meta" and name in averages}
    assert held.keys() == averages.keys()
    for name, value in averages.items():
        torch.testing.assert_close(held[name], value, rtol=1e-9, atol=1e-12)


def test_a_hook_puts_back_what_another_has_left_out(pool: WorkerPool, tmp_path: Path) -> None:
    losses, _ = pool.run(uninterrupted, WithoutFrozen, 2, world_size=1)[0]
    path = str(tmp_path / "a.ckpt")
    for found, _ in pool.run(resumed, WithoutFrozen, path, sharded=False, validates=False, world_size=2, timeout=120):
        assert found == pytest.approx(losses[NUM_BATCHES:], rel=1e-9)


def resumed_within(path: str) -> list[float]:
    """In a worker: the losses from the fourth update on, the first of the second epoch."""
    saving = ModelCheckpoint(path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    run_of(LAYOUT, max_epochs=3, callbacks=[saving], enable_checkpointing=True).fit(ByNumberOfSteps(), data())
    losses = Losses()
    second = run_of(LAYOUT, max_epochs=3, callbacks=[losses])
    second.fit(ByNumberOfSteps(), data(), ckpt_path=f"{path}/step=4.ckpt")
    return losses.found


def test_the_number_of_steps_is_asked_for_before_a_resume_within_an_epoch(pool: WorkerPool, tmp_path: Path) -> None:
    losses, _ = pool.run(uninterrupted, ByNumberOfSteps, 3, world_size=1)[0]
    for found in pool.run(resumed_within, str(tmp_path), world_size=2, timeout=120):
        assert found == pytest.approx(losses[4:], rel=1e-9)


def of_other_stages(path: str) -> None:
    run = run_of(Layout("1f1b", 2, num_microbatches=2), callbacks=[Average()])
    run.fit(Module(), data())
    run.save_checkpoint(path)
    other = Layout("1f1b", 2, num_microbatches=2).strategy(split_points=["blocks.1"], check_first_batches=False)
    again = trainer(2, other, precision="64-true", callbacks=[Average()], max_epochs=2)
    again.fit(Module(), data(), ckpt_path=path)


def test_states_of_callbacks_are_refused_under_other_stages(pool: WorkerPool, tmp_path: Path) -> None:
    told = pool.refusals(None, of_other_stages, str(tmp_path / "a.ckpt"), world_size=2)
    assert len(told) == 2 and all(
        "The state of the callback 'Average' has tensors that differ" in text for text in told
    )
