"""Lightning's ``grad_norm`` over all stages and shards, wherever the user's code has imported it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import grads
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.split.fakes.parameters import FakeParameters

_NAME = "grad_norm"


class GradientNorms:
    """What ``grad_norm(module)`` is on one device, for a module of which this rank has a part.

    Args:
        module: The user's module, or what it is part of.
        fake_parameters: Know all its parameters.
        groups: Join the ranks of the pipeline.
    """

    def __init__(self, module: pl.LightningModule, fake_parameters: FakeParameters, groups: ControlGroups) -> None:
        self._module = module
        self._fake_parameters = fake_parameters
        self._groups = groups

    def __call__(
        self, original: Callable[..., dict[str, Any]], module: nn.Module, norm_type: Any, group_separator: str = "/"
    ) -> dict[str, Any]:
        """As Lightning's; every rank of the pipeline, and of a stage's replicas, has to call it."""
        with self._fake_parameters.all_parameters():
            listed = dict(module.named_parameters())
            known = {parameter: name for name, parameter in self._module.named_parameters()}
        if not all(parameter in known for parameter in listed.values()):
            return original(module, norm_type, group_separator)
        kind = float(norm_type)
        found: dict[str, tuple[float, torch.dtype]] = {}
        for part in self._groups.gather_in_pipeline(self._own_norms(kind, {known[p]: p for p in listed.values()})):
            found.update(part)
        norms: dict[str, Any] = {}
        for name, parameter in listed.items():
            if known[parameter] in found:
                norm, dtype = found[known[parameter]]
                key = f"grad_{kind}_norm{group_separator}{name}"
                norms[key] = torch.tensor(norm, dtype=dtype, device=self._fake_parameters.device)
        if norms:
            norms[f"grad_{kind}_norm_total"] = torch.tensor(list(norms.values())).norm(kind)
        return norms

    @staticmethod
    def _own_norms(kind: float, parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[float, torch.dtype]]:
        norms = {}
        for name, parameter in parameters.items():
            gradient = parameter.grad
            if gradient is not None:
                norm = gradient.norm(kind)
                whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
                norms[name] = (float(whole), gradient.dtype)
        return norms

    @contextmanager
    def in_place_of_lightnings(self) -> Iterator[None]:
        """Within, whoever has imported Lightning's ``grad_norm`` gets this one."""
        original = grads.grad_norm

        @functools.wraps(original)
        def grad_norm(module: nn.Module, norm_type: Any, group_separator: str = "/") -> dict[str, Any]:
            return self(original, module, norm_type, group_separator)

        importers = [
            content
            for content in [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
            if content.get(_NAME) is original
        ]
        for content in importers:
            content[_NAME] = grad_norm
        try:
            yield
        finally:
            for content in importers:
                content[_NAME] = original
