"""The dtypes of a step, from Lightning's precision plugin, and the plugins that a pipeline cannot run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from torch import Tensor

from lightning_pp.errors import ConfigurationError
from lightning_pp.sharding.gradients.scaler import AgreeingGradScaler
from lightning_pp.split.memory.state_memory import StepDtypes

_SUPPORTED = "32-true, 64-true, bf16-true, bf16-mixed, and 16-mixed on CUDA"
_REFUSED: dict[type[Precision], str] = {
    BitsandbytesPrecision: "it replaces linear layers by ones whose weights are packed integers",
    TransformerEnginePrecision: "it keeps its fp8 scales in global state that does not know of stages",
    DeepSpeedPrecision: "it leaves casting and scaling to DeepSpeed's engine",
    FSDPPrecision: "it leaves casting to FSDP's wrapper of the whole model; leave out plugins= and set precision=",
    XLAPrecision: "it is made for TPUs",
}


def step_dtypes(precision: Precision) -> StepDtypes:
    """Dtypes of computation and of gradients.

    ==========  =============  ======================================  ====================
    precision   parameters     inside units, under ``torch.autocast``  gradients, reduction
    ==========  =============  ======================================  ====================
    32-true     float32        float32                                 float32
    64-true     float64        float64                                 float64
    bf16-true   bfloat16       bfloat16                                float32, while microbatches accumulate
    bf16-mixed  float32        bfloat16                                float32
    16-mixed    float32        float16                                 float32, scaled
    ==========  =============  ======================================  ====================
    """
    if isinstance(precision, MixedPrecision):
        return StepDtypes(torch.bfloat16 if precision.precision == "bf16-mixed" else torch.float16, torch.float32)
    if isinstance(precision, HalfPrecision):
        return StepDtypes(None, torch.float32)
    return StepDtypes()


def refuse_precision(precision: Precision, device: torch.device) -> None:
    """Raises :class:`ConfigurationError` for a precision that a pipeline cannot run."""
    for kind, reason in _REFUSED.items():
        if isinstance(precision, kind):
            raise ConfigurationError(
                f"{type(precision).__name__} is not supported in a pipeline: {reason}. Supported are {_SUPPORTED}."
            )
    if isinstance(precision, HalfPrecision) and precision.precision == "16-true":
        raise ConfigurationError(
            "precision='16-true' keeps weights in float16: their gradients underflow without a scale, and their "
            f"updates are rounded away. Use 'bf16-true' or 'bf16-mixed'. Supported are {_SUPPORTED}."
        )
    if isinstance(precision, MixedPrecision) and precision.precision == "16-mixed":
        if device.type != "cuda":
            raise ConfigurationError(
                "precision='16-mixed' computes in float16 with a scaled loss, which needs a CUDA device, but this run "
                f"computes on {device.type}. Use 'bf16-mixed', which needs no scale, or '32-true'."
            )
        if precision.scaler is not None and not AgreeingGradScaler.can_take_over(precision.scaler):
            raise ConfigurationError(
                f"The loss scale must be the same on all stages, but {type(precision.scaler).__name__} would change it "
                "on each rank separately. Give MixedPrecision a torch.amp.GradScaler, or none."
            )


def agree_on_scale(precision: Precision) -> None:
    """Has all ranks skip a step together, and keep one scale."""
    scaler = getattr(precision, "scaler", None)
    if isinstance(precision, MixedPrecision) and scaler is not None and not isinstance(scaler, AgreeingGradScaler):
        precision.scaler = AgreeingGradScaler.taking_over(scaler)


def scaled(loss_of: Callable[[Any], Tensor], precision: Precision, device: torch.device) -> Callable[[Any], Tensor]:
    """``loss_of`` with the loss multiplied by the scale that is in force, for backward; as it is without a scaler.

    The scale stays on ``device``: the host does not wait for it. Every rank has to call this before its update, since a
    scaler has no scale until it is asked for one.
    """
    scaler = getattr(precision, "scaler", None)
    if scaler is None:
        return loss_of
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return lambda output: loss_of(output) * scale
