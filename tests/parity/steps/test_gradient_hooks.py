"""Hooks on parameters: called once for a batch, with the gradient that one device has."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from feature_parts import Data, check_on_every_rank, make, make_unchecked_trainer, plain
from parity_run import Layout, whole_weights
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor, nn

from lightning_pp.errors import ConfigurationError


class Calls:
    """Hooks that count their calls. Torch never frees a module of which a hook after accumulation is a method."""

    number = 0

    def count(self, gradient: Tensor) -> None:
        self.number += 1

    def shrink(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.number += 1
        parameter.grad.div_(1 + parameter.grad.norm())


class Hooked(Classifier):
    """Each parameter has two hooks, of which the first is not linear, and one that sees the accumulated gradient."""

    def __init__(self, kind: str, when: str) -> None:
        super().__init__()
        self.kind, self.when, self.calls = kind, when, Calls()
        if when == "when built":
            self.add_hooks()

    def on_fit_start(self) -> None:
        if self.when == "at the start":
            self.add_hooks()

    def add_hooks(self) -> None:
        for parameter in self.parameters():
            if self.kind == "accumulated":
                parameter.register_post_accumulate_grad_hook(self.calls.shrink)
            else:
                parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
                parameter.register_hook(self.calls.count)


def trained(layout: Layout | None, kind: str, when: str, accumulated: int) -> Any:
    """In a worker: losses, and whether each hook of this rank ran once in each of six batches."""
    module = make(Hooked, kind=kind, when=when)
    trainer = make_unchecked_trainer(layout, accumulate_grad_batches=accumulated, check_val_every_n_epoch=3)
    trainer.fit(module, datamodule=Data(num_train=24))
    ran_once = module.calls.number == 6 * sum(parameter.device.type == "cpu" for parameter in module.parameters())
    trainer.validate(module, datamodule=Data(), verbose=False)
    return plain(dict(trainer.callback_metrics)), ran_once


ALL = list(product(("gradient", "accumulated"), ("when built", "at the start"), (1, 3)))
PAIRS = [ALL[0], ALL[3], ALL[5], ALL[6]]  # each two values together


def of_all_kinds(layout: Layout | None, kinds: list[tuple[str, str, int]]) -> Any:
    return [trained(layout, *kind) for kind in kinds]


@pytest.mark.parametrize("kinds", [PAIRS, pytest.param(ALL, marks=pytest.mark.nightly)], ids=["pairs", "all"])
def test_as_on_one_device(pool: WorkerPool, kinds: list[tuple[str, str, int]]) -> None:
    found = check_on_every_rank(pool, of_all_kinds, Layout("zb_h1", 2, num_microbatches=4), kinds)
    assert all(ran_once for _, ran_once in found)


def of_replicas(layout: Layout) -> dict[str, Tensor]:
    module = make(Hooked, kind="gradient", when="when built")
    strategy = layout.strategy(check_first_batches=False, sharding="replicate")
    make_unchecked_trainer(None, devices=4, strategy=strategy, max_epochs=1).fit(module, datamodule=Data(num_train=24))
    return {name: value for name, value in whole_weights(module).items() if value.device.type == "cpu"}


def by_hand() -> dict[str, Tensor]:
    """The mean over two replicas of what each one's hooks leave, as DistributedDataParallel has it."""
    module = make(Classifier).double()
    optimizer = module.configure_optimizers()
    x = torch.randn(24, 6, generator=(generator := torch.Generator().manual_seed(1)), dtype=torch.float64)
    y = torch.randint(0, 3, (24,), generator=generator)
    for batch in range(3):
        sums = [torch.zeros_like(parameter) for parameter in module.parameters()]
        for replica in range(2):
            rows = slice(8 * batch + replica, 8 * batch + 8, 2)
            loss = nn.functional.cross_entropy(module(x[rows]), y[rows])
            for each, gradient in zip(sums, torch.autograd.grad(loss, list(module.parameters())), strict=True):
                each.add_(gradient.clamp(-0.05, 0.05) / 2)
        for parameter, gradient in zip(module.parameters(), sums, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return dict(module.named_parameters())


def test_each_replica_runs_them_before_the_mean(pool: WorkerPool) -> None:
    layout = Layout("zb_h1", 2, replicas=2, num_microbatches=2)
    expected, held = by_hand(), set()
    for weights in pool.run(of_replicas, layout, world_size=4, timeout=120):
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
            held.add(name)
    assert held == set(expected)


class HooksInTheStep(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.layers[6].weight.register_hook(lambda gradient: None)
        return loss


class HooksInAUnit(Classifier):
    """A unit adds a hook in each of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Hooking(6, 10)


class Hooking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight.requires_grad:
            self.weight.register_hook(lambda gradient: None)
        return super().forward(x)


class TiedHooks(Hooked):
    """Two stages share a weight."""

    def __init__(self, kind: str, when: str) -> None:
        super().__init__(kind, "")
        self.layers[4].weight = self.layers[2].weight
        self.add_hooks()


def refusal(layout: Layout, module: type[Classifier], kwargs: dict[str, Any], sharding: str) -> str:
    """In a worker: how the training ended, which has updated nothing."""
    strategy = layout.strategy(check_first_batches=False, sharding=sharding, split_points=["layers.4"])
    trainer = make_unchecked_trainer(None, devices=layout.world_size, strategy=strategy)
    built = make(module, **kwargs)
    with pytest.raises((ConfigurationError, RuntimeError)) as caught:
        trainer.fit(built, datamodule=Data(num_train=24))
    assert trainer.global_step == 0
    return str(caught.value)


@pytest.mark.by_day(3)
@pytest.mark.parametrize(
    ("module", "when", "sharding", "words"),
    [
        (Hooked, "when built", "full_shard", "gathered from shards"),
        (Hooked, "at the start", "full_shard", "gathered from shards"),
        (TiedHooks, "", "replicate", "belongs to several stages"),
        (HooksInTheStep, None, "replicate", "puts a hook on the gradient of a parameter"),
        (HooksInAUnit, None, "replicate", "puts a hook on the gradient of a parameter"),
    ],
)
def test_what_cannot_have_hooks_is_refused_before_the_update(
    pool: WorkerPool, module: type[Classifier], when: str | None, sharding: str, words: str
) -> None:
    layout = Layout("1f1b", 2, replicas=1 if sharding == "replicate" else 2, num_microbatches=2)
    kwargs = {} if when is None else {"kind": "gradient", "when": when}
    found = pool.run(refusal, layout, module, kwargs, sharding, world_size=layout.world_size)
    told = [text for text in found if words in text]
    assert told, found
    for text in told:
        assert "test_gradient_hooks.py:" in text and ("on_before_optimizer_step" in text or "on_fit_start" in text)
