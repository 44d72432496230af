"""The callback that profiles some batches on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from lightning_pp.callbacks.pipeline import set_label
from lightning_pp.callbacks.run_folder import shared_folder, tell_unwritten
from lightning_pp.errors import ConfigurationError

_FOLDER = "profiles"
_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class PipelineProfiler(Callback):
    """Runs ``torch.profiler`` on every rank for some windows of training batches, and names the pipeline's actions.

    A fit, on each of ``ranks``::

        wait batches: nothing
        warmup batches: the profiler runs, and its results are dropped
        active batches: a window; each action is a range "stage 1 F microbatch 3", each wait for another stage
            "wait for stage 1 F microbatch 3"
        after the window: <dirpath>/rank0001.000015.pt.trace.json.gz (rank, last batch of the window)
        again, for repeat windows in all

    ui.perfetto.dev, TensorBoard's profiler and Holistic Trace Analysis open the files. Outside of windows the profiler
    costs no time. It works under every strategy; without a pipeline there are no actions to name.

    Args:
        wait: Batches before a window's warm-up.
        warmup: Batches that warm the profiler up.
        active: Batches in a window.
        repeat: Number of windows; 0: until the fit ends.
        ranks: ``"all"``, or the numbers of the processes to profile.
        dirpath: Folder of the traces. None: ``profiles`` in the folder of the trainer's first logger that has one, else
            in ``default_root_dir``. Each host writes to its own folder, unless it is shared.
        record_shapes: Also record the shapes of operations' inputs.
        profile_memory: Also record allocations.
        with_stack: Also record lines of code.

    Raises:
        ConfigurationError: A number is too small; ``ranks`` is neither ``"all"`` nor a list of existing ranks; or the
            trainer has a ``PyTorchProfiler``, which allows no other profiler.
    """

    def __init__(
        self,
        wait: int = 10,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        *,
        ranks: Literal["all"] | Sequence[int] = "all",
        dirpath: str | Path | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        for name, number in (("wait", wait), ("warmup", warmup), ("active", active), ("repeat", repeat)):
            least = 1 if name == "active" else 0
            if number < least:
                raise ConfigurationError(f"PipelineProfiler({name}={number}) must be at least {least}.")
        _check_ranks(ranks)
        self.ranks = ranks
        self.dirpath = dirpath
        self._action_of_batch = schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._folder: Path | None = None
        self._profile: profile | None = None
        self._num_batches = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Checks what is asked for, and finds the folder."""
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined] # set by a connector
            raise ConfigurationError(
                "PipelineProfiler cannot run beside Trainer(profiler='pytorch'), because torch runs one profiler at "
                "a time. Leave out one of them."
            )
        folder = shared_folder(trainer, self.dirpath, _FOLDER)
        self._folder = folder if _is_chosen(self.ranks, trainer.global_rank) else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The sanity check is over, and the first batch comes."""
        if self._folder is None:
            return
        self._num_batches = 0
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)

        def write(found: profile) -> None:
            self._write(found, trainer.global_rank)

        self._profile = profile(
            activities=activities, schedule=self._action_of_batch, on_trace_ready=write, **self._options
        )
        self._profile.start()
        self._label(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Begins or ends a window, if it is time."""
        if self._profile is not None:
            self._num_batches += 1
            self._profile.step()
            self._label(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes a window that the end of the fit has cut short."""
        self._end(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stops the profiler; writes nothing, since other ranks wait to be told."""
        self._folder = None
        self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()
            set_label(trainer, None)

    def _label(self, trainer: pl.Trainer) -> None:
        """Names actions in a window."""
        is_open = self._action_of_batch(self._num_batches) in _RECORDING
        set_label(trainer, record_function if is_open else None)

    def _write(self, found: profile, rank: int) -> None:
        if self._folder is None:
            return
        path = self._folder / f"rank{rank:04d}.{self._num_batches:06d}.pt.trace.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(path))
        except Exception as error:
            tell_unwritten(f"The profile {path}", error)


def _check_ranks(ranks: object) -> None:
    """Refuses what is neither ``"all"`` nor a list of numbers."""
    if ranks == "all":
        return
    if not isinstance(ranks, (list, tuple)) or not ranks or not all(type(rank) is int and rank >= 0 for rank in ranks):
        raise ConfigurationError(
            f"PipelineProfiler(ranks={ranks!r}) must be 'all', or a list of the numbers of processes: [0, 3]."
        )


def _is_chosen(ranks: str | Sequence[int], rank: int) -> bool:
    """Whether a process is among ``ranks``, each of which has to exist."""
    if isinstance(ranks, str):
        return True
    num_processes = dist.get_world_size() if dist.is_initialized() else 1
    if max(ranks) >= num_processes:
        raise ConfigurationError(
            f"PipelineProfiler(ranks={list(ranks)}) names process {max(ranks)}, and the run has {num_processes}, "
            "counted from 0."
        )
    return rank in ranks
