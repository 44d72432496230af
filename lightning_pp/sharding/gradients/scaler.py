"""A gradient scaler for float16 whose decisions agree over all stages and shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_pp.sharding._torch_private import device_type_of, sparse_values, unscale_all_
from lightning_pp.sharding.units.flat import local_tensor


class AgreeingGradScaler(GradScaler):
    """:class:`torch.amp.GradScaler` over ranks that hold different parameters, or different parts of them.

    A step is skipped on all ranks if a gradient of any of them is not finite, so all keep the same scale, and the
    parameters of all stages are those of the same number of steps. It costs one all-reduce of a number in a step.

    All ranks must unscale at the same point, also those without a gradient.
    """

    @staticmethod
    def can_take_over(scaler: Any) -> bool:
        """Whether ``scaler`` decides as torch's own does."""
        return isinstance(scaler, AgreeingGradScaler) or type(scaler) in (GradScaler, torch.cuda.amp.GradScaler)

    @classmethod
    def taking_over(cls, scaler: GradScaler) -> AgreeingGradScaler:
        """A scaler in the state that ``scaler`` is in."""
        agreeing = cls(device_type_of(scaler))
        agreeing.__dict__.update(scaler.__dict__)
        return agreeing

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales what this rank holds of the gradients; every rank learns whether any of them is not finite."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    gradient = local_tensor(parameter.grad)
                    if gradient.dtype == torch.float16 and not allow_fp16:
                        raise ValueError("Attempting to unscale FP16 gradients.")
                    if gradient.is_sparse:
                        gradient = sparse_values(gradient)
                    by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
            found = found_inf.detach().clone()
            for (device, _), gradients in by_kind.items():
                here = found.to(device)
                unscale_all_(gradients, here, inv_scale.to(device))
                found = torch.maximum(found, here.to(found.device))
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {found.device: found}
