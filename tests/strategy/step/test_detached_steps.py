"""Steps that cut gradients off in some batches, with the same units and shapes: trained as on one device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from parity_run import Layout
from pool import WorkerPool
from test_changing_steps import Changing, Losses, batches, trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Detaching(Changing):
    """Detaches what its first two blocks give where :meth:`cuts` says so; moved by momentum, so None is not zeros."""

    def cuts(self, batch: Any) -> bool:
        raise NotImplementedError

    def features(self, h: Tensor, *, cuts: bool) -> Tensor:
        for block in self.blocks[:2]:
            h = h + torch.tanh(block(h))
        return h.detach() if cuts else h

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.features(batch["x"], cuts=self.cuts(batch))
        for block in self.blocks[2:]:
            h = h + torch.tanh(block(h))
        return nn.functional.mse_loss(self.head(h).squeeze(-1), batch["y"])

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=0.1)


class AtFirst(Detaching):
    def cuts(self, batch: Any) -> bool:
        return self.global_step < 2


class Later(Detaching):
    def cuts(self, batch: Any) -> bool:
        return self.global_step >= 2


class ByAttribute(Detaching):
    def cuts(self, batch: Any) -> bool:
        return self.count < 2


class ByValue(Detaching):
    def cuts(self, batch: Any) -> bool:
        return bool((batch["number"] < 2).all())


class WithoutGradAtFirst(AtFirst):
    def features(self, h: Tensor, *, cuts: bool) -> Tensor:
        with torch.no_grad() if cuts else nullcontext():
            return super().features(h, cuts=False)


class BesideTheLoss(Detaching):
    """Cuts off one of two ways to the loss, after the last unit."""

    def cuts(self, batch: Any) -> bool:
        return self.global_step % 3 == 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = early = self.features(batch["x"], cuts=False)
        for block in self.blocks[2:]:
            h = h + torch.tanh(block(h))
        beside = early.square().mean()
        beside = beside.detach() if self.cuts(batch) else beside
        return nn.functional.mse_loss(self.head(h).squeeze(-1), batch["y"]) + 0.1 * beside


KINDS = [AtFirst, Later, ByAttribute, ByValue, WithoutGradAtFirst, BesideTheLoss]


def whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()


def train(layout: Layout | None) -> list[tuple[list[float], dict[str, Tensor]]]:
    """In a worker: for each kind of module the losses, and the weights that the rank holds."""
    runs = []
    for kind in KINDS:
        module, losses = kind(), Losses()
        options: dict[str, Any] = {"precision": "64-true", "callbacks": [losses], "limit_train_batches": 5}
        run = (
            trainer(1, "auto", **options)
            if layout is None
            else trainer(layout.world_size, layout.strategy(), **options)
        )
        run.fit(module, batches(with_text=False))
        runs.append((losses.found, {name: whole(weight).clone() for name, weight in module.named_parameters()}))
    return runs


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "layout",
    [
        Layout("1f1b", 2, num_microbatches=2),
        Layout("zb_h1", 3, num_microbatches=2),
        Layout("zb_v", 2, num_microbatches=2),
        pytest.param(Layout("1f1b", 2, replicas=2, num_microbatches=2), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_gradients_flow_as_on_one_device(pool: WorkerPool, layout: Layout) -> None:
    alone = Layout("1f1b", 1, replicas=layout.replicas, num_microbatches=1)
    expected = pool.run(train, alone if layout.replicas > 1 else None, world_size=layout.replicas, timeout=120)
    found = pool.run(train, layout, world_size=layout.world_size, timeout=280)
    for number, kind in enumerate(KINDS):
        if kind is ByValue and layout.replicas > 1:
            continue  # a replica's batch holds samples of both kinds, and is decided on by microbatch
        held: dict[str, Tensor] = {}
        for rank, of_rank in enumerate(found):
            losses, _ = expected[rank % layout.replicas][number]
            assert of_rank[number][0] == pytest.approx(losses, rel=1e-9), kind.__name__
            held |= of_rank[number][1]
        for name, weight in expected[0][number][1].items():
            torch.testing.assert_close(held[name], weight, rtol=1e-9, atol=1e-12, msg=f"{kind.__name__}: {name}")
