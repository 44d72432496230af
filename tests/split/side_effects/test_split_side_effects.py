"""Values that leave a unit as side effects, beside its outputs: carried or refused, never missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from model_parts import WIDTH, Block, Small, batches, next_token_loss
from one_process import OneProcessPipeline, compare
from torch import Tensor, nn

from lightning_pp.errors import SplitError
from lightning_pp.split.fakes.parameters import is_fake

THIS_FILE = "test_split_side_effects.py"


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


@pytest.mark.by_day(3)
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


class Appending(Block):
    """Keeps what it computes in a list and a dict that it is given, and in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor, kept: list[Tensor], by_name: dict[str, Any]) -> Tensor:
        hidden = self.up(self.norm(x)).tanh()
        kept.append(hidden * 2.0)
        by_name[f"block {len(by_name)}"] = {"mean": hidden.mean(), "depth": len(by_name)}
        self.history.append(hidden.mean(1))
        return x + self.down(hidden)


class AppendingToLists(Small):
    block = Appending

    def training_step(self, batch: Any) -> Tensor:
        kept: list[Tensor] = []
        by_name: dict[str, Any] = {}
        h = self.embedding(batch)
        for block in self.blocks:
            block.history.clear()
            h = block(h, kept, by_name=by_name)
            # the step edits what it received
            kept[-1] *= 0.5
        assert [entry["depth"] for entry in by_name.values()] == [0, 1, 2, 3]
        means = sum(entry["mean"] for entry in by_name.values())
        histories = torch.stack([block.history[-1] for block in self.blocks])
        assert all(len(block.history) == 1 for block in self.blocks)
        self.log("means", means)
        return next_token_loss(self.head(h), batch) + means + torch.stack(kept).pow(2).mean() + histories.std()


class Routed(Block):
    """A mixture of experts: it looks at its data, so a dry run tries it more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        outputs = torch.zeros_like(x)
        for expert in range(2):
            chosen = torch.where(scores.argmax(-1) == expert)
            if len(chosen[0]):
                outputs[chosen] = super().forward(x[chosen]) * scores[(*chosen, expert)].unsqueeze(-1)
        self.aux_loss = {"balance": scores.mean((0, 1)).pow(2).sum(), "none": None}
        return outputs


class Balanced(Small):
    """An auxiliary loss from attributes, and router scores collected by hooks inside."""

    block = Routed

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []
        for block in self.blocks:
            block.router.register_forward_hook(self.collect)

    def collect(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.scores.append(output)

    def training_step(self, batch: Any) -> Tensor:
        self.scores.clear()
        loss = super().training_step(batch)
        assert len(self.scores) == 4
        aux = torch.stack([block.aux_loss["balance"] for block in self.blocks]).mean()
        self.log("aux", aux)
        return loss + aux + torch.cat(self.scores).logsumexp(-1).pow(2).mean()


class ChangingInside(CollectingInside):
    """A hook inside the units that changes what a layer returns is part of the unit; those after it still collect."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.register_forward_pre_hook(lambda module, args: (args[0] * 0.7,))
            block.norm.register_forward_hook(lambda module, args, output: output + 0.1)


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


GLOBAL: list[Tensor] = []


class RememberingGlobally(Block):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        GLOBAL.append(output * 0.5)
        return output


class ToAModuleGlobal(Small):
    """Neither a module nor an argument holds the list."""

    block = RememberingGlobally

    def training_step(self, batch: Any) -> Tensor:
        GLOBAL.clear()
        loss = super().training_step(batch)
        return loss + sum(value.mean() for value in GLOBAL)


@dataclass
class Context:
    """What a step hands from unit to unit, as a dataclass."""

    auxiliary: Any = 0.0
    depth: int = 0
    names: list[str] = field(default_factory=list)


class PlainContext:
    """The same as an ordinary object."""

    def __init__(self) -> None:
        self.auxiliary: Any = 0.0
        self.depth = 0
        self.names: list[str] = []


class InContext(Block):
    """Adds to what the units before it have left, and computes with it."""

    def forward(self, x: Tensor, context: Any) -> Tensor:  # type: ignore[override]
        context.depth += 1
        context.names.append(f"block {context.depth}")
        output = super().forward(x) * (1 + context.depth) / len(context.names)
        context.auxiliary = context.auxiliary + output.square().mean() / context.depth
        return output


class WithContext(Small):
    block = InContext
    context: type[Any] = Context

    def training_step(self, batch: Any) -> Tensor:
        h, context = self.embedding(batch), self.context()
        for block in self.blocks:
            h = block(h, context)
        return next_token_loss(self.head(h), batch) + context.depth * context.auxiliary


class WithPlainContext(WithContext):
    context = PlainContext


