"""Steps, hooks and optimizers as public code has them: each trains as on one device, or is refused with its reason."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from extra_steps import Step, fitted, in_layouts, together
from parity_run import Layout
from pipelined_fit import trainer
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, Metric, SumMetric

NUM_BATCHES = 3


# ---------------------------------------------------------------- as on one device


class MomentumEncoder(Step):
    """Its target is moved between the forward and the backward of one device."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(8, 8).requires_grad_(False)

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return (h - self.target(x)).square().mean()

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for mean, weight in zip(self.target.parameters(), self.blocks[0].parameters(), strict=True):
            mean.data = 0.9 * mean.data + 0.1 * weight.data


class ReadsGradients(Step):
    """Looks at gradients of the update before, at the moment when they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        grad = self.blocks[0].weight.grad
        self.seen.append(0.0 if grad is None or grad.is_meta else float(grad.shape[0]))


class FirstOfEachGroup(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert all(group["params"][0].dim() for group in self.param_groups)
        return super().step(closure)


class GroupsByLayer(Step):
    def configure_optimizers(self) -> Any:
        parts = [*self.blocks, self.head]
        groups = [{"params": part.parameters(), "lr": 0.1 / (1 + number)} for number, part in enumerate(parts)]
        optimizer = FirstOfEachGroup(groups, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class OwnAdam(torch.optim.Adam):
    """Of no class that is known."""


class ByOwnAdam(Step):
    def configure_optimizers(self) -> Any:
        return OwnAdam(self.parameters(), 1e-2)


class ByAdafactor(Step):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def _several(name: str, function: Callable[[Tensor], Tensor]) -> type[Step]:
    def extra(self: Step, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return 0.1 * function(h).mean()

    return type(name, (Step,), {"extra": extra})


SEVERAL = [
    _several("Max", lambda h: h.max(dim=1)[0]),
    _several("Min", lambda h: h.min(1).values),
    _several("Sort", lambda h: h.sort(dim=1)[0].square()),
    _several("TopK", lambda h: h.topk(3, dim=1)[0]),
    _several("Median", lambda h: h.median(dim=1)[0]),
    _several("KthValue", lambda h: h.kthvalue(2, dim=1)[0]),
    _several("AMinMax", lambda h: torch.aminmax(h, dim=1).max),
    _several("CumMax", lambda h: h.cummax(dim=1)[0]),
    _several("VarMean", lambda h: torch.var_mean(h, dim=1)[0]),
]


class SpectralNorm(Step):
    """By a parametrization, and by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.utils.parametrizations.spectral_norm(self.blocks[1])
        self.blocks[2] = nn.utils.spectral_norm(self.blocks[2])


class PerSample(Metric):
    """A sum over samples, divided by their number."""

    total: Tensor
    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("number", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, total: Tensor, number: int) -> None:
        self.total += total.detach()
        self.number += number

    def compute(self) -> Tensor:
        return self.total / self.number


class MetricsOfSums(Step):
    def __init__(self) -> None:
        super().__init__()
        self.per_sample, self.summed, self.mean_of_sums = PerSample(), SumMetric(), MeanMetric()

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        total = h.square().sum()
        self.per_sample(total, len(h))
        self.summed(total.detach())
        self.mean_of_sums(total.detach())
        self.log_dict({name: getattr(self, name) for name in LOGGED}, on_epoch=True, on_step=False)
        return total / len(h)


LOGGED = ("per_sample", "summed", "mean_of_sums")


class KeepsLists(Step):
    """Leaves what differs with the size of a microbatch, and reads none of it in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.last_size = 0
        self.seen: list[Any] = []

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> float:
        self.last_size = len(h)
        self.seen.append({"size": len(h), "worst": float(h.detach().abs().max())})
        return 0.0


class MaskOfFeatures(Step):
    """Seeds a generator and draws what is the same for all rows."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        drawn = torch.rand(8, generator=torch.Generator().manual_seed(batch_idx), dtype=h.dtype)
        return (h * (drawn > 0.3)).abs().mean()


class KeepsOutputs(Step):
    """A metric keeps outputs, and their value in the step, with their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = CatMetric()

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Any:
        self.kept(h.mean(1))
        return 0.0


AS_ONE_DEVICE = [
    MomentumEncoder, ReadsGradients, GroupsByLayer, ByOwnAdam, ByAdafactor,
    *SEVERAL, SpectralNorm, KeepsLists, MaskOfFeatures, KeepsOutputs
]  # fmt: skip


# ---------------------------------------------------------------- refused


class ClampsWeights(Step):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class SeedsAGenerator(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        generator = torch.Generator().manual_seed(batch_idx)
        return super().training_step((x + torch.randn(x.shape, generator=generator, dtype=x.dtype), y), batch_idx)


class SeedsAtItsEnd(Step):
    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        return (h * torch.rand(h.shape, generator=generator, dtype=h.dtype)).mean()


class SeedsTorch(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        torch.manual_seed(batch_idx)
        return super().training_step((x + torch.randn_like(x), y), batch_idx)


class OverAll(torch.optim.Optimizer):
    """Divides by the norm of all gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.add_(p.grad / (1 + norm), alpha=-0.1)
        return loss


