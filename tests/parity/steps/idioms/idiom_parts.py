"""A small token classifier whose step is one of many ways to write it, its data, and a run of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from feature_parts import make_trainer, plain
from idiom_steps import CLASSES, IGNORED, LENGTH, STEPS, WIDTH
from parity_run import Layout, whole_weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

NUM_SAMPLES = 14


class Tokens(Dataset[Any]):
    """Token sequences: targets, labels of which an uneven part is ignored, masks, weights, soft targets."""

    def __init__(self, num_samples: int = NUM_SAMPLES, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_samples, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        self.target = torch.randint(0, CLASSES, (num_samples, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (num_samples,), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).double()
        self.mask[:, -1] = 0  # the complement is not empty either
        self.label = torch.where(self.mask.bool(), self.target, IGNORED)
        self.weight = torch.rand(num_samples, generator=generator, dtype=torch.float64) + 0.1
        self.soft = torch.rand(num_samples, LENGTH, CLASSES, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        names = ("x", "target", "mask", "label", "weight", "soft")
        return {name: getattr(self, name)[index] for name in names}


class CalledOnce:
    """A module that is called once for several steps on the same batch."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.logits: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        self.logits = self.module(x) if self.logits is None else self.logits
        return self.logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class TokenClassifier(L.LightningModule):
    """A stack of blocks under a step of :data:`STEPS`.

    Args:
        step: Its name; the losses of several, with ``+`` between their names, are added up.
    """

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step
        self.embed = nn.Linear(WIDTH, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, *others = self.step.split("+")
        module = CalledOnce(self) if others else self
        output = STEPS[first](module, batch)
        for name in others:
            output = output + STEPS[name](module, batch)
        self.log("train_loss", output["loss"] if isinstance(output, dict) else output)
        return output

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        placement = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        data = Tokens()
        sampler = DistributedSampler(data, shuffle=False, **placement)
        return DataLoader(data, batch_size=8 // placement["num_replicas"], sampler=sampler)


class Notes(L.Callback):
    """What every batch returned and logged."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append({"outputs": plain(dict(outputs)), "logged": plain(dict(trainer.callback_metrics))})


def run_idiom(
    layout: Layout | None, step: str, make: Callable[..., L.LightningModule] = TokenClassifier, **kwargs: Any
) -> dict[str, Any]:
    """Trains for an epoch; what came of every batch, and the weights."""
    import idiom_refusals  # noqa: F401  # its steps are used by name

    torch.manual_seed(5)
    module = make(step)
    notes = Notes()
    trainer = make_trainer(layout, max_epochs=1, callbacks=[notes], **kwargs)
    trainer.fit(module)
    return {"batches": notes.batches, "weights": whole_weights(module)}
