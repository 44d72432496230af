"""What a Trainer does around the steps is the same for a pipeline, on every rank, as for one device."""

from __future__ import annotations

import copy
from typing import Any

import feature_parts
import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from feature_parts import Data, assert_equal_trees, check_on_every_rank, make, plain
from feature_parts import make_unchecked_trainer as make_trainer
from parity_run import Layout, whole_weights
from pool import WorkerPool
from small_models import NUM_CLASSES, Classifier
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

TWO_STAGES = Layout("1f1b", 2, 1, 3)
THREE_STAGES = Layout("zb_h1", 3, 1, 4)
TWO_BY_TWO = Layout("zb_h1", 2, 2, 2)


def at_night(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


def trained_part(module: L.LightningModule, layout: Layout | None) -> dict[str, float]:
    """A number for each parameter, whole on every rank: ranks tell each other theirs."""
    sums = {name: float(value.double().square().sum()) for name, value in whole_weights(module).items()}
    if layout is not None and layout.world_size > 1:
        parts: list[Any] = [None] * layout.world_size
        torch.distributed.all_gather_object(parts, sums)
        sums = {name: value for part in parts for name, value in part.items()}
    return sums


class Notes(L.Callback):
    """Copies of the trainer's three kinds of metrics after every training batch, training epoch and validation."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, Any]] = []

    def note(self, trainer: L.Trainer, when: str) -> None:
        self.taken.append(
            (
                when,
                {
                    "callback": plain(dict(trainer.callback_metrics)),
                    "logged": plain(dict(trainer.logged_metrics)),
                    "progress_bar": plain(dict(trainer.progress_bar_metrics)),
                    "step": trainer.global_step,
                },
            )
        )

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note(trainer, "train batch")

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note(trainer, "sanity check" if trainer.sanity_checking else "validation")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note(trainer, "train epoch")

    def on_test_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note(trainer, "test")


# ---------------------------------------------------------------- torchmetrics


class WithMetrics(Classifier):
    """Metrics logged as objects, one by one and as a collection."""

    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.train_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES)
        self.val_metrics = MetricCollection(
            {"f1": MulticlassF1Score(NUM_CLASSES), "recall": MulticlassAccuracy(NUM_CLASSES)}, prefix="val_"
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.train_accuracy(logits, batch[1])
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.val_accuracy.update(logits, batch[1])
        self.log("val_accuracy", self.val_accuracy)
        self.val_metrics.update(logits, batch[1])
        self.log_dict(self.val_metrics)


class ComputesInHook(WithMetrics):
    """The other way that torchmetrics documents: compute and reset by hand at the epoch's end."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_metrics.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()


def metrics(layout: Layout | None, by_hand: bool) -> Any:
    notes = Notes()
    module = make(ComputesInHook if by_hand else WithMetrics)
    make_trainer(layout, callbacks=[notes]).fit(module, Data())
    return notes.taken


@pytest.mark.by_day(1)
@pytest.mark.parametrize("by_hand", [False, True], ids=["as_object", "by_hand"])
@pytest.mark.parametrize("layout", [at_night(TWO_STAGES), TWO_BY_TWO], ids=str)
def test_torchmetrics(pool: WorkerPool, layout: Layout, by_hand: bool) -> None:
    expected = check_on_every_rank(pool, metrics, layout, by_hand)
    final = dict(expected)["train epoch"]["callback"]
    assert 0 < final["train_accuracy"] < 1 and 0 < final["val_f1"] < 1


# ---------------------------------------------------------------- what steps return and keep


class ReturnsExtras(Classifier):
    """Training returns a dict with more than the loss, validation a tensor, and hooks read them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return {"loss": loss, "logits": logits, "right": (logits.argmax(-1) == batch[1]), "index": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).softmax(-1)


class ReadsOutputs(L.Callback):
    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append({key: plain(value) for key, value in outputs.items()})

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)


def extras(layout: Layout | None) -> Any:
    reader = ReadsOutputs()
    make_trainer(layout, callbacks=[reader], max_epochs=1).fit(make(ReturnsExtras), Data())
    return reader.outputs


def test_extras_beside_the_loss(pool: WorkerPool) -> None:
    expected = check_on_every_rank(pool, extras, THREE_STAGES)
    assert expected[0]["logits"].shape == (8, NUM_CLASSES)


class KeepsOutputs(Classifier):
    """The recipe of Lightning's documentation for epoch-end hooks: steps append, the hook reads and clears."""

    def __init__(self, lr: float = 0.3) -> None:
        super().__init__(lr)
        self.training_step_outputs: list[Tensor] = []
        self.validation_step_outputs: list[Any] = []
        self.of_samples: tuple[list[Any], dict[str, list[Any]], dict[float, Any], set[int]] = [], {"all": []}, {}, set()
        self.num_batches_seen = 0
        self.num_right = self.num_rows = 0
        self.total_loss, self.average_loss = 0.0, 1.0
        self.epochs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.training_step_outputs.append(loss.detach())
        self.num_batches_seen += 1
        return loss

    def on_train_epoch_end(self) -> None:
        mean = torch.stack(self.training_step_outputs).mean()
        self.epochs.append({"train": mean, "count": len(self.training_step_outputs), "seen": self.num_batches_seen})
        self.training_step_outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.validation_step_outputs.append({"logits": logits, "target": batch[1]})
        rows, by_name, by_key, classes = self.of_samples
        rows.extend(logits.max(-1)[0].tolist())
        by_name["all"] += [f"class {number}" for number in batch[1].tolist()]
        for key, row in zip(batch[0][:, 0].tolist(), logits.tolist(), strict=True):
            by_key[key] = {"row": row}
        classes.update(batch[1].tolist())
        self.num_right += (logits.argmax(-1) == batch[1]).sum().item()
        self.num_rows += len(batch[1])
        self.total_loss += F.cross_entropy(logits, batch[1], reduction="sum").item()
        self.average_loss = 0.9 * self.average_loss + 0.1 * F.cross_entropy(logits, batch[1]).item()

    def on_validation_epoch_end(self) -> None:
        *kept, classes = copy.deepcopy(self.of_samples)
        numbers = [self.num_right, self.num_rows, self.total_loss, self.average_loss]
        self.epochs.append({"of_samples": kept, "classes": sorted(classes), "numbers": numbers})
        logits = torch.cat([output["logits"] for output in self.validation_step_outputs])
        target = torch.cat([output["target"] for output in self.validation_step_outputs])
        self.log("val_from_all", F.cross_entropy(logits, target))
        self.epochs.append({"logits": logits, "target": target})
        self.validation_step_outputs.clear()


def kept_outputs(layout: Layout | None) -> Any:
    module, notes = make(KeepsOutputs), Notes()
    # of single samples only the check can tell that an entry is one of a sample, and not of the batch
    feature_parts.make_trainer(layout, callbacks=[notes]).fit(module, Data())
    return {"epochs": module.epochs, "notes": notes.taken}


@pytest.mark.parametrize("layout", [TWO_STAGES, at_night(THREE_STAGES)], ids=str)
def test_what_steps_append_to_the_module(pool: WorkerPool, layout: Layout) -> None:
    expected = check_on_every_rank(pool, kept_outputs, layout)
    assert expected["epochs"][1]["logits"].shape == (6, NUM_CLASSES)
    assert len(expected["epochs"][0]["of_samples"][0]) == 6


# ---------------------------------------------------------------- validate, test, predict


def predictions(layout: Layout | None) -> Any:
    return make_trainer(layout).predict(make(), Data())


@pytest.mark.parametrize("layout", [at_night(TWO_STAGES), Layout("zb_v", 2, 1, 3), at_night(THREE_STAGES)], ids=str)
def test_predictions_on_every_rank_of_the_pipeline(pool: WorkerPool, layout: Layout) -> None:
    expected = check_on_every_rank(pool, predictions, layout)
    assert [len(batch["label"]) for batch in expected] == [4, 4, 2]


def test_replicas_predict_their_own_samples(pool: WorkerPool) -> None:
    expected = predictions(None)
    results = pool.run(predictions, TWO_BY_TWO, world_size=4, timeout=120)
    for rank, found in enumerate(results):
        mine = [{key: value[rank % 2 :: 2] for key, value in batch.items()} for batch in expected]
        assert_equal_trees(found, mine, path=f"rank {rank}")


def evaluated_alone(layout: Layout | None, verb: str) -> Any:
    trainer = make_trainer(layout)
    return [plain(metrics) for metrics in getattr(trainer, verb)(make(), Data(), verbose=False)]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("verb", "layout"),
    [
        ("validate", THREE_STAGES),
        ("test", TWO_BY_TWO),
        at_night("validate", TWO_BY_TWO),
        at_night("test", THREE_STAGES),
    ],
    ids=str,
)
def test_evaluation_without_training(pool: WorkerPool, verb: str, layout: Layout) -> None:
    check_on_every_rank(pool, evaluated_alone, layout, verb)


