"""Giving memory and values to parameters that were made on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from lightning_pp.errors import ConfigurationError


def materialize_buffers(module: nn.Module, device: torch.device) -> None:
    """Moves every buffer to ``device``, since the step computes with them everywhere; meta ones are made anew.

    Raises:
        ConfigurationError: A module with meta buffers has no way to fill them.
    """
    for name, child in module.named_modules():
        on_meta = False
        for key, buffer in child._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                on_meta = True
                child._buffers[key] = torch.empty_like(buffer, device=device)
            elif buffer.device != device:
                child._buffers[key] = buffer.to(device)
        if on_meta:
            with _only_buffers(child):
                _initializer(module, name, child)(child)


def materialize_parameters(module: nn.Module, owned: Collection[str], device: torch.device) -> None:
    """Allocates the parameters in ``owned`` that are on the meta device, and fills them as their modules say.

    The ``_init_weights`` of the Hugging Face model around a module says it, or else its own ``reset_parameters()``.

    Args:
        module: The whole model; parameters that are not owned are gone from it.
        owned: Names of this rank's parameters.
        device: Where to put them.

    Raises:
        ConfigurationError: A module with meta parameters has neither.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, child in module.named_modules():
        meta = {key: p for key, p in child._parameters.items() if p is not None and p.is_meta}
        fresh = False
        for key, parameter in meta.items():
            if f"{name}.{key}" not in owned and key not in owned and parameter not in replaced:
                continue
            if parameter not in replaced:
                fresh = True
                empty = torch.empty_like(parameter, device=device)
                replaced[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            child._parameters[key] = replaced[parameter]
        if fresh:
            with torch.no_grad():
                _initializer(module, name, child)(child)


def _initializer(root: nn.Module, name: str, child: nn.Module) -> Callable[[nn.Module], Any]:
    path = name.split(".") if name else []
    for depth in range(len(path), -1, -1):
        ancestor = root.get_submodule(".".join(path[:depth]))
        if callable(getattr(ancestor, "_init_weights", None)):
            return ancestor._init_weights  # type: ignore[return-value]
    if callable(getattr(child, "reset_parameters", None)):
        return lambda module: module.reset_parameters()  # type: ignore[operator]
    raise ConfigurationError(
        f"{name or 'the module'} ({type(child).__name__}) was made on the meta device, and nothing says how to fill "
        "it: it has no reset_parameters(), and no module around it has _init_weights(). Add reset_parameters(), or "
        "make the model without empty_init / torch.device('meta')."
    )


class _only_buffers:  # noqa: N801 - a context manager
    """Within, initialisation does not reach the (meta) parameters of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = module._parameters

    def __enter__(self) -> None:
        self._module._parameters = {
            key: None if p is None else nn.Parameter(torch.empty(0), requires_grad=False)
            for key, p in self._parameters.items()
            if p is not None and not p.is_meta
        }

    def __exit__(self, *exc_info: object) -> None:
        self._module._parameters = self._parameters
