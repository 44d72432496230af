"""Runs of the step that are not the real one leave nothing behind, and errors of the step are told as they are."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, ClassVar

import lightning.pytorch as L
import pytest
import torch
from feature_parts import Data, check_on_every_rank, make, make_trainer
from lightning.pytorch.loggers.logger import DummyLogger
from parity_run import Layout
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_pp.errors import SplitError

TWO_STAGES = Layout("1f1b", 2, 1, 2)
_log = logging.getLogger("a user's module")


class Steps(Classifier):
    """What is done in a training step, by the kind of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.read: list[float | None] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1], ignore_index=0)  # which is counted in rehearsals
        return getattr(self, self.kind)(loss, batch_idx)

    def says(self, loss: Tensor, batch_idx: int) -> Tensor:
        print("printed", batch_idx)
        print("told", batch_idx, file=sys.stderr)
        _log.warning("logged %d", batch_idx)
        warnings.warn(f"warned {batch_idx}", stacklevel=1)
        return loss

    def fails(self, loss: Tensor, batch_idx: int) -> Tensor:
        print("before it failed", batch_idx)
        raise ValueError("as it says")

    def adds_text(self, loss: Tensor, batch_idx: int) -> Tensor:
        return loss + "text"  # type: ignore[operator]

    def ends_epoch(self, loss: Tensor, batch_idx: int) -> Tensor:
        raise StopIteration

    def logs_text(self, loss: Tensor, batch_idx: int) -> Tensor:
        self.log("text", "text")  # type: ignore[arg-type]
        return loss

    def logs_rows(self, loss: Tensor, batch_idx: int) -> Tensor:
        self.log("rows", loss.expand(2))
        return loss

    def calls_logger(self, loss: Tensor, batch_idx: int) -> Tensor:
        self.logger.log_metrics({"loss": float(loss)})  # type: ignore[union-attr]
        return loss

    def reads_metrics_before(self, loss: Tensor, batch_idx: int) -> Tensor:
        self.read.append(self.metric_there())
        self.log("index", float(batch_idx))
        return loss

    def reads_metrics_after(self, loss: Tensor, batch_idx: int) -> Tensor:
        self.log("index", float(batch_idx))
        self.read.append(self.metric_there())
        return loss

    def metric_there(self) -> float | None:
        value = self.trainer.callback_metrics.get("index")
        return None if value is None else float(value)


