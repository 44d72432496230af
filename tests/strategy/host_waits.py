"""Noticing where the host would wait for a device, also on a machine that has none."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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


def _is_asked_by_scaling(frame: FrameType | None) -> bool:
    while frame is not None and not _is_of_training(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and "/lightning_pp/split/reductions/" in frame.f_code.co_filename


def _is_of_training(path: str) -> bool:
    # the operations between units are passed on by a mode, which asks for nothing itself
    is_passing_on = path.endswith("/lightning_pp/split/unit_calls/operations.py")
    return "/lightning_pp/" in path and not is_passing_on
