"""Which blocks are cut inside, and which stay whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.model_cutter import ModelCutter, StepToCut
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.planning.plan_summary import summarize_cut
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.schedule import build_schedule
from lightning_pp.split.data.microbatch import split_batch
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.fakes.without_memory import parameters_without_memory
from lightning_pp.split.memory.state_memory import StepDtypes

WIDTH, ROWS = 1024, 512


class Block(nn.Module):
    """Two equal halves, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other_norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.norm(h))
        return h + self.mlp(self.other_norm(h))


class WithScale(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) * self.scale


class WithBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) * self.scale


class Remembering(Block):
    def forward(self, h: Tensor) -> Tensor:
        self.last = h
        return super().forward(h)


class Looking(Block):
    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.norm(h))
        return h + self.mlp(self.other_norm(h)) if h.sum() > 0 else h - self.mlp(self.other_norm(h))


class Checkpointed(Block):
    def forward(self, h: Tensor) -> Tensor:
        h = h + torch.utils.checkpoint.checkpoint(self.attention, self.norm(h), use_reentrant=False)
        return h + self.mlp(self.other_norm(h))


class CheckpointedWhole(Block):
    def forward(self, h: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, h, use_reentrant=False)  # type: ignore[no-any-return]


class InAnotherDtype(Block):
    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.norm(h))
        return h + self.mlp(self.other_norm(h.float()).float()).to(h.dtype)


class Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], number: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(number))

    def training_step(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.float().square().mean()


def cut(
    make: Callable[[], nn.Module] = Block,
    *,
    number: int = 5,
    num_ranks: int = 2,
    schedule: str = "zb_h1",
    prepare: Callable[[Blocks], None] = lambda model: None,
    options: dict[str, Any] | None = None,
    dtypes: StepDtypes | None = None,
) -> SplitModel:
    with parameters_without_memory():
        model = Blocks(make, number)
    prepare(model)
    batch = torch.zeros(ROWS, WIDTH, dtype=None if dtypes is None else dtypes.compute)

    def step(_: DryRun) -> Tensor:
        return model.training_step(batch)

    cutter = ModelCutter(
        model,
        PipelineOptions(ScheduleOptions(schedule_source(schedule)), **(options or {})),
        ParallelSizes(num_ranks, 1),
        StepToCut(batch, split_batch(batch, 1) * 8, step, dtypes=dtypes or StepDtypes()),
    )
    return cutter.split(build_schedule(schedule, num_ranks=num_ranks, num_microbatches=1).placement).split


def refined(split: SplitModel) -> tuple[str, ...]:
    return () if split.refinement is None else split.refinement.blocks


def test_the_block_in_the_middle_is_cut_and_no_other() -> None:
    split = cut()
    assert refined(split) == ("blocks.2",)
    assert [name for name in split.units if name.startswith("blocks.1")] == ["blocks.1"]
    first = split.partition.units_of_stage(0)
    assert first[:3] == ["blocks.0", "blocks.1", "blocks.2.norm"] and first[3] == "blocks.2.attention"
    assert split.partition.units_of_stage(1)[-2:] == ["blocks.3", "blocks.4"]
    work = [stage.flops for stage in summarize_cut(split).stages]
    assert work[0] == work[1]
    assert split.refinement is not None and split.refinement.after_ms < 0.98 * split.refinement.before_ms
    assert str(split.refinement).startswith("Cuts fall inside of a block (blocks.2): a step is estimated to take ")
    assert "% less time than with this block whole." in str(split.refinement)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "interleaved_zb"])
def test_every_placement_is_refined(schedule: str) -> None:
    split = cut(number=7, num_ranks=3, schedule=schedule)
    assert refined(split)
    assert {*split.partition.stage_of_unit.values()} == set(range(split.placement.num_stages))


def test_blocks_that_can_be_shared_out_evenly_stay_whole() -> None:
    assert not refined(cut(number=4))


