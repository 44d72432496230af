"""Results of the code between units cross where they are less than the outputs of units that they were made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from model_parts import VOCAB, WIDTH, Architecture, Attention, next_token_loss
from one_process import CPU, OneProcessPipeline, compare, compare_evaluation, recorded
from torch import Tensor, nn

from lightning_pp.errors import SplitError
from lightning_pp.planning.steps.state import StepState
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.split.record.plan import StepPlan

NUM_LAYERS, LENGTH = 6, 5
Mix = Callable[["Residual", Tensor, int], Tensor]


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Editing(nn.Module):
    """Writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        h.mul_(0.5)
        return torch.sin(h) * self.scale


class Residual(Architecture):
    """Layers of attention and a feed-forward part that ``mix`` puts together, outside of them or in one block."""

    def __init__(self, mix: Mix, inside: bool = False) -> None:
        super().__init__()
        self.mix = mix
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.scales = nn.Parameter(1 + torch.randn(NUM_LAYERS, WIDTH) / 4)
        self.attention = nn.ModuleList(Attention() for _ in range(NUM_LAYERS))
        self.mlp = nn.ModuleList(feed_forward() for _ in range(NUM_LAYERS))
        self.editing = nn.ModuleList(Editing() for _ in range(NUM_LAYERS if mix is with_units_that_edit else 0))
        self.blocks = nn.ModuleList(Whole(self, index) for index in range(NUM_LAYERS)) if inside else None

    def training_step(self, batch: Tensor) -> Tensor:
        h = self.embedding(batch)
        for index in range(NUM_LAYERS):
            h = self.mix(self, h, index) if self.blocks is None else self.blocks[index](h)
        return next_token_loss(self.head(h), batch)


class Whole(nn.Module):
    """One layer of ``model``, as a unit."""

    def __init__(self, model: Residual, index: int) -> None:
        super().__init__()
        self.attention, self.mlp = nn.ModuleList([model.attention[index]]), nn.ModuleList([model.mlp[index]])
        self.mix = model.mix

    def forward(self, h: Tensor) -> Tensor:
        return self.mix(self, h, 0)  # type: ignore[arg-type]


def plain(model: Residual, h: Tensor, index: int) -> Tensor:
    h = h + model.attention[index](h)
    return h + model.mlp[index](h)


def with_more_between(model: Residual, h: Tensor, index: int) -> Tensor:
    """Views, several outputs, a cast and functions of several tensors on the way, and a sum that is made twice."""
    a = model.attention[index](F.layer_norm(h, (WIDTH,)))
    first, second = a.chunk(2, dim=-1)
    h = torch.cat([second, first], dim=-1).contiguous() + h
    h = h.flatten(0, 1).view(h.shape)
    h = h * 0.5 + h * 0.5
    return torch.add(h, model.mlp[index](h).double())


def with_parameters(model: Residual, h: Tensor, index: int) -> Tensor:
    if index == 0:
        h = h + model.positions
    h = h + model.attention[index](h) * model.scales[index]
    return h + F.linear(model.mlp[index](h), torch.diag(model.scales[index]))


def with_edits(model: Residual, h: Tensor, index: int) -> Tensor:
    h = h + model.attention[index](h)
    g = h * 2
    g += 1  # what it was is nowhere to be had
    h = h + model.mlp[index](g)
    h.mul_(0.5)
    return h + g


def with_units_that_edit(model: Residual, h: Tensor, index: int) -> Tensor:
    h = h + model.attention[index](h)
    return h.clone() + model.mlp[index](F.relu_(h * 1.5)) + model.editing[index](h)


def with_checkpoints(model: Residual, h: Tensor, index: int) -> Tensor:
    def half(x: Tensor) -> Tensor:
        return x * 0.5 + model.attention[index](x)

    h = h + torch.utils.checkpoint.checkpoint(half, h, use_reentrant=False)
    return h + model.mlp[index](h)


def in_one_checkpoint(model: Residual, h: Tensor, index: int, use_reentrant: bool = False) -> Tensor:
    """A sum inside of what runs again crosses, and the sum that it ends with."""

    def layer(x: Tensor) -> Tensor:
        x = x + torch.tanh(model.attention[index](x)) * x
        return x + model.mlp[index](x * 0.5)

    return torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=use_reentrant)


def in_a_reentrant_checkpoint(model: Residual, h: Tensor, index: int) -> Tensor:
    return in_one_checkpoint(model, h, index, use_reentrant=True)


def in_nested_checkpoints(model: Residual, h: Tensor, index: int) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        return torch.sin(in_one_checkpoint(model, torch.cos(x), index)) + x

    return torch.utils.checkpoint.checkpoint(outer, h, use_reentrant=False)


def without_gradients(model: Residual, h: Tensor, index: int) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(h + model.attention[index](h))
    return h + gate * model.mlp[index](h)


def with_dropout(model: Residual, h: Tensor, index: int) -> Tensor:
    h = h + F.dropout(model.attention[index](h), 0.5)
    return h + model.mlp[index](h)


