"""Several optimizers as one: updates, schedules and checkpoints as of the optimizers by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from feature_parts import Data, make, make_unchecked_trainer
from parity_run import Layout, whole_weights
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor, nn

from lightning_pp import CombinedOptimizer
from lightning_pp.errors import ConfigurationError


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = list(module.named_parameters())
    inner = [p for name, p in named if name in ("layers.2.weight", "layers.4.weight")]
    return inner, [p for _, p in named if not any(p is each for each in inner)]


class Combined(Classifier):
    """Inner matrices by one optimizer, all else by AdamW; one schedule over both."""

    def __init__(self, first: str = "sgd") -> None:
        super().__init__()
        self.first = first

    def configure_optimizers(self) -> Any:
        matrices, others = split_parameters(self)
        optimizer = CombinedOptimizer(*made_of(self.first, matrices, others))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Orthogonalized(torch.optim.Optimizer):
    """The update of Muon, with its iterations in the dtype of the parameter, and without momentum."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                x = parameter.grad / parameter.grad.norm()
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                parameter.add_(x, alpha=-group["lr"])


def made_of(first: str, matrices: list[nn.Parameter], others: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    adam = torch.optim.AdamW(others, lr=0.01)
    if first == "muon":
        return [torch.optim.Muon(matrices, lr=0.1), adam]
    if first == "orthogonalized":
        return [Orthogonalized(matrices, lr=0.1), adam]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), adam]


def by_hand(first: str, num_epochs: int) -> dict[str, Tensor]:
    """Both optimizers stepped one after the other, each with a schedule, without the class and without Lightning."""
    module = make(Combined, first=first).double()
    optimizers = made_of(first, *split_parameters(module))
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in optimizers]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (24,), generator=generator)
    for _ in range(num_epochs):
        for rows in range(0, 24, 8):
            module.zero_grad()
            nn.functional.cross_entropy(module(x[rows : rows + 8]), y[rows : rows + 8]).backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
    return whole_weights(module)


def strategy_of(layout: Layout, sharding: str, folder: bool) -> Any:
    return layout.strategy(check_first_batches=False, sharding=sharding, save_distributed_checkpoint=folder)


def trainer_of(layout: Layout | None, sharding: str, num_epochs: int, folder: bool = False) -> L.Trainer:
    if layout is None:
        return make_unchecked_trainer(None, max_epochs=num_epochs)
    strategy = strategy_of(layout, sharding, folder)
    return make_unchecked_trainer(None, devices=layout.world_size, strategy=strategy, max_epochs=num_epochs)


def held(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in whole_weights(module).items() if value.device.type == "cpu"}


def train(layout: Layout | None, first: str, sharding: str, path: Path | None = None, resumes: bool = False) -> Any:
    """In a worker: one epoch, saved at ``path``, or both, or the second from there on."""
    module = make(Combined, first=first)
    trainer = trainer_of(layout, sharding, 1 if path is not None and not resumes else 2, folder=path is not None)
    trainer.fit(module, datamodule=Data(num_train=24), ckpt_path=path if resumes else None)
    if path is not None and not resumes:
        trainer.save_checkpoint(path)
    return held(module)


def assert_as_by_hand(found: list[dict[str, Tensor]], expected: dict[str, Tensor], tolerance: float) -> None:
    seen: set[str] = set()
    for weights in found:
        for name, value in weights.items():
            torch.testing.assert_close(
                value, expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
            seen.add(name)
    assert seen == set(expected)


PIPELINE, SHARDED = Layout("zb_h1", 2, num_microbatches=4), Layout("zb_v", 2, replicas=2, num_microbatches=4)


@pytest.mark.by_day(3)
@pytest.mark.parametrize(
    ("layout", "sharding", "first"),
    [
        (None, "replicate", "muon"),
        (PIPELINE, "replicate", "sgd"),
        (PIPELINE, "replicate", "muon"),
        (SHARDED, "full_shard", "sgd"),
        (SHARDED, "full_shard", "orthogonalized"),
        pytest.param(SHARDED, "shard_grad_op", "orthogonalized", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_as_the_optimizers_by_themselves(pool: WorkerPool, layout: Layout | None, sharding: str, first: str) -> None:
    size = 1 if layout is None else layout.world_size
    found = pool.run(train, layout, first, sharding, world_size=size, timeout=120)
    # Muon's iterations are in bfloat16: a gradient that differs in its last bit may move an update by a 256th
    assert_as_by_hand(found, by_hand(first, 2), 2e-3 if first == "muon" else 1e-9)


def test_resumed_under_another_layout(pool: WorkerPool, tmp_path: Path) -> None:
    saved, other = Layout("zb_h1", 2, replicas=2, num_microbatches=2), Layout("1f1b", 2, num_microbatches=4)
    path = tmp_path / "one.ckpt"
    pool.run(train, saved, "sgd", "full_shard", path, world_size=4, timeout=120)
    found = pool.run(train, other, "sgd", "replicate", path, True, world_size=2, timeout=120)
    assert_as_by_hand(found, by_hand("sgd", 2), 1e-9)


def test_what_cannot_be_combined() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigurationError, match=r"SGD, AdamW: some parameters appear in more than one"):
        CombinedOptimizer(torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([weight]))
    with pytest.raises(ConfigurationError, match="Give it at least one"):
        CombinedOptimizer()
