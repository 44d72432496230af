"""A small module, trained under a monitor in every process of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import grad_norm
from small_models import VOCAB, WIDTH, TokenModel
from torch.utils.data import DataLoader

from lightning_pp import PipelineMonitor, PipelineParallelStrategy
from lightning_pp.runtime.timing import StepTimer

LENGTH = 12
BATCH_SIZE, NUM_BATCHES = 8, 7


def loader(num_samples: int = BATCH_SIZE * NUM_BATCHES, continuous: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (num_samples, LENGTH), generator=generator)
    vectors = torch.randn(num_samples, WIDTH, generator=generator)
    samples = [
        {"x": vector, "y": ids[0]} if continuous else {"x": ids, "y": ids}
        for ids, vector in zip(tokens, vectors, strict=True)
    ]
    return DataLoader(samples, batch_size=BATCH_SIZE)  # type: ignore[arg-type]


class MemoryLogger(DummyLogger):
    """Keeps what it is given, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if any(name.startswith("pp") for name in params):
            self.rows.append((None, dict(params)))

    def monitored(self) -> list[tuple[int | None, dict[str, Any]]]:
        return [row for row in self.rows if any(name.startswith("pp") for name in row[1])]


class SeenBar(RichProgressBar):
    """Keeps what is shown after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def on_train_batch_end(self, trainer: Any, module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, module, *args, **kwargs)
        if self.progress is not None:
            (task,) = (task for task in self.progress.tasks if task.id == self.train_progress_bar_id)
            self.seen.append((task.description, dict(self.get_metrics(trainer, module))))


class Norms(L.Callback):
    """Lightning's own norms of gradients, of each parameter and in total, before every update."""

    def __init__(self) -> None:
        self.of_updates: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Any, module: L.LightningModule, optimizer: Any) -> None:
        self.of_updates.append({name: float(norm) for name, norm in grad_norm(module, 2).items()})


class Counts(L.Callback):
    """After each batch, how often the monitor has gathered and a timer has been read."""

    def __init__(self) -> None:
        self.num_gathers = 0
        self.num_reads = 0
        self.after_batches: list[tuple[int, int]] = []
        gather, times = dist.gather_object, StepTimer.times

        def counted_gather(*args: Any, **kwargs: Any) -> Any:
            self.num_gathers += 1
            return gather(*args, **kwargs)

        def counted_times(timer: StepTimer) -> Any:
            self.num_reads += 1
            return times(timer)

        self._originals = (gather, times)
        dist.gather_object = counted_gather  # type: ignore[assignment]
        StepTimer.times = counted_times  # type: ignore[method-assign]

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.after_batches.append((self.num_gathers, self.num_reads))

    def undo(self) -> None:
        dist.gather_object, StepTimer.times = self._originals  # type: ignore[method-assign]


def fit(
    *,
    pipeline: int,
    replicas: int = 1,
    schedule: str = "zb_h1",
    loggers: Sequence[Logger] = (),
    every_n_steps: int | None = None,
    num_samples: int = BATCH_SIZE * NUM_BATCHES,
    continuous: bool = False,
    bar: RichProgressBar | None = None,
    **options: Any,
) -> tuple[dict[str, Any], PipelineMonitor]:
    """Trains in this process, one of several."""
    monitor, counts, norms = PipelineMonitor(every_n_steps, peak_tflops=1e-3), Counts(), Norms()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=pipeline * replicas,
        strategy=PipelineParallelStrategy(pipeline, replicas, num_microbatches=4, schedule=schedule),
        logger=list(loggers),
        callbacks=[monitor, counts, norms, *filter(None, [bar])],
        enable_checkpointing=False,
        enable_progress_bar=bar is not None,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    model = TokenModel(continuous)
    try:
        trainer.fit(model, loader(num_samples, continuous), loader(BATCH_SIZE, continuous))
    finally:
        counts.undo()
    report = monitor.report
    outcome: dict[str, Any] = {
        "losses": model.losses,
        "norms": norms.of_updates,
        "after_batches": counts.after_batches,
        "num_gathers": counts.num_gathers,
        "report": None if report is None else {**vars(report), "stages": [vars(stage) for stage in report.stages]},
    }
    return outcome, monitor


def fit_with_loggers(folder: str) -> dict[str, Any]:
    """A pipeline of two under every kind of logger."""
    memory, bar = MemoryLogger(), SeenBar()
    wandb_logger = WandbLogger(project="monitored", save_dir=folder, offline=True)
    board = TensorBoardLogger(folder, name="board", version="run")
    loggers = [CSVLogger(folder, name="csv", version=0), wandb_logger, board, memory]
    outcome, _ = fit(
        pipeline=2,
        loggers=loggers,
        log_every_n_steps=2,
        val_check_interval=3,
        num_sanity_val_steps=1,
        bar=bar,
        max_epochs=-1,
        max_steps=NUM_BATCHES,
    )
    if dist.get_rank() == 0:
        import wandb

        wandb.finish()
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.wandb"))
    return {**outcome, "rows": memory.monitored(), "files": files, "bar": bar.seen}


def fit_replicas(accumulate: int) -> dict[str, Any]:
    """Two replicas of a pipeline of one, on vectors, that accumulate."""
    memory = MemoryLogger()
    outcome, _ = fit(
        pipeline=1,
        replicas=2,
        schedule="1f1b",
        loggers=[memory],
        every_n_steps=1,
        continuous=True,
        accumulate_grad_batches=accumulate,
        num_samples=2 * BATCH_SIZE * NUM_BATCHES,
    )
    return {**outcome, "rows": memory.monitored()}


def fit_one_batch_then_a_short_one() -> list[dict[str, Any]]:
    """A V schedule; first one batch only, then a last batch of fewer microbatches."""
    once, _ = fit(pipeline=2, schedule="zb_v", max_steps=1)
    short, monitor = fit(pipeline=2, schedule="zb_v", num_samples=2 * BATCH_SIZE + 2)
    num_microbatches = monitor.report.timeline.schedule.num_microbatches if monitor.report else None
    return [once, {**short, "num_microbatches": num_microbatches}]
