"""The private names of torch that the strategy uses; nothing else in this layer uses any.

A name that the installed version lacks raises an error at its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_pp._private_names import private, reader_of, uses

# the key-value store that the process group of all ranks was made with
job_store: Callable[[], Any] = private("torch.distributed.distributed_c10d._get_default_store")
# the modules that a module itself holds by name, also one that it holds by two
children_of: Callable[[nn.Module], Mapping[str, nn.Module | None]] = reader_of("torch.nn.Module._modules")
_set_timeout: Any = private(
    "torch.distributed.set_timeout",  # since torch 2.15
    "torch.distributed.distributed_c10d._set_pg_timeout",
)

_SpectralNorm: Any = private("torch.nn.utils.parametrizations._SpectralNorm")


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """How long collectives of ``group`` may wait from here on; by default those among all ranks."""
    _set_timeout(timeout, group)


@uses("torch.nn.Module._non_persistent_buffers_set")
def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether the ``state_dict`` of ``module`` has its buffer ``buffer``."""
    return buffer not in module._non_persistent_buffers_set


@uses("torch.nn.Module._forward_pre_hooks")
def spectral_norms_of(module: nn.Module) -> list[Any]:
    """What normalises a weight of ``module`` by power iterations: itself, as a parametrization, or hooks of it."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
    return [module, *hooks] if isinstance(module, _SpectralNorm) else hooks
