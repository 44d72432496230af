"""Steps whose loss, or what they log, is no sum and no mean over samples: a pipeline refuses them, and says where."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from idiom_parts import TokenClassifier
from idiom_steps import CLASSES, STEPS, token_losses
from torch import Tensor, nn


def embeddings(module: Any, batch: Any) -> Tensor:
    """Of every sample, [batch, classes]."""
    return F.normalize(module(batch["x"]).mean(1))


def in_batch_contrastive(module: Any, batch: Any) -> Tensor:
    z = embeddings(module, batch)
    logits = z @ F.normalize(batch["soft"].mean(1)).T
    return F.cross_entropy(logits / 0.1, torch.arange(len(z)))


def root_of_a_mean(module: Any, batch: Any) -> Tensor:
    return F.mse_loss(module(batch["x"]), batch["soft"]).sqrt()


def batch_hard_triplets(module: Any, batch: Any) -> Tensor:
    z, label = embeddings(module, batch), batch["target"][:, 0]
    distance = (z[:, None] - z[None]).square().sum(-1)
    same = label[:, None] == label[None]
    hardest = torch.where(same, distance, 0.0).amax(1) - torch.where(same, 10.0, distance).amin(1)
    return F.relu(hardest + 0.2).mean()


def dice_over_the_batch(module: Any, batch: Any) -> Tensor:
    p, t = module(batch["x"]).sigmoid(), (batch["soft"] > 0.5).double()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def variance_between_samples(module: Any, batch: Any) -> Tensor:
    z = embeddings(module, batch)
    return token_losses(module, batch, z[:, None].expand(-1, 6, -1)).mean() - 0.1 * z.var(0).mean()


def deviation_in_a_log(module: Any, batch: Any) -> Tensor:
    values = module(batch["x"])
    module.log("spread", values.detach().std())
    return F.mse_loss(values, batch["soft"])


def sum_as_a_number_in_a_log(module: Any, batch: Any) -> Tensor:
    loss = F.mse_loss(module(batch["x"]), batch["soft"])
    module.log("total", loss.detach().mul(2).sum().item() + (module.head.weight.shape[0] - CLASSES))
    module.log("num_right", (batch["target"] == 0).sum().item() * 1.0)
    return loss


def quotient_by_a_number_in_a_log(module: Any, batch: Any) -> Tensor:
    values, mask = module(batch["x"]), batch["target"] > 0
    module.log("share", int(((values[..., 0] > 0) & mask).sum()) / max(int(mask.sum()), 1))
    return F.mse_loss(values, batch["soft"])


def largest_batch_on_the_module(module: Any, batch: Any) -> Tensor:
    module.largest = max(getattr(module, "largest", 0), len(batch["x"]))
    return F.mse_loss(module(batch["x"]), batch["soft"])


def coupled_before_the_first_unit(module: Any, batch: Any) -> Tensor:
    x = batch["x"] - batch["x"].median(0).values
    return F.mse_loss(module(x), batch["soft"])


class RowAttention(nn.Module):
    """Attention between the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.project(x).transpose(0, 1)
        return x + F.scaled_dot_product_attention(rows, rows, rows).transpose(0, 1)


class BatchNormBlock(nn.Module):
    """A block with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


class MixesSamples(TokenClassifier):
    """The classifier with a block that couples samples.

    Args:
        step: Name of the step.
        block: The block.
    """

    def __init__(self, step: str, block: type[nn.Module] = RowAttention) -> None:
        super().__init__(step)
        self.blocks[1] = block()


class NormalisesBatches(MixesSamples):
    def __init__(self, step: str) -> None:
        super().__init__(step, BatchNormBlock)


class EqualSamples(TokenClassifier):
    """Gets one sample over and over."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {name: value[:1].expand_as(value) for name, value in batch.items()}


class DropsAndDraws(TokenClassifier):
    """Dropout within units, noise and masks drawn in the step."""

    def __init__(self, step: str) -> None:
        super().__init__(step)
        for block in self.blocks:
            block.append(nn.Dropout(0.3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.randn_like(batch["x"])
        drawn = torch.rand(batch["mask"].shape) < 0.6
        mask = batch["mask"] * drawn
        losses = token_losses(self, batch, self(batch["x"] + 0.1 * noise))
        return (losses * mask).sum() / mask.sum().clamp(min=1)


REFUSED = {
    step.__name__: step
    for step in (
        in_batch_contrastive, root_of_a_mean, batch_hard_triplets, dice_over_the_batch, variance_between_samples,
        deviation_in_a_log, sum_as_a_number_in_a_log, quotient_by_a_number_in_a_log, largest_batch_on_the_module,
        coupled_before_the_first_unit,
    )
}  # fmt: skip
STEPS.update(REFUSED)
