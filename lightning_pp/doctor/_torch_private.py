"""The private names of torch that the doctor uses; nothing else in this layer uses any.

What the installed version lacks is told where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pp._private_names import private

__all__ = ["StorageReference", "TorchDispatchMode", "leaves_of"]

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")

_tree_leaves = private("torch.utils._pytree.tree_leaves")
_storage_at = private("torch.UntypedStorage._new_with_weak_ptr")


def leaves_of(tree: Any) -> list[Any]:
    """What stands in lists, tuples and dicts of any depth."""
    leaves: list[Any] = _tree_leaves(tree)
    return leaves


class StorageReference:
    """Knows a storage without keeping it.

    Args:
        storage: The memory of a tensor.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """Its bytes now; 0 once it has gone."""
        if self._reference.expired():
            return 0
        storage = _storage_at(self._reference.cdata)
        return 0 if storage is None else int(storage.nbytes())

    def has_gone(self) -> bool:
        """Whether nothing refers to it any more."""
        return bool(self._reference.expired())
