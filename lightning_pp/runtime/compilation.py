"""Compiling the units of this rank one by one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.runtime._torch_private import is_compiled


def check_compile_options(compile: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """The keyword arguments for :func:`torch.compile`, or None if nothing is to be compiled.

    Raises:
        ConfigurationError: ``compile`` is neither a bool nor a mapping, names an option that torch does not have, or
            asks for CUDA graphs.
    """
    if isinstance(compile, bool):
        return {} if compile else None
    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    if not isinstance(compile, Mapping):
        raise ConfigurationError(
            f"compile={compile!r} must be True, False or options of torch.compile: {', '.join(known)}."
        )
    unknown = [str(name) for name in compile if name not in known]
    if unknown:
        raise ConfigurationError(
            f"compile has {', '.join(unknown)}, which torch.compile does not take. Its options are: {', '.join(known)}."
        )
    options = compile.get("options") or {}
    if compile.get("mode") in ("reduce-overhead", "max-autotune") or options.get("triton.cudagraphs"):
        raise ConfigurationError(
            f"compile={dict(compile)!r} asks for CUDA graphs. They write each result where the one before lies, and a "
            "pipeline keeps results of many microbatches at a time. Use mode='default' or "
            "'max-autotune-no-cudagraphs'."
        )
    return dict(compile)


class CompiledUnits:
    """Runs the forward of each unit as ``torch.compile`` makes it; what surrounds it (hooks, gathers) stays eager.

    Blocks of one class share what is compiled. Weight gradients of compiled code are part of its backward, so they are
    computed in I, and W is left with what is not compiled: a schedule that splits the backward then gains less, which
    the measured times of I and W show. A unit that the user has compiled is left as it is.

    Args:
        units: The units that this rank runs.
        options: Keyword arguments for :func:`torch.compile`.
    """

    def __init__(self, units: Mapping[str, nn.Module], options: Mapping[str, Any]) -> None:
        self._units = {name: unit for name, unit in units.items() if not _is_compiled(unit)}
        self._options = dict(options)
        self._compiled: dict[str, Any] = {}
        self._before: dict[str, Any] = {}

    def attach(self) -> None:
        """From here on the units run compiled."""
        for name, unit in self._units.items():
            if name in self._before:
                continue
            self._before[name] = unit.__dict__.get("forward")
            if name not in self._compiled:
                self._compiled[name] = torch.compile(unit.forward, **self._options)
            unit.__dict__["forward"] = self._compiled[name]

    def detach(self) -> None:
        """From here on the units run as the user made them, and can be pickled again."""
        for name, before in self._before.items():
            if before is None:
                self._units[name].__dict__.pop("forward", None)
            else:
                self._units[name].__dict__["forward"] = before
        self._before.clear()


def _is_compiled(unit: nn.Module) -> bool:
    return any(map(is_compiled, unit.modules()))
