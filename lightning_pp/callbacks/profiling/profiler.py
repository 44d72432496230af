"""The callback that profiles some batches on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from lightning_pp.callbacks.pipeline import set_label
from lightning_pp.callbacks.run_folder import check_ranks, is_chosen, shared_folder, tell_unwritten
from lightning_pp.errors import ConfigurationError

_FOLDER = "profiles"
_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)

Label = Callable[[str], AbstractContextManager[Any]]


class PipelineProfiler(Callback):
    """Runs ``torch.profiler`` on every rank for some windows of training batches, and names the pipeline's actions.

    A fit, on each of ``ranks``::

        wait batches: nothing
        warmup batches: the profiler runs, and its results are dropped
        active batches: a window; each action is a range "stage 1 F microbatch 3", each wait for another stage
            "wait for stage 1 F microbatch 3"
        after the window: <dirpath>/rank0001.000015.pt.trace.json.gz (rank, last batch of the window)
        again, for repeat windows in all

    ui.perfetto.dev, TensorBoard's profiler and Holistic Trace Analysis open the files. Outside windows the profiler
    costs no time. It works with every strategy; without a pipeline there are no actions to name.

    ``nvtx=True`` writes no trace. Actions are NVTX ranges, and a window lasts from ``cudaProfilerStart`` to
    ``cudaProfilerStop``, for ``nsys profile --capture-range=cudaProfilerApi``.

    Args:
        wait: Batches before a window's warm-up.
        warmup: Batches of the profiler's warm-up.
        active: Batches in a window.
        repeat: Number of windows; 0: until the fit ends.
        ranks: ``"all"``, or the numbers of the processes to profile.
        dirpath: Folder of the traces. None: ``profiles`` in the folder of the trainer's first logger that has one, else
            in ``default_root_dir``. Each host writes to its own folder, unless it is shared.
        nvtx: Mark actions with NVTX ranges, for Nsight Systems, instead of writing a trace.
        record_shapes: Also record the shapes of operations' inputs.
        profile_memory: Also record allocations.
        with_stack: Also record lines of code.

    Raises:
        ConfigurationError: A number is too small; ``ranks`` is neither ``"all"`` nor a list of existing ranks; NVTX is
            set without CUDA; or the trainer has a ``PyTorchProfiler``, which allows no other profiler.
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
        nvtx: bool = False,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        for name, number in (("wait", wait), ("warmup", warmup), ("active", active), ("repeat", repeat)):
            least = 1 if name == "active" else 0
            if number < least:
                raise ConfigurationError(f"PipelineProfiler({name}={number}) must be at least {least}.")
        check_ranks("PipelineProfiler", ranks)
        self.ranks = ranks
        self.dirpath = dirpath
        self.nvtx = nvtx
        self._action_of_batch = schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._profiler: _Profiler | None = None
        self._num_batches = 0
        self._writes = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Checks the arguments, and finds the folder."""
        self._profiler, self._num_batches, self._writes = None, 0, True
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined] # set by a connector
            raise ConfigurationError(
                "PipelineProfiler cannot run beside Trainer(profiler='pytorch'), because torch runs one profiler at "
                "a time. Leave out one of them."
            )
        device = trainer.strategy.root_device
        if self.nvtx and device.type != "cuda":
            raise ConfigurationError(
                "PipelineProfiler(nvtx=True) names actions for Nsight Systems, which records CUDA devices, but this "
                f"run computes on {device.type}. Leave nvtx out."
            )
        folder = shared_folder(trainer, self.dirpath, _FOLDER)
        if is_chosen("PipelineProfiler", self.ranks, trainer.global_rank):
            write = partial(self._write, folder, trainer.global_rank)
            self._profiler = _Nvtx(self._action_of_batch) if self.nvtx else self._torch_profiler(device, write)

    def _torch_profiler(self, device: torch.device, write: Callable[[profile], None]) -> profile:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        return profile(activities=activities, schedule=self._action_of_batch, on_trace_ready=write, **self._options)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the profiler, after the sanity check."""
        if self._profiler is not None:
            self._profiler.start()
            self._label(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Begins or ends a window if it is due."""
        if self._profiler is not None:
            self._num_batches += 1
            self._profiler.step()
            self._label(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes a window that the end of the fit has shortened."""
        self._end(trainer, writes=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stops the profiler without writing, because other ranks wait for the report of the failure."""
        self._end(trainer, writes=False)

    def _end(self, trainer: pl.Trainer, *, writes: bool) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._writes = writes
            profiler.stop()
            set_label(trainer, None)

    def _label(self, trainer: pl.Trainer) -> None:
        """Names the actions of the next batch if it is in a window."""
        label: Label = torch.cuda.nvtx.range if self.nvtx else record_function
        set_label(trainer, label if self._action_of_batch(self._num_batches) in _RECORDING else None)

    def _write(self, folder: Path, rank: int, found: profile) -> None:
        if not self._writes:
            return
        path = folder / f"rank{rank:04d}.{self._num_batches:06d}.pt.trace.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(path))
        except Exception as error:
            tell_unwritten(f"The profile {path}", error)


class _Profiler(Protocol):
    """Starts before the first batch, steps after each, and stops after the last."""

    def start(self) -> None: ...

    def step(self) -> None: ...

    def stop(self) -> None: ...


class _Nvtx:
    """Opens windows for a profiler outside the process, when torch's profiler would record.

    Args:
        action_of_batch: The profiler's action by number of batch, as from ``torch.profiler.schedule``.
    """

    def __init__(self, action_of_batch: Callable[[int], ProfilerAction]) -> None:
        self._action_of_batch = action_of_batch
        self._num_batches = 0
        self._is_open = False

    def start(self) -> None:
        self._follow(self._action_of_batch(0) in _RECORDING)

    def step(self) -> None:
        if self._action_of_batch(self._num_batches) is ProfilerAction.RECORD_AND_SAVE:
            self.stop()
        self._num_batches += 1
        self._follow(self._action_of_batch(self._num_batches) in _RECORDING)

    def stop(self) -> None:
        self._follow(False)

    def _follow(self, is_open: bool) -> None:
        if is_open and not self._is_open:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        elif self._is_open and not is_open:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        self._is_open = is_open