def one_after_the_other(layout: Layout | None) -> Any:
    trainer, module, data = make_trainer(layout), make(), Data()
    results: dict[str, Any] = {"before": plain(trainer.validate(module, data, verbose=False))}
    trainer.fit(module, data)
    results["steps"] = trainer.global_step
    results["validate"] = plain(trainer.validate(module, data, verbose=False))
    results["test"] = plain(trainer.test(module, data, verbose=False))
    results["predict"] = trainer.predict(module, data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data)
    results["more steps"] = trainer.global_step
    results["weights"] = trained_part(module, layout)
    return results


@pytest.mark.parametrize("layout", [TWO_STAGES, at_night(THREE_STAGES)], ids=str)
def test_one_trainer_for_everything(pool: WorkerPool, layout: Layout) -> None:
    expected = check_on_every_rank(pool, one_after_the_other, layout)
    assert (expected["steps"], expected["more steps"]) == (4, 6)


def new_trainer_for_a_split_module(layout: Layout) -> None:
    module, data = make(), Data()
    make_trainer(layout).fit(module, data)
    make_trainer(layout).test(module, data)


def test_a_split_module_is_refused_by_another_trainer(pool: WorkerPool) -> None:
    for message in pool.refusals("ConfigurationError", new_trainer_for_a_split_module, TWO_STAGES):
        assert "Another PipelineParallelStrategy split this" in message


