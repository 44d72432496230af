"""Losses that are modules with parameters of their own, and metrics that the step updates: as on one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from feature_parts import Data, check_on_every_rank, plain
from feature_parts import make_unchecked_trainer as make_trainer
from parity_run import Layout, whole_weights
from pool import WorkerPool
from small_models import NUM_CLASSES
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

LAYOUTS = [Layout("zb_h1", 2, 1, 3), Layout("1f1b", 2, 2, 2)]


class ArcFace(nn.Module):
    """Cosines to one learned center for each class, with a margin for the right one."""

    def __init__(self, width: int, num_classes: int, margin: float = 0.2, scale: float = 8.0) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(num_classes, width))
        self.margin, self.scale = margin, scale

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(features), F.normalize(self.centers)).clamp(-1 + 1e-7, 1 - 1e-7)
        angle = cosine.acos() + self.margin * F.one_hot(target, len(self.centers))
        return F.cross_entropy(self.scale * angle.cos(), target)


class LearnedTemperature(nn.Module):
    """Cosines to fixed centers, divided by a temperature that is learned, as CLIP's loss."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("centers", F.normalize(torch.randn(num_classes, width)))
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.log_scale.exp() * F.normalize(features) @ self.centers.T, target)


class UncertaintyWeights(nn.Module):
    """Two tasks, weighted by learned variances; the second looks at the features only."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.classify = nn.Linear(width, num_classes)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        losses = torch.stack([F.cross_entropy(self.classify(features), target), features.square().mean()])
        return (losses * torch.exp(-self.log_variances) + self.log_variances).sum()


LOSSES: dict[str, type[nn.Module]] = {
    "arc_face": ArcFace,
    "temperature": LearnedTemperature,
    "uncertainty": UncertaintyWeights,
}


class Recognizer(L.LightningModule):
    """A stack of blocks, a loss module, a metric of training and one of validation."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 10), *(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(3)))
        self.loss = LOSSES[loss](10, NUM_CLASSES)
        self.head = nn.Linear(10, NUM_CLASSES)
        self.train_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES)
        self.val_confusion = MulticlassConfusionMatrix(NUM_CLASSES)
        self.confusions: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.blocks(x)
        logits = self.head(features.detach())
        self.train_accuracy.update(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        loss = self.loss(features, y) + F.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        features = self.blocks(x)
        self.log("val_loss", self.loss(features, y), sync_dist=True)
        logits = self.head(features)
        self.val_accuracy(logits, y)
        self.log("val_accuracy", self.val_accuracy)
        self.val_confusion.update(logits, y)

    def on_validation_epoch_end(self) -> None:
        self.confusions.append(self.val_confusion.compute().tolist())
        self.val_confusion.reset()

    def configure_optimizers(self) -> Any:
        loss = list(self.loss.parameters())
        others = [*self.blocks.parameters(), *self.head.parameters()]
        return torch.optim.SGD([{"params": others}, {"params": loss, "lr": 0.05}], lr=0.2, momentum=0.9)


class Notes(L.Callback):
    def __init__(self) -> None:
        self.epochs: list[Any] = []

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.epochs.append(plain(dict(trainer.callback_metrics)))


def whole_model(module: L.LightningModule, layout: Layout | None) -> dict[str, Tensor]:
    """Every parameter, on every rank."""
    weights = whole_weights(module)
    if layout is not None:
        parts: list[Any] = [None] * layout.world_size
        torch.distributed.all_gather_object(parts, weights)
        weights = {name: value for part in parts for name, value in part.items()}
    return weights


def recognize(layout: Layout | None, loss: str) -> Any:
    torch.manual_seed(7)
    module, notes = Recognizer(loss), Notes()
    make_trainer(layout, callbacks=[notes], max_epochs=3).fit(module, Data(num_train=24))
    return {"epochs": notes.epochs, "confusions": module.confusions, "weights": whole_model(module, layout)}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_module_with_parameters_beside_metrics(pool: WorkerPool, loss: str, layout: Layout) -> None:
    expected = check_on_every_rank(pool, recognize, layout, loss)
    torch.manual_seed(7)
    start = dict(Recognizer(loss).double().named_parameters())
    own = [name for name in expected["weights"] if name.startswith("loss.")]
    assert own and all(not torch.equal(expected["weights"][name], start[name]) for name in own)
    accuracies = [epoch["train_accuracy"] for epoch in expected["epochs"]]
    assert len(set(accuracies)) > 1 and 0 < accuracies[0] < 1
