"""Values that leave a unit by another door than its outputs: carried or refused, never missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from door_models import Small, batches
from one_process import OneProcessPipeline, compare
from torch import Tensor, nn
from zoo_parts import WIDTH, Block, next_token_loss

from lightning_pp.errors import SplitError

THIS_FILE = "test_split_side_doors.py"


class CollectingOutputs(Small):
    """Hooks on the units collect what they return, and what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.inputs: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: self.outputs.append(output))
            block.register_forward_pre_hook(lambda module, args: self.inputs.append(args[0]))

    def training_step(self, batch: Any) -> Tensor:
        self.outputs.clear()
        self.inputs.clear()
        loss = super().training_step(batch)
        assert len(self.outputs) == len(self.inputs) == 4
        return loss + sum(out.pow(2).mean() * 0.1 for out in self.outputs) + sum(i.mean() for i in self.inputs)


class CollectingInClosure(Small):
    """The list is a local variable of the step."""

    def training_step(self, batch: Any) -> Tensor:
        kept: list[Tensor] = []
        handles = [block.register_forward_hook(lambda *given: kept.append(given[-1])) for block in self.blocks]
        loss = super().training_step(batch)
        for handle in handles:
            handle.remove()
        return loss + torch.stack(kept).pow(2).mean()


class ChangingHooks(Small):
    """Hooks that change what goes in and out, with a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks[1].register_forward_pre_hook(lambda module, args: args[0] * 2.0)
        self.blocks[2].register_forward_hook(lambda module, args, output: output * self.gain)
        self.blocks[3].register_forward_hook(self.with_keywords, with_kwargs=True)
        self.blocks[3].register_forward_pre_hook(lambda module, args, kwargs: (args, {}), with_kwargs=True)

    def with_keywords(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        assert kwargs == {}
        return output + args[0]


@pytest.mark.parametrize("architecture", [CollectingOutputs, CollectingInClosure, ChangingHooks])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_forward_hooks_of_units_work_on_every_stage(architecture: type[Small], num_stages: int) -> None:
    compare(architecture, batches(), num_stages, own_dry_runs=num_stages == 2)


class CollectingInside(Small):
    """Hooks on layers inside the units."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda module, args, output: self.kept.append(output))

    def training_step(self, batch: Any) -> Tensor:
        self.kept.clear()
        loss = super().training_step(batch)
        return loss + sum(value.pow(2).mean() for value in self.kept)


class Remembering(Block):
    def forward(self, x: Tensor, previous: Remembering | None = None) -> Tensor:
        output = super().forward(x if previous is None else x + previous.memory)
        self.memory = output * 0.5
        return output


class ReadingAttributes(Small):
    """The step reads what a unit keeps in an attribute."""

    block = Remembering

    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        return loss + self.blocks[0].memory.mean()


class EditingInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return super().forward(x)


class EditingInPlace(Small):
    """A unit edits what it was given, and the step reads that afterwards."""

    block = EditingInput

    def training_step(self, batch: Any) -> Tensor:
        h = first = self.embedding(batch) * 1.0
        for block in self.blocks:
            h = block(h)
        return next_token_loss(self.head(h), batch) + first.mean()


class SecondOrder(Small):
    """A gradient of a gradient through all units."""

    def training_step(self, batch: Any) -> Tensor:
        h = first = self.embedding(batch)
        for block in self.blocks:
            h = block(h)
        output = self.head(h)
        (gradient,) = torch.autograd.grad(output.sum(), first, create_graph=True)
        return next_token_loss(output, batch) + gradient.pow(2).mean()


@pytest.mark.parametrize(
    ("architecture", "line"),
    [
        (CollectingInside, "value.pow(2).mean() for value in self.kept"),
        (ReadingAttributes, "self.blocks[0].memory.mean()"),
        (EditingInPlace, "first.mean()"),
        (SecondOrder, "torch.autograd.grad(output.sum(), first"),
    ],
)
def test_other_doors_are_refused_with_the_line(architecture: type[Small], line: str) -> None:
    with pytest.raises(SplitError) as error:
        compare(architecture, batches(), 3)
    message = str(error.value)
    with open(__file__) as source:
        number = next(index for index, text in enumerate(source, 1) if line in text and "architecture" not in text)
    assert f"{THIS_FILE}:{number} in" in message
    assert "made inside 'blocks." in message or "made inside 'head'" in message
    assert "return it from the unit" in message.lower()


