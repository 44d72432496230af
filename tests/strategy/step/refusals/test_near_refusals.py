"""Near each step that a pipeline refuses, one that it must not refuse: it trains as on one device.

The refused neighbour of each stands in its docstring; the tests of refusals themselves are beside this file.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from extra_steps import Step, fitted, in_layouts, together
from parity_run import Layout
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NUM_BATCHES = 3


# ---------------------------------------------------------------- samples that are coupled, losses that are no mean


class Centered(Step):
    """Subtracts a mean over features; a mean over samples couples them."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return (h - h.mean(1, keepdim=True)).square().mean()


class RootOfEach(Step):
    """The mean of roots; the root of a mean is refused."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return (h.square().mean(1) + 1e-3).sqrt().mean()


class MultipliesByTranspose(Step):
    """A product with a transposed matrix of weights; one with the transposed samples couples them."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return (h @ self.head.weight.T).square().mean()


class StatisticOfWeights(Step):
    """The deviation of a weight; that of the samples couples them."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return 0.1 * self.head.weight.std() + self.head.weight.square().sum().sqrt()


class OfEachSample(Step):
    """Functions that couple samples along the batch, along the features."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        halves = h.view(len(h), 2, 4)
        numbers = (
            *(h.var(1), h.amax(1), h.topk(2, 1).values, h.sort(1).values[:, 0], h.median(1).values, h.norm(dim=1)),
            *(h.quantile(0.5, dim=1), h.prod(1), h.logsumexp(1), h.cumsum(1), nn.functional.normalize(h, dim=1)),
            *(torch.cdist(halves, halves), halves @ halves.mT, nn.functional.cosine_similarity(h, x, dim=1)),
        )
        total: Tensor = sum(each.mean() for each in numbers)
        return total


class PenaltyOnWeights(Step):
    """Roots and products of weights of all stages."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        weight = self.blocks[0].weight
        apart = (weight.T @ weight - torch.eye(8, dtype=weight.dtype)).norm()
        return 0.1 * apart + 1e-2 * sum(parameter.square().sum() for parameter in self.parameters())


class GradientOfASum(Step):
    """The gradient of a sum for each sample; that of a mean would depend on the number of samples."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        with torch.enable_grad():
            inputs = h.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(inputs.sin().sum(), inputs)
        return (gradient * h).mean() + (gradient.norm(dim=1) - 1).square().mean()


class WeightedClasses(Step):
    """Losses that divide by weights of classes, or leave samples out."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        target, weight = x.argmax(1), torch.linspace(0.5, 2, 8, dtype=h.dtype)
        loss = nn.functional.cross_entropy(h, target, weight=weight, ignore_index=3)
        return loss + nn.functional.kl_div(h.log_softmax(1), x.softmax(1), reduction="batchmean")


class LossOfOneElement(Step):
    """A loss of shape (1,); one of several numbers is refused."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).reshape(1)


class SkipsBatches(Step):
    """Returns None for a whole batch; None for some microbatches is refused."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


# ---------------------------------------------------------------- random numbers


class SeedsForFeatures(Step):
    """Draws a number for each feature from a generator that it seeds; numbers for each row would repeat."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch_idx)
        return (h * torch.rand(h.shape[1], generator=generator, dtype=h.dtype)).mean()


class SeedsForWeights(Step):
    """The same with the shape of a weight, whose first dimension is as long as the batch."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch_idx)
        return (h @ torch.rand(8, 8, generator=generator, dtype=h.dtype)).mean()


# ---------------------------------------------------------------- buffers, attributes and state


class ReadsABuffer(Step):
    """Reads a buffer that a hook moves; one that each microbatch moves and reads is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(8))

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return (h - self.level).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.level.lerp_(batch[0].mean(0).to(self.level.dtype), 0.5)


class ReplacesABuffer(ReadsABuffer):
    """Replaces a buffer in a hook; in the step, where the next step reads it, that is refused."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.level = 0.5 * self.level + 0.5 * batch[0].mean(0)


class SetsABuffer(Step):
    """Sets a buffer by the number of the step, the same in each microbatch, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        self.temperature.fill_(1 + 0.1 * self.trainer.global_step)
        return (h / self.temperature).square().mean()


class KeepsFeatures(Step):
    """Keeps a tensor that no other step reads; one that the next step reads is refused."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Any:
        self.last = h.detach()
        return 0.0


class QueueInAHook(Step):
    """A queue that a hook fills; the step that fills and reads it is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, 8))

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return (h @ self.queue.T).logsumexp(1).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.queue.copy_(torch.cat([batch[0], self.queue[:-8]]))


class MakesAnAttribute(Step):
    """Makes a tensor when the first step runs; parameters that come then are refused."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        if not hasattr(self, "scales"):
            self.scales = torch.linspace(0, 1, 8, dtype=h.dtype)
        return (h * self.scales).mean()


# ---------------------------------------------------------------- values between units


class HookOnTheOutput(Step):
    """A hook on the gradient of what is made of the last unit's output; on a value between units it is refused."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = x
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        out = self.head(h).squeeze(-1)
        if out.requires_grad:
            out.register_hook(lambda gradient: 2 * gradient)
        return nn.functional.mse_loss(out, y)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return 2 * h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class FunctionBetweenUnits(Step):
    """A torch.autograd.Function between units; one that calls a unit is refused."""

    def called(self, number: int, block: nn.Module, h: Tensor) -> Any:
        return block(Doubled.apply(h))


