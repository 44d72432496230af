"""Shared by the models of the recipes: steps that log a loss, weight decay, and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn


def warmup_cosine(step: int, num_warmup_steps: int, num_steps: int, floor: float = 0.1) -> float:
    """Factor on the peak learning rate at ``step`` (from 0): linear up to 1, then a half cosine down to ``floor``."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    progress = min(1.0, (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


class RecipeModule(L.LightningModule):
    """Shared by the models of the recipes: steps that log a loss, and the optimizer.

    Args:
        learning_rate: Peak of a cosine schedule after the warm-up.
        num_warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: Decay of the matrices.
        optimizer: Function that makes the optimizer from parameter groups and ``lr``. None: AdamW with betas 0.9, 0.95.
    """

    def __init__(
        self,
        learning_rate: float,
        num_warmup_steps: int,
        weight_decay: float,
        optimizer: Callable[..., torch.optim.Optimizer] | None,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.num_warmup_steps = num_warmup_steps
        self.weight_decay = weight_decay
        self.make_optimizer = optimizer

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a batch. Subclasses compute it."""
        raise NotImplementedError

    def _is_decayed(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter has weight decay: matrices have."""
        return parameter.ndim >= 2

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Log and return the loss of one batch."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss of one batch, averaged over the epoch."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss of one batch, averaged over the epoch."""
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW, or the optimizer that was given, with linear warm-up and cosine decay to a tenth."""
        trained = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for name, p in trained if self._is_decayed(name, p)], "weight_decay": self.weight_decay},
            {"params": [p for name, p in trained if not self._is_decayed(name, p)], "weight_decay": 0.0},
        ]
        if self.make_optimizer is None:
            made: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        else:
            made = self.make_optimizer(groups, lr=self.learning_rate)
        num_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            made, lambda step: warmup_cosine(step, self.num_warmup_steps, num_steps)
        )
        return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