def test_a_step_of_actions_and_messages_alone_is_not_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks take next to no time, so that no cut inside of them makes it 2 % shorter."""
    monkeypatch.setitem(globals(), "WIDTH", 8)
    steps: list[Blocks] = []
    run = Blocks.training_step
    monkeypatch.setattr(Blocks, "training_step", lambda model, batch: steps.append(model) or run(model, batch))
    assert not refined(cut(options={"cut": CutOptions(units=["blocks.*"])}))
    num_of_one = len(steps)
    assert num_of_one and not refined(cut()) and len(steps) == 2 * num_of_one


def test_blocks_are_cut_inside_where_whole_ones_do_not_keep_the_limit_of_memory() -> None:
    def cut_within(limit_gib: float, **options: Any) -> SplitModel:
        return cut(number=3, options={"device_memory_gib": limit_gib, **options})

    whole = {"cut": CutOptions(units=["blocks.*"])}
    with pytest.raises(ConfigurationError, match="the best one needs") as refusal:
        cut_within(1e-3, **whole)
    needed = re.search(r"best one needs ([\d.]+) GiB", str(refusal.value))
    assert needed is not None
    limit = 0.95 * float(needed[1])
    with pytest.raises(ConfigurationError, match="the best one needs"):
        cut_within(limit, **whole)
    split = cut_within(limit)
    assert refined(split) == ("blocks.1",)
    assert str(split.refinement).endswith("(blocks.1): no cut between whole blocks stays within the memory limit.")
    with pytest.raises(ConfigurationError, match="the best one needs"):
        cut_within(1e-3)


def test_blocks_stay_whole_where_the_user_says_what_units_are() -> None:
    assert not refined(cut(options={"cut": CutOptions(units=["blocks.*"])}))


def test_a_cut_that_is_named_inside_a_block_is_made() -> None:
    split = cut(options={"cut": CutOptions(split_points=["blocks.1.other_norm"])})
    assert split.partition.units_of_stage(0) == ["blocks.0", "blocks.1.norm", "blocks.1.attention"]
    assert "blocks.2" in split.units and "blocks.1" not in split.units


def test_activation_checkpointing_is_for_parts_of_blocks_too() -> None:
    split = cut(options={"activation_checkpointing": True})
    assert refined(split) == ("blocks.2",)
    assert split.recomputation is not None and split.recomputation.units == frozenset(split.units)


def hooked(model: Blocks) -> None:
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: None)


def overridden(model: Blocks) -> None:
    for block in model.blocks:
        block.forward = block.forward  # type: ignore[method-assign]


def compiled(model: Blocks) -> None:
    for block in model.blocks:
        block.compile(backend="eager")


@pytest.mark.parametrize("make", [Checkpointed, CheckpointedWhole])
def test_blocks_that_checkpoint_themselves_are_cut_as_well(make: Callable[[], nn.Module]) -> None:
    assert refined(cut(make)) == ("blocks.2",)


def test_what_a_block_checkpoints_itself_costs_what_the_strategys_checkpointing_does() -> None:
    by_model = cut(CheckpointedWhole, number=4).partition.unit_costs
    by_strategy = cut(number=4, options={"activation_checkpointing": True}).partition.unit_costs
    without = cut(number=4).partition.unit_costs
    assert by_model == by_strategy
    product = 2 * ROWS * WIDTH * WIDTH  # that of attention; the last one is not needed again
    assert {by_model[unit].backward_input - without[unit].backward_input for unit in without} == {product}


@pytest.mark.parametrize("make", [WithScale, WithBuffer, Remembering, Looking])
def test_blocks_that_are_more_than_their_children_stay_whole(make: Callable[[], nn.Module]) -> None:
    assert not refined(cut(make))


@pytest.mark.parametrize("prepare", [hooked, overridden, compiled])
def test_blocks_that_do_not_run_as_their_class_says_stay_whole(prepare: Callable[[Blocks], None]) -> None:
    assert not refined(cut(prepare=prepare))


def test_blocks_whose_parts_would_get_another_dtype_stay_whole() -> None:
    dtypes = StepDtypes(torch.bfloat16, None)
    assert refined(cut(dtypes=dtypes)) == ("blocks.2",)
    assert not refined(cut(InAnotherDtype, dtypes=dtypes))
