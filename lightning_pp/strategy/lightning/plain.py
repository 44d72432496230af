"""One stage on one device: plain training, by Lightning's own methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from lightning_pp.strategy._lightning_private import allow_compiled_modules
from lightning_pp.strategy.lightning.mesh_strategy import MeshStrategy

_Method = TypeVar("_Method", bound=Callable[..., Any])


def with_stages(method: _Method) -> _Method:
    """Decorates a method of the strategy that is about stages: in a plain run Lightning's own method is called instead.

    A strategy is plain if its attribute ``is_plain`` is true. Lightning's own method is the one that
    :class:`MeshStrategy` overrides or inherits.
    """

    @functools.wraps(method)
    def of_plain_or_piped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_plain:
            return getattr(super(MeshStrategy, self), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return cast(_Method, of_plain_or_piped)


def take_compiled_modules() -> None:
    """Has plain runs take what ``torch.compile(module)`` returns, as Lightning does on one device; done once."""
    allow_compiled_modules(lambda strategy: isinstance(strategy, MeshStrategy) and strategy.is_plain)