class UpdatesOverAll(Step):
    def configure_optimizers(self) -> Any:
        return OverAll(self.parameters())


class SharpnessAware(torch.optim.SGD):
    """Takes the gradients of other weights, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in held]
        for p in held:
            p.add_(p.grad, alpha=0.01)
        loss = closure()
        for p, value in zip(held, before, strict=True):
            p.copy_(value)
        super().step()
        return loss


class EvaluatesAgain(Step):
    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters(), 0.1)


class Codebook(Step):
    """A mean that goes into the loss, and moves with each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.ones(8))

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        distance = (h - self.code.clone()).square().mean()
        self.code.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return distance


class CountsAndCouples(Step):
    """Moves a buffer, which does no harm, and takes a deviation over the batch, which does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        self.count.add_(1)
        return (h - h.std(0)).square().mean()


class CouplesBesideAMetric(Step):
    """A median of all samples that is only logged comes before the deviation over the batch that makes the loss."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        self.log("middle", h.detach().median())
        return (h - h.std(0)).square().mean()


class TwoViews(Step):
    """Joins two views of its samples in one tensor, which is as well for microbatches, and then compares all rows."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        rows = torch.cat([h, h.flip(1)])
        return torch.cdist(rows, rows).square().mean()


class MixesRows(Step):
    """Mixup with the rows in reverse order, by places that the step makes itself."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return (h - h[torch.arange(len(h)).flip(0)]).square().mean()


class ScaleThatMoves(Step):
    """An attribute that differs with the size of a microbatch, and that the next loss is made with."""

    scale = 1.0

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        loss = (self.scale * h).square().mean()
        self.scale = 0.9 * self.scale + 0.1 * float(h.detach().std())
        return loss


def logged(layout: Layout | None) -> list[float]:
    """In a worker: what the metrics are at the end."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 8, generator=generator, dtype=torch.float64)
    devices, strategy = (1, "auto") if layout is None else (layout.world_size, layout.strategy())
    run = trainer(devices, strategy, precision="64-true")
    run.fit(MetricsOfSums(), DataLoader(TensorDataset(x, x.sum(-1).tanh()), batch_size=8))
    return [float(run.callback_metrics[name]) for name in LOGGED]


def test_metrics_of_sums_and_counts(pool: WorkerPool) -> None:
    expected = pool.run(logged, None, world_size=1)[0]
    for found in pool.run(logged, Layout("zb_h1", 2, num_microbatches=4), world_size=2):
        assert found == pytest.approx(expected, rel=1e-6)  # states are float32


class LoadsACopy(Step):
    """Puts back a whole copy of its first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["copy"] = {name: value.clone() for name, value in self.state_dict().items()}

    def on_train_batch_end(self, *_: Any) -> None:
        self.load_state_dict(self.__dict__["copy"])


REFUSED = [
    (LoadsACopy, r"reported_steps.py:\d+ in on_train_batch_end loads a state_dict with 10 names.* [46] of these names"),
    (ClampsWeights, r"on_before_zero_grad of ClampsWeights writes into parameters that train"),
    (SeedsAGenerator, r"reported_steps.py:\d+ in training_step draws the same random numbers for every microbatch"),
    (SeedsAtItsEnd, r"test_reported_steps.py:\d+ in extra draws the same random numbers for every microbatch"),
    (SeedsTorch, r"test_reported_steps.py:\d+ in training_step draws the same random numbers for every microbatch"),
    (EvaluatesAgain, "SharpnessAware.step calls its closure several times"),
    (UpdatesOverAll, "OverAll combines parameters in an update"),
    (Codebook, r"leaves a tensor in self.code, and the next step uses it, at .*extra.*num_microbatches=1"),
    (CountsAndCouples, r"The samples are coupled in .*test_reported_steps.py:\d+ in extra by `std`"),
    (CouplesBesideAMetric, r"The loss .*are coupled in .*test_reported_steps.py:\d+ in extra by `std`.*whole_batch"),
    (TwoViews, r"The samples are coupled in .*test_reported_steps.py:\d+ in extra by `cdist`.*whole_batch_loss=True"),
    (MixesRows, r"The samples are coupled in .*test_reported_steps.py:\d+ in extra by `__getitem__`"),
    (ScaleThatMoves, r"The attribute 'scale' that training_step changes .* depends on how the batch is cut"),
]  # fmt: skip


