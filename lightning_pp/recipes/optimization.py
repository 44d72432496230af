"""How the models of the recipes are optimized: which parameters decay, and how the learning rate changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def warmup_cosine(step: int, num_warmup_steps: int, num_steps: int, floor: float = 0.1) -> float:
    """Factor on the peak learning rate at ``step`` (from 0): linear up to 1, then a half cosine down to ``floor``."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    progress = min(1.0, (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def optimizer_with_warmup(
    decayed: Iterable[nn.Parameter],
    others: Iterable[nn.Parameter],
    *,
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    learning_rate: float,
    weight_decay: float,
    num_warmup_steps: int,
    num_steps: int,
) -> dict[str, Any]:
    """What ``configure_optimizers`` returns: an optimizer, with linear warm-up and cosine decay to a tenth.

    Args:
        decayed: Parameters with weight decay.
        others: Parameters without.
        optimizer: Is called with the two groups of parameters and ``lr``; None is AdamW with betas 0.9 and 0.95.
        learning_rate: At its peak.
        weight_decay: Of ``decayed``.
        num_warmup_steps: Optimizer steps of linear warm-up.
        num_steps: Optimizer steps of the training.
    """
    groups = [{"params": list(decayed), "weight_decay": weight_decay}, {"params": list(others), "weight_decay": 0.0}]
    if optimizer is None:
        made: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    else:
        made = optimizer(groups, lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: warmup_cosine(step, num_warmup_steps, num_steps))
    return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
