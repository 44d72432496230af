"""Lightning's ``grad_norm`` over all stages and shards, also where the user's code has imported it before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import utilities
from lightning.pytorch.utilities import grads
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.strategy.lightning.callers import namespaces_of_user


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
        """Within, Lightning's ``grad_norm`` is this one, where Lightning has it and in the user's modules."""
        original = grads.grad_norm

        @functools.wraps(original)
        def grad_norm(module: nn.Module, norm_type: Any, group_separator: str = "/") -> dict[str, Any]:
            return self(original, module, norm_type, group_separator)

        _exchange(original, grad_norm)
        try:
            yield
        finally:
            _exchange(grad_norm, original)  # also in modules that were imported in between


def _exchange(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Puts ``other`` wherever ``one`` is a global, under any name.

    To change it in Lightning alone is not enough: ``from lightning.pytorch.utilities import grad_norm``, as Lightning's
    own documentation has it, gives the user's module a name of its own before there is a strategy. Other libraries are
    left alone.
    """
    for namespace in (vars(utilities), vars(grads), *namespaces_of_user()):
        for name, value in list(namespace.items()):
            if value is one:
                namespace[name] = other