@pytest.mark.by_day(4)
@pytest.mark.parametrize("architecture", [WithContext, WithPlainContext])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("runs_again", [False, True])
def test_what_units_leave_in_an_object_is_carried(architecture: type[Small], num_stages: int, runs_again: bool) -> None:
    compare(architecture, batches(), num_stages, splits_backward=num_stages == 3, runs_again=runs_again)


class CountingInContext(Block):
    """Leaves a number alone."""

    def forward(self, x: Tensor, context: Any) -> Tensor:  # type: ignore[override]
        context.depth += 1
        return super().forward(x) * (1 + context.depth)


class WithDepth(WithContext):
    block = CountingInContext


def test_numbers_that_units_leave_in_an_object_are_there_on_every_stage() -> None:
    compare(WithDepth, batches(), 3, splits_backward=True)


class Measuring(Block):
    """Notes how long the sequences are."""

    length = 0

    def forward(self, x: Tensor) -> Tensor:
        self.length = x.shape[1]
        return super().forward(x)


class ReadingALength(Small):
    block = Measuring

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch) / self.blocks[0].length


def test_a_number_that_a_unit_notes_is_there_on_every_stage() -> None:
    compare(ReadingALength, [batch[:, :length] for batch, length in zip(batches(), (7, 5), strict=True)], 3)


def number_of(x: Tensor) -> int:
    return int((x > 0).sum()) + 1


class CountingToReturn(Block):
    def forward(self, x: Tensor, given: Any) -> Any:  # type: ignore[override]
        output = super().forward(x)
        return output, number_of(output)


class CountingInADict(Block):
    def forward(self, x: Tensor, given: Any) -> Any:  # type: ignore[override]
        output = super().forward(x)
        given["number"] = number_of(output)
        return output, 0


class CountingInAnObject(Block):
    def forward(self, x: Tensor, given: Any) -> Any:  # type: ignore[override]
        output = super().forward(x)
        given["object"].depth = number_of(output)
        return output, 0


class CountingInAnAttribute(Block):
    number = 0

    def forward(self, x: Tensor, given: Any) -> Any:  # type: ignore[override]
        output = super().forward(x)
        self.number = number_of(output)
        return output, 0


class WithACount(Small):
    """Divides by a number that the first block makes of its output's values."""

    block = CountingToReturn

    def training_step(self, batch: Any) -> Tensor:
        h, given = self.embedding(batch), {"number": 0, "object": PlainContext()}
        number = 0
        for index, block in enumerate(self.blocks):
            h, found = block(h, given)
            if index == 0:
                number = found + given["number"] + given["object"].depth + getattr(block, "number", 0)
        return next_token_loss(self.head(h), batch) / number


COUNTING = [CountingToReturn, CountingInADict, CountingInAnObject, CountingInAnAttribute]


@pytest.mark.parametrize("block", COUNTING)
def test_a_number_made_of_values_is_not_made_up_on_other_stages(block: type[Block]) -> None:
    architecture = type("Counting", (WithACount,), {"block": block})
    compare(architecture, batches(), 1)
    with pytest.raises(SplitError) as error:
        compare(architecture, batches(), 3)
    message = str(error.value)
    assert f"{THIS_FILE}:" in message and "in training_step" in message
    assert "The unit 'blocks.0' computes it on another stage" in message and "x.sum()" in message


@pytest.mark.by_day(5)
@pytest.mark.parametrize(
    "architecture", [CollectingInside, ReadingAttributes, AppendingToLists, Balanced, ChangingInside]
)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_leaves_as_a_side_effect_is_carried(architecture: type[Small], num_stages: int) -> None:
    pipeline, _ = compare(
        architecture, batches(), num_stages, own_dry_runs=num_stages == 2, splits_backward=num_stages == 3
    )
    for stage in pipeline.stages:  # nothing stays behind where a unit does not run
        for block in stage.module.blocks:
            fakes = [value for value in vars(block).values() if isinstance(value, Tensor) and is_fake(value)]
            assert len(fakes) == 0


@pytest.mark.parametrize(
    ("architecture", "line"),
    [
        (ToAModuleGlobal, "sum(value.mean() for value in GLOBAL)"),
        (EditingInPlace, "first.mean()"),
        (SecondOrder, "torch.autograd.grad(output.sum(), first"),
    ],
)
def test_other_side_effects_are_refused_with_the_line(architecture: type[Small], line: str) -> None:
    with pytest.raises(SplitError) as error:
        compare(architecture, batches(), 3)
    message = str(error.value)
    with open(__file__) as source:
        number = next(index for index, text in enumerate(source, 1) if line in text and "architecture" not in text)
    assert f"{THIS_FILE}:{number} in" in message
    assert "made inside 'blocks." in message or "made inside 'head'" in message
    assert "return it from the unit" in message.lower()


