"""Python looking into tensors past torch's operations: ``.numpy()``, ``.tolist()``, ``f"{loss:.3f}"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map

from lightning_pp.split.sources import set_sources, sources_of

_READS = frozenset(
    {
        Tensor.numpy,
        Tensor.__array__,
        Tensor.tolist,
        Tensor.__format__,
        Tensor.__dlpack__,
    }
)
_MAKES_OF_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class PythonReads(TorchFunctionMode):
    """Within, what Python reads of a tensor whose data are missing is what ``read`` gives for it.

    Args:
        is_missing: Whether a tensor's data are missing.
        read: Gives a real tensor of the same shape to look at.
    """

    def __init__(self, is_missing: Callable[[Tensor], bool], read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._is_missing = is_missing
        self._read = read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch."""
        kwargs = kwargs or {}
        if func in _READS and self._lacks(args[0]):
            return func(self._read(args[0]).detach(), *args[1:], **kwargs)
        if func in _MAKES_OF_DATA and isinstance(args[0], (list, tuple)) and tree_any(self._lacks, args[0]):
            data = tree_map(lambda leaf: self._read(leaf).tolist() if self._lacks(leaf) else leaf, args[0])
            return func(data, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if func == _DATA:  # the one view that does not pass the dispatcher
            set_sources(result, sources_of(args[0]))
        return result

    def _lacks(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and self._is_missing(leaf)
