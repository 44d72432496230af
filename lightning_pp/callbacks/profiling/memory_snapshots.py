"""The callback that writes snapshots of CUDA memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_pp.callbacks._lightning_private import accumulates, logged_step
from lightning_pp.callbacks._torch_private import dump_snapshot, record_memory_history
from lightning_pp.callbacks.run_folder import check_ranks, is_chosen, shared_folder, tell_unwritten
from lightning_pp.errors import ConfigurationError

_FOLDER = "memory"


class MemorySnapshots(Callback):
    """Records CUDA allocations, and writes them when memory runs out.

    A file has the current memory and the latest ``max_entries`` allocations and releases with their lines of code.
    https://pytorch.org/memory_viz draws it in the browser. Files on each of ``ranks``::

        memory runs out in a fit: <dirpath>/rank0001.out_of_memory.pickle
        every_n_steps optimizer steps: <dirpath>/rank0001.000100.pickle

    Recording costs about a microsecond per allocation, most of it on the host.

    Args:
        every_n_steps: Optimizer steps between further files. None: only when memory runs out.
        max_entries: Number of latest allocations and releases to keep.
        ranks: ``"all"``, or the numbers of the processes to record.
        dirpath: Folder of the files. None: ``memory`` in the folder of the trainer's first logger that has one, else in
            ``default_root_dir``. Each host writes to its own folder, unless it is shared.

    Raises:
        ConfigurationError: A number is less than 1; ``ranks`` is neither ``"all"`` nor a list of existing ranks; or
            the run does not use CUDA devices.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        max_entries: int = 100_000,
        *,
        ranks: Literal["all"] | Sequence[int] = "all",
        dirpath: str | Path | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(
                f"MemorySnapshots(every_n_steps={every_n_steps}) must be at least 1, or None to write only when memory "
                "runs out."
            )
        if max_entries < 1:
            raise ConfigurationError(f"MemorySnapshots(max_entries={max_entries}) must be at least 1.")
        check_ranks("MemorySnapshots", ranks)
        self.every_n_steps = every_n_steps
        self.max_entries = max_entries
        self.ranks = ranks
        self.dirpath = dirpath
        self._folder: Path | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts recording."""
        self._folder = None
        device = trainer.strategy.root_device
        if device.type != "cuda":
            raise ConfigurationError(
                f"MemorySnapshots records the memory of CUDA devices, but this run computes on {device.type}. Leave "
                "the callback out."
            )
        folder = shared_folder(trainer, self.dirpath, _FOLDER)
        if is_chosen("MemorySnapshots", self.ranks, trainer.global_rank):
            self._folder = folder
            record_memory_history(max_entries=self.max_entries)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Writes, if it is time."""
        if self._folder is None or self.every_n_steps is None or accumulates(trainer):
            return
        step = logged_step(trainer) + 1
        if step % self.every_n_steps == 0:
            self._write(trainer, f"{step:06d}")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops recording."""
        self._end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Writes, if memory has run out."""
        if self._folder is not None and ran_out_of_memory(exception):
            self._write(trainer, "out_of_memory")
        self._end()

    def _write(self, trainer: pl.Trainer, what: str) -> None:
        assert self._folder is not None
        path = self._folder / f"rank{trainer.global_rank:04d}.{what}.pickle"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            dump_snapshot(str(path))
        except Exception as error:
            tell_unwritten(f"The memory snapshot {path}", error)

    def _end(self) -> None:
        if self._folder is not None:
            self._folder = None
            record_memory_history(enabled=None)


def ran_out_of_memory(exception: BaseException | None) -> bool:
    """Whether an exception, or one of its causes, is an out-of-memory error of a device."""
    seen: list[BaseException] = []
    while exception is not None and exception not in seen:
        if isinstance(exception, torch.OutOfMemoryError):
            return True
        seen.append(exception)
        exception = exception.__cause__ or exception.__context__
    return False
