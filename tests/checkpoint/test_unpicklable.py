"""What of a checkpoint cannot be pickled is left out and told; the rest is saved, and a training resumes from it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from pool import WorkerPool
from small_models import Stack
from torch import nn
from torch.utils.data import DataLoader
from trained_parts import largest_difference, loader, make_trainer, together, weights

from lightning_pp.checkpoint.reading.open import read_alone

BOTH = pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "single_file"])
BEGINS_AGAIN = "A training that is resumed within an epoch begins its data again."


class Keeping(DataLoader[Any]):
    """Its state has a function where ``is_bad``."""

    is_bad = True
    loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"next": (lambda: 0) if self.is_bad else 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Data(pl.LightningDataModule):
    """Its state has an object of a class that nothing can import."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data
        self.loaded: Any = None

    def train_dataloader(self) -> Any:
        return self.data

    def state_dict(self) -> dict[str, Any]:
        class Local:
            pass

        return {"where": Local()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Kept(pl.Callback):
    """Keeps what it is made with; two of them have states of their own."""

    def __init__(self, name: str, state: Any) -> None:
        self.name, self.state, self.loaded = name, state, None

    @property
    def state_key(self) -> str:
        return self.name

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Scheduled(torch.optim.lr_scheduler.ExponentialLR):
    """Keeps a function, so that its state has one."""

    def __init__(self, optimizer: Any) -> None:
        self.noted = lambda: 0
        super().__init__(optimizer, 0.9)


class Full(Stack):
    """Scheduled, and with a function in the checkpoint beside a number."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": Scheduled(optimizer), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["opened"] = {"by": lambda: 0}
        checkpoint["number"] = 3


def fit(
    layout: tuple[int, int], folder: Path, bad: tuple[int, ...], options: dict[str, Any], path: Path | None = None
) -> tuple[Any, list[str], Any]:
    """Loads of the loader; what was told of pickling; the weights. Saves four times, after each two batches."""
    saver = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(layout, folder, options, max_epochs=2, callbacks=[saver], enable_checkpointing=True)
    module, given = Stack().double(), loader(replicas=layout[1])
    data = Keeping(given.dataset, batch_size=given.batch_size, sampler=given.sampler)
    data.is_bad = trainer.global_rank in bad
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trainer.fit(module, data, ckpt_path=path)
    return data.loaded, [str(each.message) for each in caught if "pickled" in str(each.message)], weights(module)


@pytest.mark.by_day(1)
@BOTH
@pytest.mark.parametrize("bad", [(0, 1), (1,)], ids=["all", "another_rank"])
def test_a_loader_whose_state_cannot_be_pickled(
    pool: WorkerPool, tmp_path: Path, sharded: bool, bad: tuple[int, ...]
) -> None:
    layout, options = (1, 2), {"save_distributed_checkpoint": sharded, "async_checkpoint": len(bad) == 1}
    whole = pool.run(fit, layout, tmp_path / "whole", bad, options)
    # once in four saves, on the first rank that finds it
    told = [texts for _, texts, _ in whole]
    assert [len(texts) for texts in told] == [int(rank == bad[0]) for rank in range(2)], told
    (text,) = told[bad[0]]
    assert text.startswith("The checkpoint is saved without the state of the training loaders: it cannot be pickled (")
    assert "<lambda>" in text and text.endswith(BEGINS_AGAIN)
    # resumed after the epoch, the weights are those of a training that did not stop
    second = pool.run(fit, layout, tmp_path / "second", (), options, path=tmp_path / "whole" / "step=4.ckpt")
    expected = together([each for *_, each in whole])
    assert largest_difference(together([each for *_, each in second]), expected) < 1e-12
    assert [loaded for loaded, *_ in second] == [None if rank in bad else {"next": 7} for rank in range(2)]


def fit_full(folder: Path, sharded: bool, path: Path | None = None) -> tuple[list[str], dict[str, Any]]:
    callbacks = [Kept("with", lambda: 0), Kept("without", 5)]
    trainer = make_trainer(
        (2, 1), folder, {"save_distributed_checkpoint": sharded}, max_epochs=1 + bool(path), callbacks=callbacks
    )
    module, data = Full().double(), Data(loader())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trainer.fit(module, data, ckpt_path=path)
        trainer.save_checkpoint(folder / "full.ckpt")
    rate = trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0]
    loaded = {"data": data.loaded, "callbacks": [each.loaded for each in callbacks], "rate": rate}
    return [str(each.message) for each in caught if "pickled" in str(each.message)], loaded


@pytest.mark.by_day(1)
@BOTH
def test_other_states_that_cannot_be_pickled(pool: WorkerPool, tmp_path: Path, sharded: bool) -> None:
    (told, _), (elsewhere, _) = pool.run(fit_full, tmp_path, sharded)
    whats = {text.removeprefix("The checkpoint is saved without ").partition(":")[0]: text for text in told}
    assert list(whats) == [
        "the state of the callback 'with'",
        "'noted' in the state of learning rate scheduler 0",
        "'Data'",
        "'opened'",
    ]
    assert elsewhere == []
    assert whats["'Data'"].endswith("Loading the checkpoint does not restore it.")
    assert whats["the state of the callback 'with'"].endswith("After resuming, the callback has its initial state.")
    content = read_alone(tmp_path / "full.ckpt", weights_only=False)
    assert content["number"] == 3 and list(content["callbacks"]) == ["without"] and "opened" not in content
    results = pool.run(fit_full, tmp_path, sharded, path=tmp_path / "full.ckpt")
    for _, loaded in results:
        assert loaded["data"] is None and loaded["callbacks"] == [None, {"state": 5}]
        assert loaded["rate"] == pytest.approx(0.05 * 0.9**8)  # of four batches before, and four after


class Holding(Stack):
    """Its hyper-parameters have the module that it trains, as ``save_hyperparameters()`` keeps an argument."""

    def __init__(self, blocks: nn.Module, rate: float = 0.1, others: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = blocks
        self.norm = (others or {"norms": [nn.Identity()]})["norms"][0]

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(self.norm(x)).squeeze(-1)  # on the last stage


def fit_holding(folder: Path, sharded: bool) -> list[str]:
    trainer = make_trainer((2, 1), folder, {"save_distributed_checkpoint": sharded}, max_epochs=1)
    module = Holding(Stack().blocks, others={"norms": [nn.LayerNorm(8)]}).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trainer.fit(module, loader())
        trainer.save_checkpoint(folder / "holding.ckpt")
    return [str(each.message) for each in caught if "The checkpoint is saved without" in str(each.message)]


@BOTH
def test_modules_among_hyper_parameters(pool: WorkerPool, tmp_path: Path, sharded: bool) -> None:
    assert pool.run(fit_holding, tmp_path, sharded) == [[], []]
    content = read_alone(tmp_path / "holding.ckpt", weights_only=False)
    kept = content["hyper_parameters"]
    assert kept["rate"] == 0.1
    again = Holding(**kept).double()
    again.load_state_dict(content["state_dict"])
    assert {name: each.shape for name, each in again.named_parameters()} == {
        name: each.shape for name, each in Holding(Stack().blocks, 0.1, {"norms": [nn.LayerNorm(8)]}).named_parameters()
    }
    if not sharded:
        loaded = Holding.load_from_checkpoint(tmp_path / "holding.ckpt", weights_only=False)
        assert loaded.hparams["rate"] == 0.1