def train_all(layout: Layout | None, is_each_alone: bool) -> list[list[float]]:
    """In a worker: the losses of each module."""
    kinds = AS_ONE_DEVICE if is_each_alone else together(AS_ONE_DEVICE)
    return [fitted(kind, layout, NUM_BATCHES)[0] for kind in kinds]


@in_layouts
def test_as_on_one_device(pool: WorkerPool, layout: Layout, is_each_alone: bool) -> None:
    expected = pool.run(train_all, None, is_each_alone, world_size=1, timeout=120)[0]
    for found in pool.run(train_all, layout, is_each_alone, world_size=layout.world_size, timeout=280):
        for number, (losses, alone) in enumerate(zip(found, expected, strict=True)):
            assert losses == pytest.approx(alone, rel=1e-9), number


def fit(kind: type[Step], layout: Layout) -> None:
    fitted(kind, layout, NUM_BATCHES)


@pytest.mark.by_day(5)
@pytest.mark.parametrize("kind", range(len(REFUSED)), ids=[kind.__name__ for kind, _ in REFUSED])
def test_refused_by_the_line(pool: WorkerPool, kind: int) -> None:
    layout = Layout("zb_h1", 2, num_microbatches=4)
    told = pool.refusals(None, fit, REFUSED[kind][0], layout, world_size=2)
    assert len(told) == 2 and any(re.search(REFUSED[kind][1], text) for text in told), told


class CountsSteps(Step):
    """Counts in buffers that nothing reads: how often it ran, and the samples that it has seen; as on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(8))

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Any:
        self.count += 1
        self.seen += x.sum(0).to(self.seen.dtype)
        return 0.0


class Counting(nn.Linear):
    """Counts its calls, and scales nothing by it."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class CountsInItsFirstUnit(Step):
    """The same in a unit of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Counting()


def warned(kind: type[Step], layout: Layout) -> list[str]:
    """In a worker: what is warned of while it trains."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = trainer(layout.world_size, layout.strategy())
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(16, 8, generator=generator)
        run.fit(kind(), DataLoader(TensorDataset(x, x.sum(-1)), batch_size=8))
    return [str(each.message) for each in told]


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("kind", "name"), [(KeepsLists, "last_size"), (CountsSteps, None), (CountsInItsFirstUnit, "blocks.0.calls")]
)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_reaches_nothing_is_told_once(
    pool: WorkerPool, kind: type[Step], name: str | None, num_stages: int
) -> None:
    layout = Layout("zb_h1", num_stages, num_microbatches=4)
    found = pool.run(warned, kind, layout, world_size=num_stages)
    told = [text for text in found[0] if "has another value after microbatches" in text]
    # that a size does not add up shows in the second batch, when it is not 0 before
    assert sum(f"{name!r}" in text for text in told) == (name is not None) and all(
        "extra_steps.py" in text for text in told
    ), found[0]


class ByTask(Step):
    """Has a head for each of two tasks, and every replica another task in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        replica: Any = getattr(self.trainer.strategy, "data_parallel_rank", 0)
        return self.heads[(replica + batch_idx) % 2](h).square().mean()


def train_by_task(sharding: str) -> list[float]:
    """In a worker: the losses of this replica."""
    layout = Layout("zb_h1", 2, replicas=2, num_microbatches=2)
    return fitted(ByTask, layout, num_batches=8, batch_size=4, sharding=sharding)[0]


@pytest.mark.nightly
def test_replicas_that_call_other_units_gather_in_one_order(pool: WorkerPool) -> None:
    expected = pool.run(train_by_task, "replicate", world_size=4, timeout=120)
    for sharding in ("shard_grad_op", "full_shard"):
        found = pool.run(train_by_task, sharding, world_size=4, timeout=120)
        for losses, of_replicated in zip(found, expected, strict=True):
            assert losses == pytest.approx(of_replicated, rel=1e-9), sharding


class DecodesInValidation(Step):
    """Goes on until its output says stop, which made-up data never say."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        h = batch[0]
        while not bool((h > 1e6).any()):
            for block in self.blocks:
                h = block(h)


def decode() -> None:
    x = torch.randn(16, 8)
    data = DataLoader(TensorDataset(x, x.sum(-1)), batch_size=8)
    trainer(2, Layout("1f1b", 2, num_microbatches=2).strategy()).fit(DecodesInValidation(), data, data)


def test_a_dry_run_that_does_not_end_is_refused(pool: WorkerPool) -> None:
    told = pool.refusals(None, decode, world_size=2, timeout=120)
    assert len(told) == 2 and any("did not end" in text and "501 calls" in text for text in told), told
