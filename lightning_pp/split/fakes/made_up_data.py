"""Real memory with made-up content for fakes, for code that cannot do without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_pp.split._torch_private import OperationsMode
from lightning_pp.split.fakes.fake_mode import FakeValueMode, MadeUp
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.record.sources import storage_of


class MadeUpData:
    """Gives each fake a real tensor in its place: the same one every time, and one memory for its views.

    Args:
        seed: Seed of the content.
        signed: As :class:`~lightning_pp.split.fakes.fake_mode.MadeUp` has it.
    """

    def __init__(self, seed: int = 0, *, signed: bool = False) -> None:
        self.is_signed = signed
        self._fill = MadeUp(seed, signed=signed)
        # the fake is kept as well, for its memory must not be given to another
        self._memories: dict[tuple[int | None, torch.dtype], tuple[Tensor, Tensor]] = {}

    def real(self, leaf: Any) -> Any:
        """``leaf``, or the real tensor in place of a fake one."""
        if not is_fake(leaf):
            return leaf
        key = (storage_of(leaf), leaf.dtype)
        if key not in self._memories:
            count = leaf.untyped_storage().nbytes() // leaf.dtype.itemsize
            self._memories[key] = (leaf, self._fill((count,), dtype=leaf.dtype, device=leaf.device))
        return self._memories[key][1].as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


class AsFake(OperationsMode):  # type: ignore[no-untyped-call]
    """Within, operations on real tensors give fakes; autograd, which is above, connects the two."""

    def __init__(self, mode: FakeValueMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation with its first argument faked."""
        first = args[0] if is_fake(args[0]) else self._mode.from_tensor(args[0].detach())
        return func(first, *args[1:], **kwargs)