class VmapBetweenUnits(Step):
    """torch.func.vmap of a function without units; of a unit it is refused."""

    def called(self, number: int, block: nn.Module, h: Tensor) -> Any:
        return block(torch.func.vmap(lambda row: row / (1 + row.square().sum()))(h))


class CallsAsOftenAsAlways(Step):
    """Calls a block a fixed number of times; as often as its output says is refused."""

    def called(self, number: int, block: nn.Module, h: Tensor) -> Any:
        return block(block(block(h)))


class CheckpointsAlike(Step):
    """A checkpointed function that calls its unit again alike; otherwise it is refused."""

    def called(self, number: int, block: nn.Module, h: Tensor) -> Any:
        return checkpoint(lambda value: block(torch.sin(value)), h, use_reentrant=False)


class BranchesByStep(Step):
    """Adds up samples in another branch from a step on; a branch that data decide is refused."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return h.square().sum() / 64 if self.trainer.global_step >= 2 else h.abs().mean()


class SetsItsRate(Step):
    """Sets the learning rate by the number of the step; one that changes it by a factor is refused."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Any:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = 0.05 / (1 + self.global_step)
        return 0.0


class LogsANumber(Step):
    """Reads a number after the last unit for a log; of a value that other units go on with it cannot."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        loss = h.square().mean()
        self.log("extra", loss.item())
        return loss


class HookOnTheLoss(Step):
    """A hook on the gradient of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: 3 * gradient)
        return loss


class CallsTwice(Step):
    """Calls a unit twice before the next; calling it again after units of a later stage is refused."""

    def called(self, number: int, block: nn.Module, h: Tensor) -> Any:
        return block(h) + block(h.flip(1))


class SumOfATensor(Step):
    """Adds a tensor that a unit's output sums to; its ``item()`` on another stage is refused."""

    def called(self, number: int, block: nn.Module, h: Tensor) -> Any:
        out = block(h)
        return out + 0.01 * out.sum(1, keepdim=True)


class SelectsByTheBatch(Step):
    """Selects rows by values of the batch; by values of a unit's output the shape would depend on weights."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return h[x[:, 0] > 0].square().sum() / h.shape[1]


class KeepsItsOutput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(super().forward(x))  # type: ignore[operator]
        return self.kept[-1]  # type: ignore[index]


class LeavesAnOutput(Step):
    """A unit of the first stage adds its output to a list of its own; to a global list is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = KeepsItsOutput(8, 8)
        self.blocks[0].kept = []

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Any:
        return 0.1 * self.blocks[0].kept.pop().square().mean()  # type: ignore[union-attr, operator]


class FreezesBetweenBatches(Step):
    """Freezes a block before the second batch; before a later one of an epoch it is refused."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.blocks[1].requires_grad_(False)


class ReadsAWeight(Step):
    """Looks at a weight's shape and names in the step; at its values, on another stage, is refused."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Any:
        return 0.1 * h.square().mean() * self.blocks[0].weight.shape[0] / self.head.weight.numel()


# ---------------------------------------------------------------- batches and optimizers


class WritesItsBatch(Step):
    """Writes into its batch, which can be copied; an object that cannot be is refused."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(0.5)
        batch[1] = batch[1] + 1
        return super().training_step(batch, batch_idx)


class OnePerParameter(torch.optim.SGD):
    """Reads one parameter after the other."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1)
        return super().step(closure)


class ByParameter(Step):
    """An optimizer that scales each gradient by its own norm; by that of all parameters it is refused."""

    def configure_optimizers(self) -> Any:
        return OnePerParameter(self.parameters(), 0.05, momentum=0.9)


NEAR = [
    kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Step) and kind is not Step
]  # fmt: skip


def trained(kind: type[Step], layout: Layout | None) -> tuple[Any, dict[str, Tensor], list[str]]:
    """In a worker: losses, the weights of this rank, and what was warned of how the batch is cut."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, module = fitted(kind, layout, NUM_BATCHES)
    told = [str(each.message) for each in caught if "microbatches than after the batch" in str(each.message)]
    return losses, {name: value.detach().clone() for name, value in module.named_parameters()}, told


def train_all(layout: Layout | None, is_each_alone: bool) -> list[Any]:
    """In a worker: every module, or how it ended."""
    found: list[Any] = []
    for kind in NEAR if is_each_alone else together(NEAR):
        try:
            found.append((kind.__name__, trained(kind, layout)))
        except Exception as error:
            found.append((kind.__name__, f"{type(error).__name__}: {error}"))
    return found


@in_layouts
def test_as_on_one_device(pool: WorkerPool, layout: Layout, is_each_alone: bool) -> None:
    expected = pool.run(train_all, None, is_each_alone, world_size=1, timeout=120)[0]
    of_ranks = pool.run(train_all, layout, is_each_alone, world_size=layout.world_size, timeout=280)
    for number, (kind, (losses, weights, _)) in enumerate(expected):
        held: dict[str, Tensor] = {}
        for found in (rank[number][1] for rank in of_ranks):
            assert not isinstance(found, str), f"{kind}: {found}"
            assert found[0] == pytest.approx(losses, rel=1e-9, nan_ok=True), kind
            assert found[2] == [], kind
            held |= found[1]
        assert held.keys() == weights.keys()
        for name, value in weights.items():
            assert float((held[name] - value).abs().max()) < 1e-9, f"{kind}: {name}"