# ---------------------------------------------------------------- flags that choose batches

FLAGS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run_of_2": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 2, "max_epochs": 3},
    "limits": {"limit_train_batches": 2, "limit_val_batches": 1},
    "limit_as_share": {"limit_train_batches": 0.7, "limit_val_batches": 0.5},
    "no_validation": {"limit_val_batches": 0},
    "sanity_check": {"num_sanity_val_steps": 2},
    "whole_sanity_check": {"num_sanity_val_steps": -1},
    "val_check_interval": {"val_check_interval": 1},
    "validation_every_2_epochs": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "max_steps": {"max_steps": 4, "max_epochs": -1},
    "loaders_made_again": {"reload_dataloaders_every_n_epochs": 1},
}


def flagged(layout: Layout | None, flags: dict[str, Any]) -> Any:
    notes, module = Notes(), make()
    trainer = make_trainer(layout, callbacks=[notes], log_every_n_steps=1, **flags)
    trainer.fit(module, Data(num_train=22, num_val=10))
    return {
        "notes": notes.taken,
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "weights": trained_part(module, layout),
    }


@pytest.mark.by_day(2)
@pytest.mark.parametrize("flags", FLAGS)
def test_flags_that_choose_batches(pool: WorkerPool, flags: str) -> None:
    expected = check_on_every_rank(pool, flagged, TWO_STAGES, FLAGS[flags])
    assert expected["notes"]


# ---------------------------------------------------------------- precision


class SwitchableLoss(Classifier):
    """Inputs come in the module's dtype only if the precision plugin sees to it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0].float() if self.layers[0].weight.dtype == torch.float32 else batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("train_loss", loss)
        return {"loss": loss, "dtype": str(logits.dtype), "weights": str(self.layers[6].weight.dtype)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0].float() if self.layers[0].weight.dtype == torch.float32 else batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]).double(), sync_dist=True)


def with_precision(layout: Layout | None, precision: str) -> Any:
    reader, notes = ReadsOutputs(), Notes()
    trainer = make_trainer(layout, precision=precision, callbacks=[notes])
    reader.on_validation_batch_end = lambda *_: None  # type: ignore[method-assign,assignment]
    trainer.callbacks.append(reader)
    trainer.fit(make(SwitchableLoss, lr=0.1), Data())
    return {
        "outputs": reader.outputs,
        "validation": [note["callback"] for when, note in notes.taken if when == "validation"],
    }


TOLERANCES = {"32-true": 2e-6, "bf16-true": 3e-2, "bf16-mixed": 1e-2}


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ("32-true", TWO_STAGES),
        at_night("bf16-true", THREE_STAGES),
        ("bf16-mixed", TWO_STAGES),
        at_night("32-true", THREE_STAGES),
        at_night("bf16-true", TWO_STAGES),
        at_night("bf16-mixed", THREE_STAGES),
    ],
    ids=str,
)
def test_precisions(pool: WorkerPool, precision: str, layout: Layout) -> None:
    expected = check_on_every_rank(pool, with_precision, layout, precision, tolerance=TOLERANCES[precision])
    dtypes = {"32-true": "torch.float32", "bf16-true": "torch.bfloat16", "bf16-mixed": "torch.bfloat16"}
    assert expected["outputs"][0]["dtype"] == dtypes[precision]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_precisions_with_shards(pool: WorkerPool, precision: str) -> None:
    """Outputs are of a replica's batch there, and the validation loss of all."""
    expected = with_precision(None, precision)["validation"]
    for found in pool.run(with_precision, TWO_BY_TWO, precision, world_size=4, timeout=120):
        for mine, theirs in zip(found["validation"], expected, strict=True):
            assert_equal_trees(mine["val_loss"], theirs["val_loss"], tolerance=TOLERANCES[precision])


# ---------------------------------------------------------------- where layers are made


class BuiltLate(Classifier):
    """Makes its layers in ``configure_model``."""

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            torch.manual_seed(13)
            self.late = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.late(x)


def built_late(layout: Layout | None) -> Any:
    module, notes = make(BuiltLate), Notes()
    del module.layers
    make_trainer(layout, callbacks=[notes]).fit(module, Data())
    return {"notes": notes.taken, "weights": trained_part(module, layout)}


def test_layers_made_in_configure_model(pool: WorkerPool) -> None:
    check_on_every_rank(pool, built_late, TWO_STAGES)
