"""What a dry run records, against plain autograd and trying every value."""

from __future__ import annotations

import copy
import random
from typing import Any

import architectures
import numpy as np
import pytest
import torch
import transformers_by_hand
from model_parts import WIDTH, Block, Small, batches, next_token_loss
from one_process import build, record_of
from reference_flow import reference_flow
from torch import Tensor, nn

from lightning_pp.split.fakes.parameters import has_data
from lightning_pp.split.record.reduction import Kind
from lightning_pp.split.record.step_record import InterUnitDraws, PassedOn, TensorSpec, Value
from lightning_pp.split.unit_calls.units import discover_units

# In these a unit hands on what it was given, which has no identity of its own in the record.
HANDS_ON = {"structured"}


@pytest.mark.by_day(9)
@pytest.mark.parametrize("name", [name for name in architectures.ARCHITECTURES if name not in HANDS_ON])
def test_needs_and_gradient_flow_are_those_found_by_trying(name: str) -> None:
    module, batch = build(architectures.ARCHITECTURES[name][0]), architectures.batches_of(name)[0]
    record = record_of(module, batch)
    reference = reference_flow(module, discover_units(module), batch)
    assert len(record.calls) == len(reference.values) - 1
    reads = {None: record.tail, **{call.index: call.reads for call in record.calls}}
    assert {consumer: found.values for consumer, found in reads.items()} == reference.values
    assert {consumer: set(found.parameters) for consumer, found in reads.items()} == reference.parameters
    flows: dict[int | None, set[Value]] = {consumer: set() for consumer in reads}
    for value, sources in record.gradient_sources.items():
        flows[None if value is None else value.call] |= sources
    assert flows == reference.gradients
    assert not any(found.escapes for found in reads.values())


def test_outputs_of_calls_are_described() -> None:
    record = record_of(build(architectures.ARCHITECTURES["structured"][0]), architectures.batches_of("structured")[0])
    assert [call.unit for call in record.calls] == ["embedding", *(f"blocks.{index}" for index in range(4)), "head"]
    assert record.calls[0].output is None
    assert record.spec(Value(0, 0)) == TensorSpec((3, 6, WIDTH), torch.float64)
    assert record.spec(Value(0, 0)).num_bytes == 3 * 6 * WIDTH * 8
    # Hidden(states, None, {"history": (earlier, own), "norm"}, depth)
    leaves = record.calls[2].leaves
    assert [leaf.spec is not None for leaf in leaves] == [True, False, False, True, True, False]
    assert leaves[1].fake is None and leaves[5].fake == 2
    assert isinstance(leaves[2].fake, PassedOn)
    assert record.calls[2].output.depth == 0
    assert record.first_calls()["head"] == 5


def test_costs_of_calls() -> None:
    record = record_of(build(Small), batches(3)[0])
    block, head = record.calls[1], record.calls[-1]
    assert block.flops == 2 * (3 * 6) * WIDTH * 2 * WIDTH * 2
    assert head.flops == 2 * (3 * 6) * WIDTH * 24
    tokens = 3 * 6 * 8  # times 8 bytes each
    # input of the norm, its statistics, its output, the activation's input and output
    assert sum(block.memory.saved.values()) == tokens * (WIDTH + 1 + 1 + WIDTH + 2 * WIDTH + 2 * WIDTH)
    assert record.tail.flops == 0


def test_products_of_experts_are_counted() -> None:
    """Each row goes to one expert, whatever their number."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

        def forward(self, h: Tensor) -> Tensor:
            rows = h.flatten(0, 1).bfloat16()
            ends = torch.arange(1, 5, dtype=torch.int32) * (len(rows) // 4)
            return h + nn.functional.grouped_mm(rows, self.weight.bfloat16(), offs=ends).view(h.shape)

    class Mixture(Small):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Experts(), Experts()])

    record = record_of(build(Mixture), batches(4)[0])
    rows = 4 * 6
    assert record.calls[1].flops == 2 * rows * WIDTH * WIDTH
    # W keeps the rows that were multiplied, and the gradient of what they became
    memory = record.calls[1].memory
    assert sum(memory.queued.values()) == memory.queued_gradients_bytes == rows * WIDTH * 2


def test_inter_unit_code_has_costs_too() -> None:
    class Similarity(Small):
        def training_step(self, batch: Any) -> Tensor:
            h = self.embedding(batch)
            h = (h @ h.mT) @ h
            return self.head(self.blocks[0](h)).mean()

    record = record_of(build(Similarity), batches(3)[0], units=["blocks.*"])
    assert record.calls[1].unit == "blocks.0"
    assert record.calls[1].reads.flops == 2 * 2 * 3 * 6 * 6 * WIDTH


def test_random_inter_unit_code_and_edits_are_noted() -> None:
    class Noisy(Small):
        def training_step(self, batch: Any) -> Tensor:
            h = self.embedding(batch)
            return self.head(self.blocks[0](h + torch.randn_like(h))).mean()

    class InUnit(Small):
        def training_step(self, batch: Any) -> Tensor:
            return self.head(nn.functional.dropout(torch.ones(2, WIDTH, dtype=torch.float64), 0.5)).mean()

    class Dropping(Small):
        class block(Block):  # noqa: N801
            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.dropout(super().forward(x), 0.5)

    assert record_of(build(Noisy), batches()[0]).inter_unit_draws == InterUnitDraws(frozenset({0}))
    assert record_of(build(InUnit), batches()[0]).inter_unit_draws == InterUnitDraws(frozenset({-1}))
    assert record_of(build(Dropping), batches()[0]).inter_unit_draws == InterUnitDraws()
    record = record_of(
        build(architectures.ARCHITECTURES["in_place_edits"][0]), architectures.batches_of("in_place_edits")[0]
    )
    assert [record.leaf(Value(index, 0)).edited_in_place for index in range(6)] == [True] * 5 + [False]


def test_reads_at_the_end_and_means_are_noted() -> None:
    class Ending(Small):
        def training_step(self, batch: Any) -> Tensor:
            loss = super().training_step(batch)
            assert isinstance(loss.item(), float)
            self.total = loss.detach()
            return loss + nn.functional.mse_loss(loss, torch.zeros_like(loss))

    record = record_of(build(Ending), batches()[0])
    (line,) = record.value_reads_in_tail
    assert "test_split_record.py" in line
    assert [reduction.is_mean for reduction in record.reductions if reduction.kind is Kind.LOSS] == [True, True]
    assert record.mutated_attributes == (("", "total"),)


class Untidy(Small):
    """A step that changes everything it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.table = {"steps": 0}
        self.steps = 0
        self.norm = nn.BatchNorm1d(WIDTH)
        self.generator = torch.Generator().manual_seed(1)
        self.numpy_generator = np.random.default_rng(1)
        self.python_generator = random.Random(1)
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch: Any) -> Tensor:
        batch.add_(1).remainder_(24)
        batch[:, 0] = 0
        self.seen.append(batch.sum())
        self.table["steps"] += 1
        self.steps += 1
        torch.rand(()), random.random(), np.random.rand()
        torch.rand((), generator=self.generator), self.numpy_generator.random(), self.python_generator.random()
        h = self.norm(self.embedding(batch).flatten(0, 1)).view(*batch.shape, WIDTH)
        self.average.mul_(0.9).add_(0.1)
        self.last = h
        return next_token_loss(self.head(self.blocks[0](h)), batch)