def test_a_plan_with_a_side_effect_across_its_cut_is_refused() -> None:
    with pytest.raises(SplitError, match=r"made inside the unit 'blocks.0' \(stage 0\).*stage 1.*Return it"):
        plan_with_cut(EditingInPlace, "blocks.2")


def plan_with_cut(architecture: type[Small], split_point: str) -> None:
    """Forces a cut that the partition would not choose."""
    from lightning_pp.split.record.plan import build_plan

    pipeline = OneProcessPipeline(architecture, batches()[0], 2, split_points=["blocks.0"])
    order = list(pipeline.split.record.first_calls())
    start = order.index(split_point)
    build_plan(pipeline.split.record, {unit: int(index >= start) for index, unit in enumerate(order)}, 2)


class HandingOn(Small):
    """Each unit reads what the one before keeps in an attribute."""

    block = Remembering

    def training_step(self, batch: Any) -> Tensor:
        h, previous = self.embedding(batch), None
        for block in self.blocks:
            h, previous = block(h, previous), block
        return next_token_loss(self.head(h), batch)


def test_a_unit_may_read_an_attribute_of_a_unit_of_another_stage() -> None:
    pipeline, _ = compare(HandingOn, batches(), 4)
    calls = pipeline.plans(batches()[0])[0].record.calls
    memories = [edge for edge in pipeline.plans(batches()[0])[0].edges if edge.value.leaf < 0]
    assert memories
    assert all(calls[edge.value.call].unit.startswith("blocks.") for edge in memories)


def test_units_that_share_state_nobody_can_follow_share_a_stage() -> None:
    class Handing(RememberingGlobally):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + GLOBAL[-1] if GLOBAL else x)

    class HandingOnGlobally(Small):
        block = Handing

        def training_step(self, batch: Any) -> Tensor:
            GLOBAL.clear()
            return super().training_step(batch)

    pipeline, _ = compare(HandingOnGlobally, batches(), 3)
    stages = pipeline.split.partition.stage_of_unit
    assert len({stages[f"blocks.{index}"] for index in range(4)}) == 1
    with pytest.raises(SplitError, match=r"4 stages need 3 cuts, but only 2 can be made"):
        compare(HandingOnGlobally, batches(), 4)


def test_what_units_keep_for_themselves_ties_nothing() -> None:
    """Attention weights kept in an attribute that no step reads are nobody else's business."""

    class Keeping(Small):
        block = Remembering

    compare(Keeping, batches(), 4)


def test_a_list_of_the_root_that_keeps_what_is_inside_units_is_carried() -> None:
    class Keeping(CollectingInside):
        def training_step(self, batch: Any) -> Tensor:
            self.kept.clear()
            return Small.training_step(self, batch)

    pipeline, _ = compare(Keeping, batches(), 3)
    assert any(edge.value.leaf < 0 for edge in pipeline.plans(batches()[0])[0].edges)


class Detached(Small):
    """``.data`` leaves no trace in torch's dispatcher."""

    def training_step(self, batch: Any) -> Tensor:
        h, kept = self.embedding(batch), []
        for block in self.blocks:
            h = block(h)
            kept.append(h.data)
        return next_token_loss(self.head(h), batch) * (1 + torch.stack(kept).mean())


class InATuple(Small):
    """Parameters kept where no fake parameter can take their place."""

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


class EditsTheMask(Small):
    """The first block writes into a tensor that depends on the batch only, and the loss reads it."""

    class block(Block):  # noqa: N801
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            mask.mul_(0.5)
            return super().forward(x) + mask

    def training_step(self, batch: Any) -> Tensor:
        mask = (batch > 3).to(torch.float64).unsqueeze(-1)
        h = self.embedding(batch)
        for block in self.blocks:
            h = block(h, mask)
        return next_token_loss(self.head(h), batch) * mask.mean()


class EditsTheBatch(EditsTheMask):
    def training_step(self, batch: Any) -> Tensor:
        tokens, mask = batch
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h, mask)
        return next_token_loss(self.head(h), tokens) * mask.mean()


def masked_batches() -> list[Any]:
    return [(batch, torch.rand(*batch.shape, 1, dtype=torch.float64)) for batch in batches()]


@pytest.mark.parametrize(
    ("architecture", "data"),
    [(EditsTheMask, batches), (EditsTheBatch, masked_batches)],
    ids=["inter-unit code", "batch"],
)
def test_what_a_unit_writes_into_a_tensor_of_others_keeps_its_readers_on_its_stage(
    architecture: type[Small], data: Callable[[], list[Any]]
) -> None:
    pipeline, _ = compare(architecture, data(), 2)
    stages = pipeline.split.partition.stage_of_unit
    assert stages["embedding"] == 0 and {stages[f"blocks.{index}"] for index in range(4)} == {1}
    with pytest.raises(SplitError, match=r"blocks\.0.*must share a stage.*edit in place"):
        compare(architecture, data(), 3)
