"""Trains an unmodified LightningModule as a pipeline of FSDP2-sharded stages.

After importing the package, in either order with Lightning, ``Trainer(strategy="pipeline_parallel")`` is known.
Importing it imports neither Lightning nor torch: a public name is imported when it is first used. Without them
:mod:`lightning_pp.schedule` works, and nothing else.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "BatchPart",
    "CombinedOptimizer",
    "MemorySnapshots",
    "PipelineMonitor",
    "PipelineParallelStrategy",
    "PipelineProfiler",
    "PipelineWandbLogger",
    "split_packed",
    "verify",
]

_ROOMS = {
    "BatchPart": "split.data.microbatch",
    "CombinedOptimizer": "combined_optimizer",
    "PipelineParallelStrategy": "strategy",
    "split_packed": "packed_batches",
    "verify": "verification",
}
_REGISTRY = "lightning.pytorch.strategies"

if TYPE_CHECKING:
    from lightning_pp.callbacks import MemorySnapshots, PipelineMonitor, PipelineProfiler, PipelineWandbLogger
    from lightning_pp.combined_optimizer import CombinedOptimizer
    from lightning_pp.packed_batches import split_packed
    from lightning_pp.split.data.microbatch import BatchPart
    from lightning_pp.strategy import PipelineParallelStrategy
    from lightning_pp.verification.verify import verify
else:

    def __getattr__(name: str) -> Any:
        """A public name, imported now."""
        if name not in __all__:
            raise AttributeError(f"module 'lightning_pp' has no attribute {name!r}")
        return getattr(import_module(f"lightning_pp.{_ROOMS.get(name, 'callbacks')}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


def _strategy(**options: Any) -> PipelineParallelStrategy:
    """What Lightning calls for the strategy's name."""
    return import_module("lightning_pp.strategy").PipelineParallelStrategy(**options)  # type: ignore[no-any-return]


def _register(strategies: Any) -> None:
    strategies.StrategyRegistry.register(
        "pipeline_parallel",
        _strategy,
        description="Pipeline of FSDP2-sharded stages, split from any module",
        override=True,
    )


class _RegistersWithLightning(MetaPathFinder):
    """Registers the strategy as soon as Lightning's registry is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Python calls it for each import; only that of the registry is found here, once."""
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: Any) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if _REGISTRY in sys.modules:
    _register(sys.modules[_REGISTRY])
else:
    sys.meta_path.insert(0, _RegistersWithLightning())