MIXES = [
    plain, with_more_between, with_parameters, with_edits, with_units_that_edit, with_checkpoints, without_gradients,
    in_one_checkpoint, in_a_reentrant_checkpoint, in_nested_checkpoints,
]  # fmt: skip


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, VOCAB, (rows, LENGTH)) for rows in (3, 2)]


def plan_of(pipeline: OneProcessPipeline) -> StepPlan:
    return pipeline.plans(batches()[0])[0]


def activations_sent(plan: StepPlan) -> float:
    """Bytes of all edges, in units of one activation."""
    return sum(edge.spec.num_bytes for edge in plan.edges) / (3 * LENGTH * WIDTH * 8)


@pytest.mark.by_day(3)
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.__name__)
@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.nightly), 4])
def test_training_equals_the_whole_model_and_sends_what_one_block_would(mix: Mix, num_stages: int) -> None:
    pipeline, _ = compare(lambda: Residual(mix), batches(), num_stages, splits_backward=num_stages != 4)
    plan = plan_of(pipeline)
    # a cut within a layer has more to send: ``gate`` beside ``h``, the ``g`` of an edit, what is edited later, the
    # ``x`` of the outer checkpoint
    has_more = mix in (without_gradients, with_edits, with_units_that_edit, in_nested_checkpoints)
    most = (2 if has_more else 1) * (num_stages - 1)
    assert num_stages - 1 <= activations_sent(plan) <= most
    assert plan.crossing_operations


def test_a_residual_inside_sends_the_same() -> None:
    """Two and four stages, cut between whole layers."""
    for starts in (["attention.3"], ["attention.2", "attention.3", "attention.5"]):
        blocks = [name.replace("attention", "blocks") for name in starts]
        outside = OneProcessPipeline(lambda: Residual(plain), batches()[0], len(starts) + 1, split_points=starts)
        inside = OneProcessPipeline(lambda: Residual(plain, True), batches()[0], len(starts) + 1, split_points=blocks)
        assert activations_sent(plan_of(outside)) == activations_sent(plan_of(inside)) == len(starts)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("mix", [plain, with_parameters, without_gradients], ids=lambda mix: mix.__name__)
def test_evaluation_equals_the_whole_model(mix: Mix) -> None:
    compare_evaluation(lambda: Residual(mix), batches()[0], 3)


def test_random_numbers_between_units_stay_where_they_are() -> None:
    """Outputs of units cross: what two stages drew would be compared by nobody."""
    pipeline = OneProcessPipeline(lambda: Residual(with_dropout), batches()[0], 2)
    assert not plan_of(pipeline).crossing_operations


class Turning(Residual):
    """What it does between units hangs on what no stage can know beforehand."""

    others: ClassVar[bool] = False

    def training_step(self, batch: Tensor) -> Tensor:
        h = self.embedding(batch)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            h = h + attention(h)
            h = h - mlp(h) if Turning.others else h + mlp(h)
        return next_token_loss(self.head(h), batch)


@pytest.mark.parametrize("stage", [0, 1])
def test_other_operations_than_those_recorded_are_refused(stage: int) -> None:
    """By the stage that sends a result and by the one that receives it, whichever sees it."""
    pipeline = OneProcessPipeline(lambda: Turning(plain), batches()[0], 2, split_points=["attention.3"])
    plan = plan_of(pipeline)
    assert plan.crossing_operations
    Turning.others = True
    try:
        runner = pipeline.stages[stage].runner
        received = [(edge.value, torch.zeros(edge.spec.shape).double()) for edge in plan.stages[stage].receives]
        step = partial(pipeline.stages[stage].module.training_step, batches()[0])
        with pytest.raises(SplitError, match=r"test_values_between_units.py.*crosses between stages.*same code"):
            runner.forward(plan, step, partial(iter, received), StepRandomness(0, CPU), with_gradients=True)
    finally:
        Turning.others = False


def test_a_step_whose_code_between_units_is_another_gets_another_plan() -> None:
    """The attribute is one that the step may go by: it is rehearsed, and takes the path of another plan."""

    class Choosing(Residual):
        subtracts = False

        def training_step(self, batch: Tensor) -> Tensor:
            h = self.embedding(batch)
            for mlp in self.mlp:
                h = h - mlp(h) if self.subtracts else h + mlp(h)
            return next_token_loss(self.head(h), batch)

    pipeline = OneProcessPipeline(lambda: Choosing(plain), batches()[0], 2)
    module, plans = pipeline.split.module, pipeline.split.plans
    step = recorded(module, batches()[0])

    def plan(subtracts: bool) -> StepPlan:
        module.subtracts = subtracts
        return plans.plan("key", step, with_gradients=True, state=StepState(attributes=int(subtracts)))

    adding, subtracting = plan(False), plan(True)
    assert plan(False) is adding and plan(True) is subtracting and adding is not subtracting
    assert {adding.record.operations[n].place.name for n in adding.crossing_operations} == {"add"}
    assert {subtracting.record.operations[n].place.name for n in subtracting.crossing_operations} == {"sub"}