def test_a_dry_run_leaves_no_trace() -> None:
    module, batch = build(Untidy), batches(3)[0]
    expected = batch.clone()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    parameters = dict(module.named_parameters())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    record = record_of(module, batch)
    drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
    own = [
        torch.rand((), generator=module.generator).item(),
        module.numpy_generator.random(),
        module.python_generator.random(),
    ]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert drawn == [torch.rand(()).item(), random.random(), np.random.rand()]
    assert own == [
        torch.rand((), generator=torch.Generator().manual_seed(1)).item(),
        np.random.default_rng(1).random(),
        random.Random(1).random(),
    ]
    assert torch.equal(batch, expected)
    assert record.edits_batch
    assert module.seen == [] and module.table == {"steps": 0} and module.steps == 0
    assert not hasattr(module, "last")
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert all(parameters[name] is parameter for name, parameter in module.named_parameters())
    assert all(parameter.grad is None and has_data(parameter) for parameter in module.parameters())
    assert {name for name, _ in module.named_buffers()} == {name for name in state if name not in parameters}
    assert {("", "seen"), ("", "table"), ("", "steps"), ("", "last")} <= set(record.mutated_attributes)


class WritesIntoCopies(Small):
    """Writes into a copy that no operation has made, and which may lie where results lay that are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(3, 5)

    def training_step(self, batch: Any) -> Tensor:
        (batch * 0.5).sum()
        state = copy.deepcopy(self.state)
        state += 1
        return super().training_step(batch)


def test_memory_that_a_step_was_given_is_not_taken_for_memory_that_is_gone() -> None:
    """Each rank runs the step for itself, and all have to find the same, wherever memory lies."""
    edits = [record_of(build(WritesIntoCopies), batches()[0]).edits_batch for _ in range(20)]
    assert edits == [True] * 20


def test_a_batch_that_is_only_read_is_not_said_to_be_edited() -> None:
    for name in ("in_place_edits", "masked_loss", "resnet_batch_statistics"):
        module = build(architectures.ARCHITECTURES[name][0])
        assert not record_of(module, architectures.batches_of(name)[0]).edits_batch, name


@pytest.mark.parametrize("name", ["shared_in_list", "aliased", "recurrent", "tied_modules"])
def test_parameters_of_several_names_come_back(name: str) -> None:
    module = build(architectures.ARCHITECTURES[name][0])
    before = {key: id(value) for key, value in module.named_parameters(remove_duplicate=False)}
    held = held_in_lists(module)
    record = record_of(module, architectures.batches_of(name)[0])
    assert {key: id(value) for key, value in module.named_parameters(remove_duplicate=False)} == before
    assert held_in_lists(module) == held
    assert record.mutated_attributes == ()


def held_in_lists(module: nn.Module) -> dict[tuple[str, str, int], int]:
    return {
        (name, attribute, index): id(value)
        for name, child in module.named_modules()
        for attribute, held in child.__dict__.items()
        if isinstance(held, list)
        for index, value in enumerate(held)
    }


def test_without_gradients() -> None:
    record = record_of(build(Small), batches()[0], with_gradients=False)
    assert record.gradient_sources == {}
    assert not any(call.memory.saved for call in record.calls)
    assert record.tail.values == {Value(5, 0)}


def test_values_of_frozen_units_without_trained_inputs_need_no_gradient() -> None:
    record = record_of(
        build(architectures.ARCHITECTURES["teacher_student"][0]), architectures.batches_of("teacher_student")[0]
    )
    for call in record.calls:
        assert call.leaves[0].requires_grad == call.unit.startswith("student")


def test_a_dry_run_of_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = transformers_by_hand.llama()
    module.model.model.rotary_emb = type(module.model.model.rotary_emb)(module.model.config)
    record = record_of(module, transformers_by_hand.batches_of("llama")[0])
    assert record.spec(Value(1, 0)) == TensorSpec((3, 7, 16), torch.float32)
