"""Lightning's ``grad_norm`` and torch's ``clip_grad_norm_`` over all stages and shards, wherever they were imported."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.split.fakes.parameters import FakeParameters, is_fake
from lightning_pp.strategy.lightning.patching import redirected

Clip = Callable[[list[nn.Parameter], float, float], Tensor]
"""Clips this rank's part of what all ranks clip, by the norm of all of it; every rank has to call it."""


@dataclass(frozen=True, eq=False)
class GradientNorms:
    """``grad_norm(module)`` and ``clip_grad_norm_`` as on one device, on a rank with a part of the module.

    Attributes:
        module: The user's module, or what it is part of.
        fake_parameters: Know all its parameters.
        groups: Join the ranks of the pipeline.
        clip: Clips by norm.
        cut: Names of the parameters cut over tensor ranks.
    """

    module: pl.LightningModule
    fake_parameters: FakeParameters
    groups: ControlGroups
    clip: Clip
    cut: Collection[str] = ()

    def __call__(
        self, original: Callable[..., dict[str, Any]], module: nn.Module, norm_type: Any, group_separator: str = "/"
    ) -> dict[str, Any]:
        """As Lightning's; every rank of the pipeline, and of a stage's replicas, has to call it."""
        with self.fake_parameters.all_parameters():
            listed = dict(module.named_parameters())
            known = {parameter: name for name, parameter in self.module.named_parameters()}
        if not all(parameter in known for parameter in listed.values()):
            return original(module, norm_type, group_separator)
        kind = float(norm_type)
        own = self._own_norms(kind, {known[p]: p for p in listed.values()})
        found, holders = dict[str, tuple[float, torch.dtype]](), dict[str, int]()
        norms_of_ranks = self.groups.gather_in_pipeline({name: (*norm, name in self.cut) for name, norm in own.items()})
        for rank, part in enumerate(norms_of_ranks):
            for name, (norm, dtype, is_cut) in part.items():
                stage = rank // self.groups.num_tensor_ranks
                if is_cut and holders.setdefault(name, stage) != stage:  # tied to a unit of another stage
                    continue
                if is_cut and name in found:  # parts of tensor ranks
                    parts = torch.tensor([norm, found[name][0]], dtype=torch.float64, device="cpu")
                    norm = float(torch.linalg.vector_norm(parts, kind))
                found[name] = norm, dtype
        here = {name: found[known[parameter]] for name, parameter in listed.items() if known[parameter] in found}
        device = self.fake_parameters.device
        # numbers go to the device with the calls that write them there, which no host waits for
        norms: dict[str, Any] = {
            f"grad_{kind}_norm{group_separator}{name}": torch.full((), norm, dtype=dtype, device=device)
            for name, (norm, dtype) in here.items()
        }
        if norms:
            dtype = functools.reduce(torch.promote_types, (dtype for _, dtype in here.values()))
            together = torch.tensor([norm for norm, _ in here.values()], dtype=dtype)
            norms[f"grad_{kind}_norm_total"] = together.norm(kind)
        return norms

    @staticmethod
    def _own_norms(kind: float, parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[float, torch.dtype]]:
        """By name the norm of a gradient, and its dtype. The host waits once for the device."""
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        norms: list[Tensor] = []
        for gradient in gradients.values():
            norm = gradient.norm(kind)
            whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
            norms.append(whole.to(norms[0].device if norms else whole.device, torch.float64))
        values = torch.stack(norms).tolist() if norms else []
        return {name: (value, gradients[name].dtype) for name, value in zip(gradients, values, strict=True)}

    def clip_grad_norm_(
        self,
        original: Callable[..., Tensor],
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """As torch's, of the module's parameters over all stages; every rank has to call it, as it calls hooks.

        A rank that has none of the parameters is given none of them, or fakes.

        Raises:
            RuntimeError: The norm is not finite, and that is an error.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owned = dict.fromkeys(self.module.parameters())
        real = [parameter for parameter in given if not is_fake(parameter)]
        if any(parameter not in owned for parameter in real):
            return original(given, max_norm, norm_type, error_if_nonfinite, foreach)
        wanted = set(real)
        total = self.clip([parameter for parameter in owned if parameter in wanted], float(max_norm), float(norm_type))
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"The gradients have the total norm {float(total)} (order {norm_type}), so they cannot be clipped by "
                "it. Call clip_grad_norm_ with error_if_nonfinite=False to go on."
            )
        dtypes = [parameter.grad.dtype for parameter in (*real, *owned) if parameter.grad is not None]
        return total.to(dtypes[0] if dtypes else torch.get_default_dtype())

    @contextmanager
    def patched(self) -> Iterator[None]:
        """In the block, the two functions of Lightning and torch do this."""
        with redirected(grad_norm, self), redirected(clip_grad_norm_, self.clip_grad_norm_):
            yield
