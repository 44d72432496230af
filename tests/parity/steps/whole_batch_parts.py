"""Losses over the whole batch, a small model under each, and a run of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from feature_parts import plain
from idiom_parts import Notes
from parity_run import QUIET, Layout, whole_weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pp import PipelineParallelStrategy

WIDTH, CLASSES = 6, 3
Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def contrastive(module: Any, a: Tensor, b: Tensor, label: Tensor) -> Tensor:
    """In-batch contrast of two views, each through the model by itself."""
    similarity = F.normalize(module(a)) @ F.normalize(module(b)).T / 0.3
    target = torch.arange(len(a))
    return (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.T, target)) / 2


def nt_xent(module: Any, a: Tensor, b: Tensor, label: Tensor) -> Tensor:
    """Two views as one batch of twice the samples."""
    z = F.normalize(module(torch.cat([a, b])))
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(similarity, torch.arange(len(z)).roll(len(a)))


def root_of_mean(module: Any, a: Tensor, b: Tensor, label: Tensor) -> Tensor:
    return F.mse_loss(module(a), b).sqrt()


def batch_hard(module: Any, a: Tensor, b: Tensor, label: Tensor) -> Tensor:
    """Triplets of the farthest of a sample's class and the nearest of the others."""
    z = module(a)
    distance = (z[:, None] - z[None]).square().sum(-1)
    same = label[:, None] == label[None]
    farthest = distance.masked_fill(~same, 0.0).amax(1)
    nearest = distance.masked_fill(same, 1e6).amin(1)
    return F.softplus(farthest - nearest.clamp(max=50.0)).mean()


def dice(module: Any, a: Tensor, b: Tensor, label: Tensor) -> Tensor:
    probability, target = module(a).sigmoid(), (b > 0).double()
    return 1 - (2 * (probability * target).sum() + 1) / (probability.sum() + target.sum() + 1)


def temperature(module: Any, a: Tensor, b: Tensor, label: Tensor) -> Tensor:
    """A parameter that is used outside of any unit, as CLIP's."""
    similarity = F.normalize(module(a)) @ F.normalize(b).T
    return F.cross_entropy(module.scale.exp() * similarity, torch.arange(len(a)))


def tied(module: Any, a: Tensor, b: Tensor, label: Tensor) -> Tensor:
    """The weight of the first unit, used again at the end."""
    return (module(a) @ module.embed.weight[:WIDTH] - b).square().mean().sqrt()


def loss_module(module: Any, a: Tensor, b: Tensor, label: Tensor) -> Tensor:
    """A unit that gives one number for the batch, and one after it."""
    features = module(a)
    loss = module.criterion(features, b)
    return loss + 0.1 * F.cross_entropy(module.probe(features), label)


def values_of_earlier_stages(module: Any, a: Tensor, b: Tensor, label: Tensor) -> Tensor:
    """Deep supervision: the end needs what the first unit gives, edited in place."""
    first = module.embed(a)
    first.add_(0.5)
    x = first
    for block in module.blocks:
        x = x + block(x)
    return (module.head(x) - b).square().mean().sqrt() + first.std()


LOSSES: dict[str, Loss] = {
    function.__name__: function
    for function in (
        contrastive,
        nt_xent,
        root_of_mean,
        batch_hard,
        dice,
        temperature,
        tied,
        loss_module,
        values_of_earlier_stages,
    )
}


class Criterion(nn.Module):
    """A contrastive loss with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, features: Tensor, other: Tensor) -> Tensor:
        return F.cross_entropy(self.log_scale.exp() * features @ other.T, torch.arange(len(features)))


class WholeBatchModel(L.LightningModule):
    """A stack of blocks under one of :data:`LOSSES`."""

    def __init__(self, loss: str, lr: float = 0.05) -> None:
        super().__init__()
        self.loss = LOSSES[loss]
        self.lr = lr
        self.embed = nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(5))
        self.head = nn.Linear(10, WIDTH)
        self.seen: list[float] = []
        if loss == "temperature":
            self.scale = nn.Parameter(torch.tensor(0.7))
        if loss == "loss_module":
            self.criterion, self.probe = Criterion(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self, *batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("positive", (batch[1] > 0).double().sum(), on_step=True)
        self.seen.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self, *batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Pairs(L.LightningDataModule):
    """Two views and a label; the last batch is smaller."""

    def __init__(self, num_samples: int = 14, batch_size: int = 8) -> None:
        super().__init__()
        self.num_samples, self.batch_size = num_samples, batch_size

    def loader(self, seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        a = torch.randn(self.num_samples, WIDTH, generator=generator, dtype=torch.float64)
        b = a + 0.5 * torch.randn(self.num_samples, WIDTH, generator=generator, dtype=torch.float64)
        label = torch.randint(0, CLASSES, (self.num_samples,), generator=generator)
        samples = TensorDataset(a, b, label)
        assert self.trainer is not None
        placement = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(samples, shuffle=False, **placement)
        return DataLoader(samples, batch_size=self.batch_size // placement["num_replicas"], sampler=sampler)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(1)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(2)

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.loader(3)


def run_whole(
    layout: Layout | None,
    loss: str,
    make: Callable[[str], L.LightningModule] = WholeBatchModel,
    arguments: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    strategy: Any = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Trains and validates; what came of every batch, the attribute that the step keeps, and this rank's weights."""
    torch.manual_seed(5)
    module, notes = make(loss), Notes()
    settings: dict[str, Any] = {**QUIET, "precision": "64-true", "max_epochs": 1, "use_distributed_sampler": False}
    settings |= {"devices": 1, "callbacks": [notes]}
    if layout is not None:
        pipeline: PipelineParallelStrategy = layout.strategy(**{"whole_batch_loss": True, **(arguments or {})})
        settings |= {"devices": layout.world_size, "strategy": pipeline}
    if strategy is not None:
        settings |= {"devices": 2, "strategy": strategy}
    trainer = L.Trainer(**{**settings, **kwargs})
    trainer.fit(module, Pairs(**(data or {})))
    seen = [float(value) for value in getattr(module, "seen", [])]
    end = plain(dict(trainer.callback_metrics))
    return {"batches": notes.batches, "end": end, "seen": seen, "weights": whole_weights(module)}
