"""A small module, trained with timelines; one action of one batch takes longer than all others."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch.distributed as dist
from lightning.pytorch.loggers import TensorBoardLogger
from monitored_fit import loader
from pipelined_fit import trainer
from small_models import TokenModel

from lightning_pp import PipelineMonitor, PipelineParallelStrategy
from lightning_pp.runtime.timing import StepTimer

SLOW_BATCH, SLOW_ACTION, SLOW_MS = 3, "1F2", 400.0
NUM_BATCHES = 7  # of the loader


class SlowAction(L.Callback):
    """Makes one action of one batch slow, on the rank that runs it."""

    def __init__(self) -> None:
        self.batch = -1
        original = StepTimer.stop

        def stop(timer: StepTimer, action: Any) -> None:
            if self.batch == SLOW_BATCH and str(action) == SLOW_ACTION:
                time.sleep(SLOW_MS / 1e3)
            original(timer, action)

        self._original = original
        StepTimer.stop = stop  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = batch_idx

    def undo(self) -> None:
        StepTimer.stop = self._original  # type: ignore[method-assign]


class KeptPages(L.Callback):
    """Keeps each page that the monitor before it has written, by the batch after which it was there."""

    def __init__(self, page: Path) -> None:
        self.page, self.newest = page, ""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        text = self.page.read_text() if trainer.is_global_zero and self.page.is_file() else ""
        if text != self.newest:
            self.newest = text
            self.page.with_name(f"after-batch-{batch_idx}.html").write_text(text)


def fit_with_timelines(folder: str, logs: bool, every_n_steps: int = 4) -> list[str]:
    """Timelines every so many steps; with ``logs`` in the folder of a TensorBoard logger. Returns the warnings."""
    logger = TensorBoardLogger(folder, name="board", version="run") if logs else False
    monitor = PipelineMonitor(
        timeline_every_n_steps=every_n_steps, timeline_dirpath=None if logs else Path(folder) / "own"
    )
    slow = SlowAction()
    pages = KeptPages(Path(folder, "board", "run", "timelines") / "timeline.html")
    strategy = PipelineParallelStrategy(2, 1, num_microbatches=4, schedule="zb_h1", check_first_batches=False)
    run = trainer(2, strategy, logger=logger, callbacks=[slow, monitor, pages], log_every_n_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run.fit(TokenModel(), loader())
        finally:
            slow.undo()
    return [str(warning.message) for warning in caught]


def fit_where_nothing_can_be_written(folder: str) -> list[str]:
    """The folder of the timelines is a file."""
    path = Path(folder) / "own"
    if dist.get_rank() == 0 if dist.is_initialized() else True:
        path.touch()
    return fit_with_timelines(folder, logs=False)
