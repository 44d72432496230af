"""A tensor of a checkpoint that is read when code computes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_pp.checkpoint._torch_private import make_wrapper, tree_map_only, without_torch_function


class StoredTensor(torch.Tensor):
    """Stands for a tensor in a sharded checkpoint; shape and dtype are known, the content is read on first use.

    So ``on_load_checkpoint`` may rename, drop, cut and compute with what a checkpoint holds, and only what it computes
    with is read whole.

    Args:
        key: Its key in the table of contents.
        shape: Its shape.
        dtype: Its dtype.
        read: Reads it from the disk; called at most once for as long as the result is in use here.
    """

    key: str
    _read: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls, key: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]
    ) -> StoredTensor:
        new = make_wrapper(cls, shape, dtype)
        new.key = key
        new._read = read
        return new

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StoredTensor({self.key!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._read()

    __torch_function__ = without_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(StoredTensor, lambda stored: stored._read(), (args, kwargs or {}))
        return operation(*args, **kwargs)

    def read(self) -> torch.Tensor:
        """The tensor."""
        return self._read()


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or what it stands for, read."""
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor
