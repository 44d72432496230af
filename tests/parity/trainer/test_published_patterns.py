"""How published modules and callbacks are written, in ways that are easy to get wrong: each as with a plain Trainer."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from feature_parts import check_on_every_rank, make_trainer, plain
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import CombinedLoader
from parity_run import Layout
from pipelined_fit import loader
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor

LAYOUTS = [Layout("1f1b", 2, 1, 2), pytest.param(Layout("zb_h1", 3, 1, 2), marks=pytest.mark.nightly)]

Pattern = Callable[[Layout | None, Path], Any]


def weights(trainer: L.Trainer, module: L.LightningModule, layout: Layout | None) -> Any:
    """The trained weights, on every rank."""
    if layout is not None:
        trainer.strategy.gather_module()  # type: ignore[attr-defined]
    return {name: value.clone() for name, value in module.state_dict().items()}


def fitted(layout: Layout | None, module: Any, *loaders: Any, **kwargs: Any) -> Any:
    trainer = make_trainer(layout, **kwargs)
    trainer.fit(module, *(loaders or (loader(),)))
    return weights(trainer, module, layout), plain(dict(trainer.callback_metrics))


class OptimizerFromTheStart(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

    def configure_optimizers(self) -> Any:
        return self.optimizer


def optimizer_from_init(layout: Layout | None, folder: Path) -> Any:
    return fitted(layout, OptimizerFromTheStart())


class NoOptimizer(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def configure_optimizers(self) -> None:
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


def no_optimizer(layout: Layout | None, folder: Path) -> Any:
    module = NoOptimizer()
    trainer = make_trainer(layout)
    trainer.fit(module, loader())
    trainer.save_checkpoint(folder / "no_optimizer.ckpt")
    return module.seen, weights(trainer, module, layout)


class Thaw(BaseFinetuning):
    """Freezes the first blocks, and trains them from the second epoch on, in a group of their own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks[:2])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[:2], optimizer, lr=0.05)


class Tuned(Blocks):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


def finetuning(layout: Layout | None, folder: Path) -> Any:
    return fitted(layout, Tuned(), callbacks=[Thaw()])


def finetuning_saved_and_resumed(layout: Layout | None, folder: Path) -> Any:
    path = folder / "tuned.ckpt"
    trainer = make_trainer(layout, callbacks=[Thaw()], max_epochs=2)
    trainer.fit(Tuned().double(), loader())
    trainer.save_checkpoint(path)
    module = Tuned().double()
    trainer = make_trainer(layout, callbacks=[Thaw()], max_epochs=3)
    trainer.fit(module, loader(), ckpt_path=str(path))
    return weights(trainer, module, layout)


