"""How often the host waits for the device in a step."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pp.doctor.checks.trainings import Chain, batches, loader, num_blocks_for, trainer_for
from lightning_pp.doctor.findings import Check, Finding, Rank, Status

_NUM_BATCHES = 5
_NUM_COMPARED = 2
"""Batches that the strategy compares with parts of them, which reads numbers."""
_MOST = 1

READS = {
    getattr(Tensor, name)
    for name in (
        "item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "nonzero",
        "equal", "allclose",
    )
} | {torch.equal, torch.allclose, torch.nonzero}  # fmt: skip
_IS_CPU = Tensor.is_cpu.__get__  # type: ignore[attr-defined]
COPIES = {torch.tensor, torch.as_tensor, torch.scalar_tensor, Tensor.new_tensor}


class HostWaits(TorchFunctionMode):
    """Notices where the host would wait for a device, also on a machine that has none.

    Which calls wait: those that give the host a number or a copy of a tensor, and those that make a tensor on a device
    of what the host holds, since that is copied from memory that is not pinned (``torch.cuda.set_sync_debug_mode``
    reports the same). Every tensor is taken for one on a device, but for those that are made with ``device="cpu"`` and
    those of ``lightning_pp.distributed``, which joins ranks over connections of the host. So ``is_cpu`` is False where
    what a batch counts is scaled: that code saves work on a CPU by looking at numbers.

    Attributes:
        found: The line of this package for each call that would wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _IS_CPU and _is_asked_by_scaling(inspect.currentframe()):
            return False
        makes_there = func in COPIES and (kwargs.get("device") not in (None, "cpu") or func is Tensor.new_tensor)
        if func in READS or makes_there:
            frames = [frame for frame in traceback.extract_stack() if _is_of_training(frame.filename)]
            if not frames or "/lightning_pp/distributed/" not in frames[-1].filename:
                where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the caller"
                self.found.append(f"{func.__name__} at {where}")
        return func(*args, **kwargs)


class WaitsOfBatches(pl.Callback):
    """What happens from the start of each training batch to its end.

    Attributes:
        found: For each batch, the lines that wait.
    """

    def __init__(self, waits: HostWaits, caught: list[warnings.WarningMessage], device: torch.device) -> None:
        self.found: list[list[str]] = []
        self._waits, self._caught, self._device = waits, caught, device

    def on_train_batch_start(self, *_: Any) -> None:
        self._waits.found.clear()
        self._caught.clear()
        if self._device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            self.found.append([str(w.message) for w in self._caught if "synchronizing" in str(w.message)])
        else:
            self.found.append([line for line in self._waits.found if "the caller" not in line])


def look(rank: Rank) -> list[list[str]]:
    """For each batch after the first ones, the lines that wait: CUDA's own count, or on a CPU what would wait."""
    with ExitStack() as stack:
        waits = HostWaits() if rank.device.type == "cpu" else None
        if waits is not None:
            stack.enter_context(waits)
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        callback = WaitsOfBatches(waits or HostWaits(), caught, rank.device)
        trainer = trainer_for(rank, callbacks=[callback], schedule="zb_h1", gradient_clip_val=1.0)
        trainer.fit(Chain(num_blocks_for(rank)), loader(batches(_NUM_BATCHES)))
    return callback.found[_NUM_COMPARED:]


def judge(values: Sequence[list[list[str]]]) -> list[Finding]:
    """At most one in each step: whether the gradients are finite."""
    lines = [found for value in values for found in value]
    most = max(lines, key=len)
    if len(most) > _MOST:
        found = f"The host waits {len(most)} times for the device in a step: {'; '.join(most[:4])}."
        advice = "Every wait empties the device's queue; attach the JSON to an issue."
        return [Finding(Status.WARNING, found, advice, list(values))]
    found = (
        f"The host waits at most {len(most)} time{'s'[: len(most) != 1]} in a step, for whether gradients are finite."
    )
    return [Finding(Status.OK, found, details=list(values))]


def _is_asked_by_scaling(frame: FrameType | None) -> bool:
    while frame is not None and not _is_of_training(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and "/lightning_pp/split/reductions/" in frame.f_code.co_filename


def _is_of_training(path: str) -> bool:
    # the operations between units are passed on by a mode, which asks for nothing itself
    is_passing_on = path.endswith("/lightning_pp/split/unit_calls/operations.py")
    return "/lightning_pp/" in path and "/lightning_pp/doctor/" not in path and not is_passing_on


CHECKS = [
    Check(
        "host-waits",
        "how often the host waits for the device in a step",
        look,
        judge,
        limit_s=60.0,
        advice="Run it again with --only host-waits, and attach the JSON to an issue.",
    )
]
