"""The private names of torch that checkpoints use; nothing else in this layer uses any.

A name that the installed version lacks raises an error at its first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_pp._private_names import private

tree_flatten = private("torch.utils._pytree.tree_flatten")
tree_leaves = private("torch.utils._pytree.tree_leaves")
tree_map_only = private("torch.utils._pytree.tree_map_only")


def fsspec_files() -> Any:
    """The class of torch.distributed.checkpoint's files at URLs, which takes long to import."""
    return private(
        "torch.distributed.checkpoint.fsspec_filesystem._FileSystem",  # since torch 2.15
        "torch.distributed.checkpoint._fsspec_filesystem.FileSystem",
    )


# a ``__torch_function__`` for tensor classes that want none
without_torch_function: Any = private("torch._C._disabled_torch_function_impl")
_make_wrapper: Any = private("torch.Tensor._make_wrapper_subclass")

_Wrapper = TypeVar("_Wrapper", bound=Tensor)


def make_wrapper(kind: type[_Wrapper], shape: Sequence[int], dtype: torch.dtype) -> _Wrapper:
    """A tensor of the class ``kind`` on the CPU with a shape and a dtype, and no memory."""
    made: _Wrapper = _make_wrapper(kind, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
    return made


def keep_module_versions(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Notes with ``state`` the versions of the modules that ``own``, a ``state_dict()``, has noted with it."""
    if hasattr(own, "_metadata"):  # not where user code gives a dict of its own
        state._metadata = own._metadata  # type: ignore[attr-defined]
