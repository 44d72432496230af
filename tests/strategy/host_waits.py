"""Notices where the host would wait for a device, on a machine that has none.

Which calls wait: those that give the host a number or a copy of a tensor, and those that make a tensor on a device of
what the host holds, since that is copied from memory that is not pinned (``torch.cuda.set_sync_debug_mode`` reports the
same). Here every tensor stands for one on a device, but for those that are made with ``device="cpu"`` and those of
``lightning_pp.distributed``, which joins ranks over connections of the host.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
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
COPIES = {torch.tensor, torch.as_tensor, torch.scalar_tensor, Tensor.new_tensor}


class HostWaits(TorchFunctionMode):
    """Within, ``found`` gets the line of this package for each call that would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        makes_there = func in COPIES and (kwargs.get("device") not in (None, "cpu") or func is Tensor.new_tensor)
        if func in READS or makes_there:
            frames = [frame for frame in traceback.extract_stack() if "/lightning_pp/" in frame.filename]
            if not frames or "/lightning_pp/distributed/" not in frames[-1].filename:
                where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the caller"
                self.found.append(f"{func.__name__} at {where}")
        return func(*args, **kwargs)
