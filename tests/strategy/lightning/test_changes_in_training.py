"""Callbacks and overridden methods that look at the whole module: as on one device on every rank, or refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from feature_parts import Data, check_on_every_rank, make
from feature_parts import make_unchecked_trainer as make_trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from parity_run import Layout
from pool import WorkerPool
from small_models import Classifier
from test_user_optimizers import resumed_weights, trained_once, trained_twice, whole_weights

TWO_STAGES = Layout("1f1b", 2, 1, 2)


class Unfreezes(Classifier):
    """The way that needs no callback."""

    def on_train_epoch_start(self) -> None:
        for parameter in self.layers[:4].parameters():
            parameter.requires_grad_(self.current_epoch == 1)


class AddsGroup(Classifier):
    """Trains more from the second epoch on; a run that resumes adds the group before its optimizer is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers[4:].parameters(), lr=0.3, momentum=0.9)

    def add(self) -> None:
        optimizer = self.trainer.optimizers[0]
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(self.layers[:4].parameters()), "lr": 0.05})

    def on_fit_start(self) -> None:
        if self.trainer.max_epochs == 3:
            self.add()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.add()


class Copied(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.double()  # one device loads before it converts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}


class Filtered(Classifier):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "layers.0" not in name}


class MakesLayersLate(Classifier):
    def on_train_start(self) -> None:
        self.late = torch.nn.Linear(3, 3)


class Copies(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        others = [callback for callback in trainer.callbacks if callback is not self]
        self.copies = copy.deepcopy((others, pl_module.layers))


def weights(layout: Layout | None, kind: type[Classifier], callbacks: Any = None) -> Any:
    module, trainer = make(kind), make_trainer(layout, callbacks=callbacks)
    trainer.fit(module, Data())
    return whole_weights(trainer, module)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", [TWO_STAGES, Layout("zb_h1", 3, 1, 2), Layout("1f1b", 2, 2, 2)], ids=str)
def test_unfreezing_in_a_hook(pool: WorkerPool, layout: Layout) -> None:
    check_on_every_rank(pool, weights, layout, Unfreezes)


def test_copies_in_on_fit_start(pool: WorkerPool) -> None:
    check_on_every_rank(pool, weights, TWO_STAGES, Classifier, [Copies()])


class KeepsTrainer(Callback):
    """As progress bars do."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trainer = trainer


class CopiesAll(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.copied = copy.deepcopy(trainer.callbacks)


def test_copies_of_callbacks_that_hold_the_trainer_are_refused(pool: WorkerPool) -> None:
    for message in pool.run(refusal, Classifier, [KeepsTrainer(), CopiesAll()], world_size=2):
        assert "ConfigurationError: copy.deepcopy tried to copy the strategy" in message


@pytest.mark.by_day(1)
@pytest.mark.parametrize("as_file", [False, True], ids=["folder", "file"])
def test_state_dict_of_copies(pool: WorkerPool, as_file: bool, tmp_path: Any) -> None:
    check_on_every_rank(pool, trained_twice, TWO_STAGES, Copied, as_file, str(tmp_path))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("as_file", [False, True], ids=["folder", "file"])
@pytest.mark.parametrize("layout", [TWO_STAGES, Layout("1f1b", 2, 2, 2)], ids=str)
def test_groups_added_in_training(pool: WorkerPool, layout: Layout, as_file: bool, tmp_path: Any) -> None:
    check_on_every_rank(pool, resumed, layout, as_file, str(tmp_path))


def resumed(layout: Layout | None, as_file: bool, folder: str) -> Any:
    path = f"{folder}/{'one' if layout is None else 'many'}.ckpt"
    before = whole_weights(*trained_once(layout, AddsGroup, as_file, path))
    return before, resumed_weights(layout, AddsGroup, path)


def refusal(kind: type[Classifier], callbacks: Any = None) -> str:
    try:
        weights(TWO_STAGES, kind, callbacks)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_refused(pool: WorkerPool) -> None:
    for message in pool.run(refusal, Filtered, world_size=2):
        assert "ConfigurationError: state_dict of Filtered leaves out layers.0.bias, layers.0.weight" in message
    for message in pool.run(refusal, MakesLayersLate, world_size=2):
        assert "2 parameters that were added after it was split over the stages: late.weight, late.bias" in message


def warnings_of(folder: str) -> list[str]:
    callbacks = [ModelCheckpoint(folder, save_on_exception=True), OnExceptionCheckpoint(folder)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, trainer = make(), make_trainer(TWO_STAGES, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, Data())
    return [str(warning.message) for warning in caught if "when an exception ends the run" in str(warning.message)]


def test_checkpoints_on_exception(pool: WorkerPool, tmp_path: Any) -> None:
    told, *others = pool.run(warnings_of, str(tmp_path), world_size=2)
    assert [text.split()[0] for text in told] == ["ModelCheckpoint", "OnExceptionCheckpoint"] and others == [[]]
    assert all("every_n_train_steps" in text for text in told)
