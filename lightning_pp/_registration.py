"""Making ``strategy="pipeline_parallel"`` known to Lightning without importing Lightning."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "pipeline_parallel"
_REGISTRY = "lightning.pytorch.strategies"


def register_when_lightning_is_imported() -> None:
    """Registers the strategy now if Lightning's registry exists already, otherwise as soon as it does."""
    if hasattr(sys.modules.get(_REGISTRY), "StrategyRegistry"):
        _register(sys.modules[_REGISTRY])
    elif not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder(_REGISTRY))


def _register(registry_module: ModuleType) -> None:
    registry = registry_module.StrategyRegistry
    if NAME not in registry.available_strategies():
        registry.register(NAME, _make_strategy, description="Pipeline of FSDP2-sharded stages, split from any module")


def _make_strategy(**options: Any) -> Any:
    from lightning_pp.strategy import PipelineParallelStrategy

    return PipelineParallelStrategy(**options)


class _RegistryFinder(MetaPathFinder):
    """Finds one module as everybody else does, and registers the strategy once it has run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register(module)