def test_a_plan_with_a_side_door_across_its_cut_is_refused() -> None:
    with pytest.raises(SplitError, match=r"made inside the unit 'blocks.0' \(stage 0\).*stage 1.*Return it"):
        plan_with_cut(ReadingAttributes, "blocks.2")


def plan_with_cut(architecture: type[Small], split_point: str) -> None:
    """Forces a cut that the partition would not choose."""
    from lightning_pp.split.plan import build_plan

    pipeline = OneProcessPipeline(architecture, batches()[0], 2, split_points=["blocks.0"])
    order = list(pipeline.split.record.first_calls())
    start = order.index(split_point)
    build_plan(pipeline.split.record, {unit: int(index >= start) for index, unit in enumerate(order)}, 2)


class HandingOn(Small):
    """Each unit reads what the one before keeps: they must share a stage, and then it works."""

    block = Remembering

    def training_step(self, batch: Any) -> Tensor:
        h, previous = self.embedding(batch), None
        for block in self.blocks:
            h, previous = block(h, previous), block
        return next_token_loss(self.head(h), batch)


def test_units_that_share_state_share_a_stage() -> None:
    pipeline, _ = compare(HandingOn, batches(), 3)
    stages = pipeline.split.partition.stage_of_unit
    assert len({stages[f"blocks.{index}"] for index in range(4)}) == 1
    with pytest.raises(SplitError, match=r"4 stages need 3 places to cut, and the order of calls leaves 2"):
        compare(HandingOn, batches(), 4)


def test_what_units_keep_for_themselves_ties_nothing() -> None:
    """Attention weights kept in an attribute that no step reads are nobody else's business."""

    class Keeping(Small):
        block = Remembering

    compare(Keeping, batches(), 4)


def test_a_list_of_the_root_that_keeps_what_is_inside_units_is_named() -> None:
    class Keeping(CollectingInside):
        def training_step(self, batch: Any) -> Tensor:
            self.kept.clear()
            return Small.training_step(self, batch)

    with pytest.raises(SplitError, match="the attribute 'kept' of Keeping"):
        compare(Keeping, batches(), 3)


class Detached(Small):
    """``.data`` leaves no trace in torch's dispatcher."""

    def training_step(self, batch: Any) -> Tensor:
        h, kept = self.embedding(batch), []
        for block in self.blocks:
            h = block(h)
            kept.append(h.data)
        return next_token_loss(self.head(h), batch) * (1 + torch.stack(kept).mean())


class InATuple(Small):
    """Parameters kept where no placeholder can take their place."""

    def __init__(self) -> None:
        super().__init__()
        self.decayed = tuple(block.up.weight for block in self.blocks)

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch) + 0.01 * sum(weight.pow(2).sum() for weight in self.decayed)


class AllParameters(Small):
    """A penalty over the parameters of other stages' units, computed before any of them is called."""

    def training_step(self, batch: Any) -> Tensor:
        penalty = sum(parameter.pow(2).sum() for parameter in self.blocks.parameters())
        return super().training_step(batch) + 0.01 * penalty


@pytest.mark.parametrize("architecture", [Detached, InATuple])
def test_values_and_parameters_taken_by_the_back_door(architecture: type[Small]) -> None:
    compare(architecture, batches(), 3)


def test_parameters_used_at_the_end_are_owned_there_too() -> None:
    pipeline, _ = compare(AllParameters, batches(), 3)
    stages = pipeline.split.partition.stage_of_unit
    assert pipeline.split.owners["blocks.1.up.weight"] == tuple(sorted({stages["blocks.1"], 2}))
    assert pipeline.split.owners["embedding.weight"] == (0,)
