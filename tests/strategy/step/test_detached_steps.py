"""Steps that cut gradients off in some batches, with the same units and shapes: trained as on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from parity_run import Layout
from pool import WorkerError, WorkerPool
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


BATCHES_SEEN = [0]


class Unseen(Detaching):
    """By what nothing of this package sees."""

    def cuts(self, batch: Any) -> bool:
        return BATCHES_SEEN[0] < 3

    def on_train_batch_end(self, *_: Any) -> None:
        BATCHES_SEEN[0] += 1


class UnseenWithoutGrad(Unseen):
    def features(self, h: Tensor, *, cuts: bool) -> Tensor:
        with torch.no_grad() if cuts else nullcontext():
            return super().features(h, cuts=False)


class UnseenBeside(Unseen):
    """One of two ways to the loss is cut off at first."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h, early = batch["x"], self.blocks[0](batch["x"])
        for block in self.blocks[1:]:
            h = h + torch.tanh(block(h))
        early = early.detach() if self.cuts(batch) else early
        return nn.functional.mse_loss(self.head(h).squeeze(-1), batch["y"]) + 0.1 * (early * h).mean()


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


UNSEEN = [Unseen, UnseenWithoutGrad, UnseenBeside]


def whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()


def train(
    layout: Layout | None, kinds: Sequence[type[Detaching]] = KINDS, strategy: Mapping[str, Any] = {}
) -> list[tuple[list[float], dict[str, Tensor]]]:
    """In a worker: for each kind of module the losses, and the weights that the rank holds."""
    runs = []
    for kind in kinds:
        module, losses = kind(), Losses()
        BATCHES_SEEN[0] = 0
        options: dict[str, Any] = {"precision": "64-true", "callbacks": [losses], "limit_train_batches": 4}
        run = (
            trainer(1, "auto", **options)
            if layout is None
            else trainer(layout.world_size, layout.strategy(**strategy), **options)
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
    kinds = [kind for kind in KINDS if kind is not ByValue or layout.replicas == 1]
    expected = pool.run(train, alone if layout.replicas > 1 else None, kinds, world_size=layout.replicas, timeout=120)
    found = pool.run(train, layout, kinds, world_size=layout.world_size, timeout=280)
    for number, kind in enumerate(kinds):
        held: dict[str, Tensor] = {}
        for rank, of_rank in enumerate(found):
            losses, _ = expected[rank % layout.replicas][number]
            assert of_rank[number][0] == pytest.approx(losses, rel=1e-9), kind.__name__
            held |= of_rank[number][1]
        for name, weight in expected[0][number][1].items():
            torch.testing.assert_close(held[name], weight, rtol=1e-9, atol=1e-12, msg=f"{kind.__name__}: {name}")


TWO = Layout("1f1b", 2, num_microbatches=2)


@pytest.mark.parametrize("kind", UNSEEN)
def test_a_gradient_that_no_recording_has_seen_ends_the_run(pool: WorkerPool, kind: type[Detaching]) -> None:
    with pytest.raises(WorkerError, match=r"In the recorded step it (did not|had none).*dynamic_step=True"):
        pool.run(train, TWO, [kind], world_size=2, timeout=120)


def test_replicas_that_decide_apart_end_the_run(pool: WorkerPool) -> None:
    """The last stage decides by all() over the samples of both replicas, the stage before by its own."""
    layout = Layout("1f1b", 2, replicas=2, num_microbatches=2)
    with pytest.raises(
        WorkerError, match=r"has a gradient for result .*Choose inside a unit if .* any\(\) over samples decides"
    ):
        pool.run(train, layout, [ByValue], world_size=4, timeout=120)


def test_a_dynamic_step_may_detach_by_anything(pool: WorkerPool) -> None:
    expected = pool.run(train, None, UNSEEN, world_size=1, timeout=120)[0]
    found = pool.run(train, TWO, UNSEEN, {"dynamic_step": True}, world_size=2, timeout=120)
    for number, (losses, weights) in enumerate(expected):
        held = found[0][number][1] | found[1][number][1]
        assert found[0][number][0] == pytest.approx(losses, rel=1e-9), UNSEEN[number].__name__
        torch.testing.assert_close({name: held[name] for name in weights}, weights, rtol=1e-9, atol=1e-12)
