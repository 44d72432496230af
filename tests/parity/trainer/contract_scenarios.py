"""Trainings that use one part of Lightning each; every one returns what is compared with a plain Trainer's."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from feature_parts import Data, make, make_trainer, plain
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from parity_run import Layout
from small_models import Classifier
from torch import Tensor

Scenario = Callable[[Layout | None, Path], Any]
SCENARIOS: dict[str, Scenario] = {}
#: For scenarios of several trainings: the check takes as long as a short training.
UNCHECKED = {"check_first_batches": False}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def folder_of(layout: Layout | None, folder: Path) -> Path:
    return folder / ("plain" if layout is None else str(layout))


# ---------------------------------------------------------------- checkpoints

# one callback each in one training: no two have the same monitor, mode and rhythm, by which Lightning tells them apart
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "best of two": {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{step}-{val_loss:.5f}"},
    "worst": {"monitor": "val_loss", "mode": "max", "save_top_k": 1, "filename": "{val_loss:.5f}"},
    "all": {"save_top_k": -1, "every_n_epochs": 1},
    "by steps": {"save_top_k": -1, "every_n_train_steps": 2, "filename": "at-{step}"},
    "none but last": {"save_top_k": 0, "save_last": True, "mode": "max"},
    "last is a link": {"save_top_k": 1, "save_last": "link", "every_n_train_steps": 3},
    "weights": {"save_weights_only": True, "filename": "weights", "every_n_epochs": 2},
    "at the end of training": {"save_on_train_epoch_end": True, "monitor": "mean_loss", "filename": "{epoch}"},
    "plain names": {
        "monitor": "mean_loss",
        "mode": "max",
        "auto_insert_metric_name": False,
        "filename": "e{epoch:02d}-{mean_loss:.4f}",
    },
    "by time": {"train_time_interval": timedelta(seconds=0), "save_top_k": -1, "filename": "t{step}"},
}


class Logs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mean_loss", loss if isinstance(loss, Tensor) else loss["loss"], on_epoch=True, on_step=False)
        return loss


@scenario
def checkpoints_with_every_option(layout: Layout | None, folder: Path) -> Any:
    root = folder_of(layout, folder)
    callbacks = {name: ModelCheckpoint(root / name, **options) for name, options in CHECKPOINTS.items()}
    trainer = make_trainer(layout, enable_checkpointing=True, callbacks=list(callbacks.values()), **UNCHECKED)
    trainer.fit(make(Logs), Data())
    return {
        name: {
            "files": names_in(root / name),
            "best": Path(callback.best_model_path).name,
            "score": plain(callback.best_model_score),
            "last": Path(callback.last_model_path).name,
            "kept": {Path(path).name: plain(value) for path, value in callback.best_k_models.items()},
        }
        for name, callback in callbacks.items()
    }


# ---------------------------------------------------------------- callbacks that stop, watch and change


@scenario
def early_stopping_in_its_forms(layout: Layout | None, folder: Path) -> Any:
    forms: dict[str, dict[str, Any]] = {
        "patience": {"monitor": "val_loss", "patience": 1, "min_delta": 0.05},
        "threshold": {"monitor": "val_loss", "stopping_threshold": 1.09, "patience": 9},
        "diverged": {"monitor": "mean_loss", "divergence_threshold": 0.1, "check_on_train_epoch_end": True},
    }
    found = {}
    for name, options in forms.items():
        stopping = EarlyStopping(**options)
        of_nothing = EarlyStopping("no_such", strict=False)
        trainer = make_trainer(layout, max_epochs=6, callbacks=[of_nothing, stopping], **UNCHECKED)
        trainer.fit(make(Logs), Data())
        assert of_nothing.stopped_epoch == 0
        found[name] = {
            "stopped": stopping.stopped_epoch,
            "waited": stopping.wait_count,
            "score": f"{plain(stopping.best_score):.9f}",
            # digits that sums in another order round differently are left out
            "reason": re.sub(r"(\.\d{9})\d+", r"\1", str(stopping.stopping_reason_message)),
            "epochs": trainer.current_epoch,
        }
    return found


class Schedulers(Classifier):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        layers = list(self.layers.children())
        groups = [
            {"params": [p for layer in layers[:4] for p in layer.parameters()], "lr": 0.1, "name": "front"},
            {"params": [p for layer in layers[4:] for p in layer.parameters()], "lr": 0.2, "name": "back"},
        ]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        schedulers = torch.optim.lr_scheduler
        if self.kind == "one cycle":
            total = int(self.trainer.estimated_stepping_batches)
            return [optimizer], [
                {"scheduler": schedulers.OneCycleLR(optimizer, 0.3, total_steps=total), "interval": "step"}
            ]
        if self.kind == "every second step":
            scheduler: Any = schedulers.ExponentialLR(optimizer, 0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2},
            }
        if self.kind == "plateau":
            scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=0.2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        return [optimizer], [schedulers.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


@scenario
def schedulers_and_their_monitor(layout: Layout | None, folder: Path) -> Any:
    found = {}
    for kind in ("one cycle", "every second step", "plateau", "lambda"):
        logger = CSVLogger(folder_of(layout, folder), name=kind, version=0)
        monitor = LearningRateMonitor(log_momentum=True)
        options = UNCHECKED | ({} if kind == "plateau" else {"limit_val_batches": 0})  # which looks at val_loss
        trainer = make_trainer(layout, max_epochs=3, logger=logger, callbacks=[monitor], log_every_n_steps=1, **options)
        trainer.fit(make(Schedulers, kind=kind), Data(num_train=16, num_val=4))
        found[kind] = {
            "rates": monitor.lrs,
            "last": [group["lr"] for group in trainer.optimizers[0].param_groups],
            "names": [group["name"] for group in trainer.optimizers[0].param_groups],
        }
    return found


class Bar(TQDMProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        metrics = {name: value for name, value in self.get_metrics(trainer, module).items() if name != "v_num"}
        self.seen.append([batch_idx, self.total_train_batches, metrics])


class Shown(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss if isinstance(loss, Tensor) else loss["loss"], prog_bar=True)
        return loss


@scenario
def progress_bars(layout: Layout | None, folder: Path) -> Any:
    bar = Bar()
    trainer = make_trainer(layout, enable_progress_bar=True, callbacks=[bar])
    trainer.fit(make(Shown), Data())
    return {"seen": bar.seen, "enabled": len(bar.seen) > 0}


@scenario
def accumulation_that_changes(layout: Layout | None, folder: Path) -> Any:
    steps: list[list[int]] = []
    notes = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: steps.append([trainer.global_step, trainer.accumulate_grad_batches])
    )
    callbacks = [GradientAccumulationScheduler({0: 2, 1: 3, 2: 1}), notes]
    trainer = make_trainer(layout, max_epochs=3, callbacks=callbacks)
    module = make()
    trainer.fit(module, Data(num_train=40))
    return {"steps": steps, "val_loss": plain(trainer.callback_metrics["val_loss"])}


@scenario
def averaged_weights(layout: Layout | None, folder: Path) -> Any:
    found = {}
    for averaging in (WeightAveraging(), EMAWeightAveraging(decay=0.5, update_every_n_steps=2)):
        trainer = make_trainer(layout, max_epochs=3, callbacks=[averaging])
        module = make().double()
        trainer.fit(module, Data())
        found[type(averaging).__name__] = trainer.validate(module, Data(), verbose=False)
    return found


class AveragingFromSetup(WeightAveraging):
    def __init__(self) -> None:
        super().__init__()
        self.stages: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.stages.append(str(stage))


@scenario
def averaging_with_a_setup_of_its_own(layout: Layout | None, folder: Path) -> Any:
    averaging = AveragingFromSetup()
    trainer = make_trainer(layout, callbacks=[averaging])
    module = make().double()
    trainer.fit(module, Data())
    return averaging.stages, trainer.validate(module, Data(), verbose=False)


def stochastic_weight_averaging(layout: Layout | None, folder: Path) -> Any:
    """Copies the whole module, so it is for one stage only."""
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)
    trainer = make_trainer(layout, max_epochs=4, callbacks=[averaging])
    module = make().double()
    trainer.fit(module, Data())
    return trainer.validate(module, Data(), verbose=False)


@scenario
def timers_stop(layout: Layout | None, folder: Path) -> Any:
    timer = Timer(duration=timedelta(seconds=0))
    trainer = make_trainer(layout, max_epochs=3, callbacks=[timer])
    trainer.fit(make(), Data())
    return {
        "steps": trainer.global_step,
        "elapsed": timer.time_elapsed() > 0,
        "left": (timer.time_remaining() or 0) < 0,
    }


@scenario
def a_timer_that_is_up_when_the_training_resumes(layout: Layout | None, folder: Path) -> Any:
    path = folder_of(layout, folder) / "half.ckpt"
    first = make_trainer(layout, max_epochs=1, callbacks=[Timer(duration=timedelta(hours=1))])
    first.fit(make().double(), Data())
    first.save_checkpoint(path)
    resumed = make_trainer(layout, max_epochs=2, callbacks=[Timer(duration=timedelta(microseconds=1))])
    resumed.fit(make().double(), Data(), ckpt_path=path)
    return first.global_step, resumed.global_step


# ---------------------------------------------------------------- loops, restarts, hooks


class StopsItself(Classifier):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.batches: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.how == "skips the rest" and batch_idx == 1 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch_idx)
        if self.how == "should_stop" and self.trainer.global_step == 3:
            self.trainer.should_stop = True


@scenario
def loops_that_end_early(layout: Layout | None, folder: Path) -> Any:
    found = {}
    runs: dict[str, dict[str, Any]] = {
        "skips the rest": {},
        "should_stop": {"max_epochs": 5},
        "should_stop, at least 3 epochs": {"max_epochs": 5, "min_epochs": 3},
        "max_steps": {"max_epochs": 5, "max_steps": 3},
        "nothing": {"max_epochs": 0},
        "no batches": {"limit_train_batches": 0},
    }
    for name, options in runs.items():
        module = make(StopsItself, how=name.split(",")[0])
        trainer = make_trainer(layout, **options, **UNCHECKED, limit_val_batches=0)
        trainer.fit(module, Data(num_train=16))
        found[name] = [module.batches, trainer.global_step, trainer.current_epoch, str(trainer.state.status)]
    return found


class StepLosses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append([trainer.current_epoch, batch_idx, trainer.global_step, float(outputs["loss"])])


@scenario
def restarts(layout: Layout | None, folder: Path) -> Any:
    root = folder_of(layout, folder)
    first = make_trainer(layout, max_epochs=1)
    first.fit(make().double(), Data())
    first.save_checkpoint(root / "epoch.ckpt")
    found = {}
    for name, options in {"goes on": {"max_epochs": 3}, "ended": {"max_epochs": 1}}.items():
        notes = StepLosses()
        trainer = make_trainer(layout, callbacks=[notes], **options, **UNCHECKED)
        trainer.fit(make().double(), Data(), ckpt_path=str(root / "epoch.ckpt"))
        found[name] = [notes.losses, trainer.global_step, trainer.current_epoch]
    trainer = make_trainer(layout)
    found["validated"] = trainer.validate(make().double(), Data(), ckpt_path=str(root / "epoch.ckpt"), verbose=False)
    return found


_HOOKS = sorted(name for name in dir(L.Callback) if name.startswith(("on_", "setup", "teardown")))


class Order(L.Callback):
    """Notes every hook of a callback, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        for name in _HOOKS:
            setattr(self, name, lambda *_, name=name, **__: self.calls.append(name))


