"""Recordings in which one of each kind of unit runs: against recordings in which all run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from layouts import recorded_training
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pp.planning.alike_units import AlikeUnits
from lightning_pp.planning.stage_model import RecordedModel, RecordingOptions
from lightning_pp.planning.tensor_parts import TensorRanks
from lightning_pp.schedule import Placement
from lightning_pp.split.cut.partition import partition_units
from lightning_pp.split.memory.estimate import estimate_memory
from lightning_pp.split.memory.state_memory import StateSizes

WIDTH, WORDS = 16, 40


class Attention(nn.Module):
    """Returns None besides its result, as attention of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).reshape(x.shape)
        return self.out(mixed), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), mask)[0]
        return x + self.down(F.gelu(self.up(x)))


class Model(pl.LightningModule):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def training_step(self, tokens: Tensor, batch_idx: int = 0) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.checkpoints else block(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def recorded(
    model: Model, num_samples: int, like: RecordedModel | None = None, refined: Any = (), tensor: int = 1
) -> RecordedModel:
    tokens = torch.zeros(num_samples, 6, dtype=torch.int64)
    how = RecordingOptions(torch.bfloat16, refined=refined, tensor=TensorRanks(tensor))
    return recorded_training(model, tokens, how, like)


def seen(recording: RecordedModel) -> Any:
    """All that a plan asks of a recording."""
    record = recording.counted.record
    placement = Placement.interleaved(3)
    partition = partition_units(record, placement=placement, num_parameters=recording.counted.num_parameters)
    calls = [
        (
            call.unit, call.flops, call.weight_flops, call.work, call.flops_run_again, call.flops_run_again_inside,
            call.num_regions_inside, call.region, sorted(call.memory.saved.values()), call.shapes,
            [(leaf.spec, leaf.requires_grad) for leaf in call.leaves], call.reads.values, call.differentiated,
        )
        for call in record.calls
    ]  # fmt: skip
    held = estimate_memory(record, partition, placement, (), StateSizes())
    flow = record.gradient_sources, record.nearest_gradients, record.weights_of_float32_norms
    return calls, partition, [stage.held_after_forward_bytes for stage in held.stages], flow, record.tail.work


@pytest.mark.by_day(2)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("refined", [(), ("blocks.1", "blocks.3")])
def test_a_step_on_more_samples_is_as_if_all_units_ran(checkpoints: bool, refined: tuple[str, ...]) -> None:
    model = Model(checkpoints)
    first = recorded(model, 2, refined=refined)
    like, whole = recorded(model, 3, first, refined), recorded(model, 3, refined=refined)
    assert seen(like) == seen(whole) != seen(first)
    assert seen(recorded(model, 3, first, refined, tensor=2)) == seen(recorded(model, 3, refined=refined, tensor=2))


def test_units_that_return_plain_values_besides_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(checkpoints=True)
    first = recorded(model, 2, refined=[f"blocks.{number}" for number in range(5)])
    ran: list[nn.Module] = []
    monkeypatch.setattr(Attention, "forward", lambda self, *args: ran.append(self) or unpatched(self, *args))
    assert recorded(model, 3, first) is not first
    assert ran == [model.blocks[0].attention]
    alike = AlikeUnits(first.record, first.units, first.fake_parameters.names)
    assert len(set(alike.first)) == 2 + 4  # embedding and head, and what is in a block
    assert len(first.record.calls) == 2 + 5 * 4


unpatched = Attention.forward


def test_units_of_other_settings_are_not_alike() -> None:
    model = Model()
    model.blocks[2].attention = nn.Identity()  # type: ignore[assignment]
    model.blocks[2].forward = lambda x, mask: x * 2  # type: ignore[method-assign]
    first = recorded(model, 2)
    assert AlikeUnits(first.record, first.units, first.fake_parameters.names).first[:6] == [0, 1, 1, 3, 1, 1]


class Noting(nn.Module):
    """Notes how many samples it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return x


def test_what_units_share_is_as_before_though_most_of_them_stand_by() -> None:
    model, shared = Model(), Noting()
    for block in model.blocks:
        block.down = nn.Sequential(shared, block.down)  # type: ignore[assignment, arg-type]
    first = recorded(model, 2)
    assert len(set(AlikeUnits(first.record, first.units, first.fake_parameters.names).first)) < len(first.record.calls)
    assert seen(recorded(model, 3, first)) == seen(recorded(model, 3))
    assert shared.sizes == []


class Marking(Model):
    """Sets an attribute on some of its blocks, for batches of at least some size."""

    marked: tuple[int, ...] = ()
    at_least = 0

    def training_step(self, tokens: Tensor, batch_idx: int = 0) -> Tensor:
        for number in self.marked if len(tokens) >= self.at_least else ():
            vars(self.blocks[number])["last"] = len(tokens)
        return super().training_step(tokens, batch_idx)


def test_units_on_which_the_step_sets_attributes_run() -> None:
    model = Marking()
    model.marked = 1, 3
    first = recorded(model, 2)
    assert AlikeUnits(first.record, first.units, first.fake_parameters.names).first == [0, 1, 2, 1, 4, 1, 6]
    assert seen(recorded(model, 3, first)) == seen(recorded(model, 3))
    assert not any(hasattr(block, "last") for block in model.blocks)


def test_a_unit_that_stands_by_is_as_before_whatever_the_step_sets_on_it() -> None:
    model = Marking()
    model.marked, model.at_least = (3,), 3
    first = recorded(model, 2)
    assert seen(recorded(model, 3, first)) == seen(recorded(model, 3))
    assert not hasattr(model.blocks[3], "last")
