"""Counting the bytes of tensors that are alive, by watching every allocation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While it is entered, every memory that an operation makes is counted until nothing refers to it any more.

    Args:
        threshold: Memories of fewer bytes are left out, as the scalars of losses and counters.
    """

    def __init__(self, threshold: int = 0) -> None:
        super().__init__()
        self._threshold = threshold
        self._known: dict[int, StorageWeakRef] = {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch's weak references free what they refer to a second time when they have been copied
        raise TypeError("A LiveMemory cannot be copied: keep it out of the module.")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and type(leaf) is Tensor and _address(leaf) not in given:
                self._known.setdefault(_address(leaf), StorageWeakRef(leaf.untyped_storage()))
        return result

    @property
    def live_bytes(self) -> int:
        """Bytes of what was made inside and is still referred to."""
        total = 0
        for address, reference in list(self._known.items()):
            if reference.expired():
                del self._known[address]
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            num_bytes = 0 if storage is None else storage.nbytes()
            total += num_bytes if num_bytes >= self._threshold else 0
        return total


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