@scenario
def order_of_callback_hooks(layout: Layout | None, folder: Path) -> Any:
    order = Order()
    trainer = make_trainer(layout, max_epochs=2, num_sanity_val_steps=1, callbacks=[order])
    module = make()
    for run in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        order.calls.append(run.__name__)
        run(module, datamodule=Data(num_train=16, num_val=4))
    return order.calls


class NotesItsHooks(Data):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.calls.append("train_dataloader")
        return super().train_dataloader()

    def val_dataloader(self) -> Any:
        self.calls.append("val_dataloader")
        return super().val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"calls": len(self.calls)}


@scenario
def how_often_a_data_module_is_asked(layout: Layout | None, folder: Path) -> Any:
    data = NotesItsHooks()
    trainer = make_trainer(layout, max_epochs=2)
    trainer.fit(make(), data)
    counts = {call: data.calls.count(call) for call in data.calls}
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        counts["prepare_data"] = 1  # on one rank of a machine, as Lightning has it
    return counts


class ReadsGradients(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.order.append("before zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.order.append("before step")

    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.order.append("step")
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.order.append("clipping")
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.order.append("scheduler")
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@scenario
def hooks_around_the_update(layout: Layout | None, folder: Path) -> Any:
    module, notes = make(ReadsGradients), StepLosses()
    trainer = make_trainer(layout, accumulate_grad_batches=2, callbacks=[notes])
    trainer.fit(module, Data())
    return {"order": module.order, "losses": notes.losses}


@scenario
def steps_switched_off(layout: Layout | None, folder: Path) -> Any:
    """``None`` in place of a step is none, as Lightning has it."""
    module = make()
    module.validation_step = None
    trainer = make_trainer(layout)
    trainer.fit(module, Data())
    return plain(dict(trainer.callback_metrics)), trainer.global_step


class Reduces(Classifier):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        outputs = self(batch[0])
        for name in ("min", "max", "mean"):
            self.log(f"largest_{name}", outputs.max(), reduce_fx=name, batch_size=len(batch[0]))
        self.log_dict({"a": outputs.mean(), "b": float(batch_idx)}, on_step=True, on_epoch=True)


@scenario
def evaluation_results(layout: Layout | None, folder: Path) -> Any:
    if layout is not None:
        layout = Layout(layout.schedule, layout.pipeline, layout.replicas, 1)  # a maximum is not a mean over samples
    trainer = make_trainer(layout)
    module = make(Reduces)
    found = trainer.validate(module, Data(), verbose=False)
    return [found, plain(dict(trainer.callback_metrics)), plain(dict(trainer.logged_metrics))]


@scenario
def trainer_flags_without_effect(layout: Layout | None, folder: Path) -> Any:
    found = {}
    runs: dict[str, dict[str, Any]] = {
        "barebones": {"barebones": True, "enable_checkpointing": None, "logger": None, "enable_progress_bar": None},
        "profiler": {"profiler": "simple"},
        "anomalies": {"detect_anomaly": True},
        "no inference mode": {"inference_mode": False},
    }
    for name, options in runs.items():
        if name == "barebones":
            options = {**options, "enable_model_summary": None, "num_sanity_val_steps": None}
        notes = StepLosses()
        trainer = make_trainer(layout, max_epochs=1, callbacks=[notes], **options, **UNCHECKED)
        trainer.fit(make(), Data())
        found[name] = notes.losses
    return found