def outcome(kind: str) -> dict[str, Any]:
    """What a fit of two batches has printed, logged, warned of and raised."""
    found: dict[str, Any] = {"printed": io.StringIO(), "told": io.StringIO(), "logged": io.StringIO(), "error": None}
    handler = logging.StreamHandler(found["logged"])
    _log.addHandler(handler)
    trainer = make_trainer(TWO_STAGES, max_epochs=1, limit_train_batches=2, logger=DummyLogger())
    with (
        redirect_stdout(found["printed"]),
        redirect_stderr(found["told"]),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("default")
        try:
            module = make(Steps, kind=kind)
            found["read"] = module.read
            trainer.fit(module, Data())
        except Exception as error:
            found["error"] = type(error).__name__, str(error)
    _log.removeHandler(handler)
    streams = {name: value.getvalue().splitlines() for name, value in found.items() if isinstance(value, io.StringIO)}
    return {**found, **streams, "warned": [str(warning.message) for warning in caught]}


def test_output_comes_once_for_each_microbatch(pool: WorkerPool) -> None:
    last = pool.run(outcome, "says", world_size=2)[1]
    assert last["error"] is None
    assert last["printed"] == ["printed 0"] * 2 + ["printed 1"] * 2
    assert [line for line in last["told"] if "told" in line] == ["told 0"] * 2 + ["told 1"] * 2
    assert last["logged"] == ["logged 0"] * 2 + ["logged 1"] * 2
    assert [text for text in last["warned"] if text.startswith("warned")] == ["warned 0", "warned 1"]


ERRORS = {
    "fails": ("ValueError", "as it says"),
    "adds_text": ("TypeError", "unsupported operand type(s) for +: 'Tensor' and 'str'"),
    "ends_epoch": ("ConfigurationError", "training_step raised StopIteration"),
    "logs_text": ("ValueError", "`str` values cannot be logged"),
    "logs_rows": ("ValueError", "a tensor of shape (2,), but it must have a single element"),
}


@pytest.mark.by_day(3)
@pytest.mark.parametrize("kind", ERRORS)
def test_errors_are_the_steps_own_on_every_rank(pool: WorkerPool, kind: str) -> None:
    for found in pool.run(outcome, kind, world_size=2):
        assert found["error"] is not None
        name, text = ERRORS[kind]
        assert found["error"][0] == name and text in found["error"][1]
        if kind == "fails":
            assert "before it failed 0" in found["printed"]


def test_a_logger_called_in_a_step_is_told(pool: WorkerPool) -> None:
    first, _ = pool.run(outcome, "calls_logger", world_size=2)
    told = [text for text in first["warned"] if "calls a logger itself" in text]
    assert first["error"] is None and len(told) == 1
    assert "test_runs_without_effect.py" in told[0] and "Use self.log" in told[0]


@pytest.mark.parametrize("kind", ["reads_metrics_before", "reads_metrics_after"])
def test_metrics_read_after_logging_are_told(pool: WorkerPool, kind: str) -> None:
    """On one device a step that reads and then logs finds this too; one that logs and then reads finds 0 and 1."""
    first, last = pool.run(outcome, kind, world_size=2)
    told = [text for text in first["warned"] if "reads the trainer's metrics after it has logged" in text]
    assert first["error"] is None and last["read"] == [None, 0.0]
    assert len(told) == (kind == "reads_metrics_after")
    assert all("test_runs_without_effect.py" in text and "the previous batch" in text for text in told)


class CountsOnItsClass(Classifier):
    """Counts its steps on its class, and reads how far the training is."""

    num_steps: ClassVar[int] = 0
    indices: ClassVar[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        CountsOnItsClass.num_steps += 1
        type(self).last_index = batch_idx
        self.indices.append(batch_idx)
        return cross_entropy(self(batch[0]), batch[1], ignore_index=0)


def counted_on_class(layout: Layout) -> tuple[int, list[int]]:
    CountsOnItsClass.num_steps = 0
    CountsOnItsClass.indices.clear()
    make_trainer(layout, num_sanity_val_steps=1).fit(make(CountsOnItsClass), Data())
    return CountsOnItsClass.num_steps, CountsOnItsClass.indices


@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", [TWO_STAGES, Layout("zb_h1", 3, 1, 2)], ids=str)
def test_a_class_changes_once_for_each_run_of_the_step(pool: WorkerPool, layout: Layout) -> None:
    for num_steps, indices in pool.run(counted_on_class, layout, world_size=layout.world_size, timeout=120):
        assert num_steps == 2 * 2 * 2
        assert set(indices) == {0, 1}


class DataThatTransfers(Data):
    num_transferred = 0

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        print("transferred")
        self.num_transferred += 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class Transfers(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_seen", torch.zeros(()))
        self.shapes: list[Any] = []
        self.stages: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.stages.append(str(self.trainer.state.stage))
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.num_seen.add_(len(batch[0]))
        self.shapes.append(tuple(batch[0].shape))
        self._shift = batch[0].mean()
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.shapes[-1][0] >= len(batch[0])  # what the hook has set is there, in a dry run too
        return cross_entropy(self(batch[0] - self._shift), batch[1])


def transferred(layout: Layout | None) -> dict[str, Any]:
    module, data, printed = make(Transfers), DataThatTransfers(), io.StringIO()
    trainer = make_trainer(layout, num_sanity_val_steps=1)
    with redirect_stdout(printed):
        trainer.fit(module, data)
    assert trainer.current_epoch == 2
    loss = float(trainer.callback_metrics["val_loss"])
    lines = printed.getvalue().split().count("transferred")
    counts = {"data": data.num_transferred, "printed": lines, "seen": float(module.num_seen)}
    return {**counts, "hooks": module.stages, "shapes": module.shapes, "loss": loss}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", [TWO_STAGES, Layout("interleaved_1f1b", 1, 1, 2), Layout("zb_h1", 3, 1, 2)], ids=str)
def test_transfer_hooks_run_once_for_each_batch(pool: WorkerPool, layout: Layout) -> None:
    expected = check_on_every_rank(pool, transferred, layout)
    assert expected["data"] == expected["printed"] == len(expected["hooks"]) == len(expected["shapes"]) == 1 + 2 * 4


class UsesUnits(Classifier):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_epoch_end(self) -> None:
        value = self(torch.ones(2, 6, dtype=torch.float64)).mean()
        print(f"{value:.3f}" if self.how == "format" else value.detach().numpy())


def used_in_hook(how: str) -> str:
    with pytest.raises(SplitError, match="needs the data of another stage") as error:
        make_trainer(TWO_STAGES, max_epochs=1).fit(make(UsesUnits, how=how), Data())
    return str(error.value)


@pytest.mark.parametrize("how", ["format", "numpy"])
def test_values_of_units_in_a_hook_are_refused_by_line(pool: WorkerPool, how: str) -> None:
    for text in pool.run(used_in_hook, how, world_size=2):
        assert f"in on_train_epoch_end needs the data of another stage ({how})" in text
        assert "Compute it in training_step or validation_step." in text


def saved_before_a_fit(path: str) -> str:
    trainer: L.Trainer = make_trainer(TWO_STAGES)
    with pytest.raises(AttributeError) as error:
        trainer.save_checkpoint(path)
    return str(error.value)


def test_saving_before_a_fit(pool: WorkerPool, tmp_path: Any) -> None:
    for text in pool.run(saved_before_a_fit, str(tmp_path / "never.ckpt"), world_size=2):
        assert text.startswith("Saving a checkpoint is only possible if a model is attached to the Trainer")
    assert not list(tmp_path.iterdir())