class ThawAll(BaseFinetuning):
    """Freezes everything, and thaws the head with the first epoch; blocks that the optimizer has already stay there."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(pl_module.head if epoch == 0 else pl_module.blocks[:2], optimizer, lr=0.05)


class TunedFromNothing(Blocks):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.blocks[:2].parameters(), lr=0.02)


def finetuning_of_a_frozen_module(layout: Layout | None, folder: Path) -> Any:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = fitted(layout, TunedFromNothing(), callbacks=[ThawAll()])
    is_told = any("init your optimizer in" in str(each.message) for each in told)
    return found, is_told or int(os.environ.get("RANK", 0)) > 0


class AddsAGroup(Blocks):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": list(self.blocks.parameters()), "lr": 0.01})


def added_group(layout: Layout | None, folder: Path) -> Any:
    return fitted(layout, AddsAGroup())


class ThawsByItself(Blocks):
    """Frozen first blocks, which the module thaws; the optimizer has had them from the start."""

    at_batch = -1

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[:2].requires_grad_(True)
            self.head.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at_batch:
            self.blocks[1].requires_grad_(True)


def thawed_by_the_module(layout: Layout | None, folder: Path) -> Any:
    return fitted(layout, ThawsByItself())


class CopiesAtTheStart(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.copies = copy.deepcopy([c for c in trainer.callbacks if c is not self])  # type: ignore[attr-defined]
        self.module = copy.deepcopy(pl_module.blocks)


def deep_copies(layout: Layout | None, folder: Path) -> Any:
    return fitted(layout, Blocks(), callbacks=[CopiesAtTheStart(), Thaw()])


class CopiedState(Blocks):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}


def state_dict_of_copies(layout: Layout | None, folder: Path) -> Any:
    path = folder / "copies.ckpt"
    trainer = make_trainer(layout)
    trainer.fit(CopiedState().double(), loader())
    trainer.save_checkpoint(path)
    module = CopiedState().double()  # a plain Trainer restores before it converts
    trainer = make_trainer(layout, max_epochs=3)
    trainer.fit(module, loader(), ckpt_path=str(path))
    return weights(trainer, module, layout)


class TakesAnything(Blocks):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any) -> None:
        self.log("val_loss", self.loss(args[0]))


def any_arguments(layout: Layout | None, folder: Path) -> Any:
    return fitted(layout, TakesAnything(), loader(), loader(seed=3))


class ManyLoaders(Blocks):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(f"val_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.log(f"test_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
        return self(batch[0]) + dataloader_idx


def evaluated_first(layout: Layout | None, folder: Path) -> Any:
    found: list[Any] = []
    for what in ("validate", "test", "predict"):
        trainer = make_trainer(layout)
        found.append(plain(getattr(trainer, what)(ManyLoaders(), [loader(), loader(seed=3)])))
    return found


class NoLayers(Blocks):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", batch[0].mean())


def step_without_layers(layout: Layout | None, folder: Path) -> Any:
    trainer = make_trainer(layout)
    module = NoLayers()
    trainer.fit(module, loader())
    return plain(trainer.test(module, loader(seed=5)))


class ManyLists(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return sum((self.loss(part) for part in batch.values() if part is not None), torch.zeros(()))


class Batches:
    """Nothing but an iterable with a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def combined(layout: Layout | None, mode: str) -> Any:
    first, second = Batches(list(loader())), Batches(list(loader(num_samples=8, seed=3)))
    return fitted(layout, ManyLists(), CombinedLoader({"a": first, "b": second}, mode))  # type: ignore[arg-type]


def combined_lists_min(layout: Layout | None, folder: Path) -> Any:
    return combined(layout, "min_size")


def combined_lists_cycle(layout: Layout | None, folder: Path) -> Any:
    return combined(layout, "max_size_cycle")


class ForgetsATensor(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = torch.zeros(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = None
        return self.loss(batch)


def tensor_to_none(layout: Layout | None, folder: Path) -> Any:
    module = ForgetsATensor()
    return fitted(layout, module), module.last is None


PATTERNS: list[Pattern] = [
    optimizer_from_init, no_optimizer, finetuning, finetuning_saved_and_resumed,
    finetuning_of_a_frozen_module, added_group, thawed_by_the_module,
    deep_copies, state_dict_of_copies, any_arguments, evaluated_first, step_without_layers, combined_lists_min,
    combined_lists_cycle, tensor_to_none,
]  # fmt: skip


@pytest.mark.by_day(3)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_as_with_a_plain_trainer(pool: WorkerPool, tmp_path: Path, layout: Layout, pattern: Pattern) -> None:
    check_on_every_rank(pool, pattern, layout, tmp_path)


class ThawsTooLate(ThawsByItself):
    at_batch = 2


def thawed_in_an_epoch() -> None:
    make_trainer(LAYOUTS[0]).fit(ThawsTooLate(), loader(num_samples=24))


def test_a_change_that_other_stages_cannot_hear_of_is_refused(pool: WorkerPool) -> None:
    for message in pool.refusals(None, thawed_in_an_epoch, world_size=2, timeout=60.0):
        told = r"requires_grad of 2 parameters \(blocks\.1\.bias, blocks\.1\.weight\) was changed before batch 2"
        assert re.search(told, message), message
