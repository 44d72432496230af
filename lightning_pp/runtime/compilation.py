"""Compiling the units of this rank one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.runtime._torch_private import is_compiled
from lightning_pp.runtime.split_backward.compiled import CAPTURE_OPTIONS, DeferringBackend
from lightning_pp.runtime.split_backward.deferral import weight_gradients_may_wait
from lightning_pp.split.head.parts import HeadPart
from lightning_pp.tensor.compiling import PartsBackend
from lightning_pp.tensor.units import CutForward

NOTHING_TO_COMPILE = (
    "compile compiles nothing: every unit of the model is a single layer of torch. Such layers are not compiled, "
    "because a call of compiled code costs more there than it saves. Name larger units with units=[...], or leave "
    "out compile."
)


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
            f"compile={dict(compile)!r} asks for CUDA graphs. They overwrite the previous result with each new one, "
            "but a pipeline keeps results of several microbatches at once. Use mode='default' or "
            "'max-autotune-no-cudagraphs'."
        )
    return dict(compile)


class CompiledUnits:
    """Runs the forward of each unit compiled; the code around it (hooks, gathers) stays eager.

    A unit is compiled in two forms, each when it is first needed: for a backward that is split, with weight gradients
    that wait for W (:class:`~lightning_pp.runtime.split_backward.compiled.DeferringBackend`), and for all else as
    ``torch.compile`` does it. Blocks of one class share what is compiled. A unit that the user has compiled is left as
    it is, and computes its weight gradients in I. A unit that is one layer of torch (``nn.Embedding``,
    ``nn.LayerNorm``, ``nn.Linear``) stays as it is too, and its weight gradient waits for W: there is nothing to join
    it with, and each call of compiled code has a price.

    Args:
        units: The units that this rank runs.
        options: Keyword arguments for :func:`torch.compile`.
    """

    def __init__(self, units: Mapping[str, nn.Module], options: Mapping[str, Any]) -> None:
        self._units = {
            name: unit for name, unit in units.items() if not is_compiled(unit) and not is_one_operation(unit)
        }
        self._options = dict(options)
        self._backend = DeferringBackend(options)
        self._on_parts = PartsBackend(DeferringBackend(options, defers=False)), PartsBackend(self._backend)
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._kept: dict[str, None] = {
            f"{name}.{weight}": None
            for name, unit in units.items()
            if is_compiled(unit)
            for weight, parameter in unit.named_parameters()
            if parameter.requires_grad and parameter.dim() > 1
        }
        self._before: dict[str, Any] = {}

    def attach(self) -> None:
        """From here on the units run compiled."""
        for name, unit in self._units.items():
            if name in self._before:
                continue
            self._before[name] = unit.__dict__.get("forward")
            if name not in self._compiled:
                self._compiled[name] = self._compile(name, unit)
            unit.__dict__["forward"] = self._compiled[name]

    def kept_in_backward(self) -> list[str]:
        """Names of the weights whose gradients were computed in I so far, in code whose weight gradients might wait."""
        return list(self._kept)

    def uncompiled(self) -> dict[str, str]:
        """Why units with parts of matrices run uncompiled, by name."""
        return {name: reason for backend in self._on_parts for name, reason in backend.reasons.items()}

    def _compile(self, name: str, unit: nn.Module) -> Callable[..., Any]:
        capture = {option: value for option, value in self._options.items() if option in CAPTURE_OPTIONS}
        if isinstance(unit.forward, CutForward):
            whole, deferring = (backend.compiled(unit.forward, capture) for backend in self._on_parts)
        else:
            whole = torch.compile(unit.forward, **self._options)
            deferring = torch.compile(unit.forward, backend=self._backend, **capture)

        @wraps(unit.forward, updated=())
        def compiled(*args: Any, **kwargs: Any) -> Any:
            if not weight_gradients_may_wait():
                return whole(*args, **kwargs)
            result = deferring(*args, **kwargs)
            if self._backend.kept:  # asked here, since FSDP2 puts other Parameters in their places later
                kept = {id(weight) for weight in self._backend.kept}
                self._kept.update(
                    (f"{name}.{at}", None) for at, weight in unit.named_parameters() if id(weight) in kept
                )
                self._backend.kept.clear()
            return result

        return compiled

    def detach(self) -> None:
        """From here on the units run as the user made them, and can be pickled again."""
        for name, before in self._before.items():
            self._units[name].__dict__.pop("forward", None)
            if before is not None:
                self._units[name].__dict__["forward"] = before
        self._before.clear()


def is_one_operation(unit: nn.Module) -> bool:
    """Whether compiled code would be what torch has anyway; a part of a head is one product and a few sums."""
    is_of_torch = type(unit).__module__.startswith("torch.nn.")
    return isinstance(unit, HeadPart) or (is_of_torch and next(unit.children(), None) is None)
