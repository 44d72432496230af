"""The private names of torch that the strategy uses; nothing else in this layer uses any.

Tried with torch 2.11 to 2.13. Importing fails, and says which name is missing, where a version has one no longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from lightning_pp._private_names import private

for _name in ("_modules", "_non_persistent_buffers_set"):
    private(nn.Module(), _name)

_get_default_store: Any = private(distributed_c10d, "_get_default_store")
_set_pg_timeout: Any = private(distributed_c10d, "_set_pg_timeout")


def store_of_job() -> Any:
    """The key-value store that the process group of all ranks was made with."""
    return _get_default_store()


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """How long collectives of ``group`` may wait from here on; by default those among all ranks."""
    _set_pg_timeout(timeout, group)


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The modules that ``module`` itself holds by name, also one that it holds by two."""
    return module._modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether the ``state_dict`` of ``module`` has its buffer ``buffer``."""
    return buffer not in module._non_persistent_buffers_set
