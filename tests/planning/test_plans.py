"""Which plan serves a step, where more than the shapes of its batch decides which units it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import split_model
from small_models import Blocks
from torch import Tensor, nn

from lightning_pp.planning.stage_model import record_model
from lightning_pp.planning.steps.plans import StepPlanCache, key_of, signature_of
from lightning_pp.planning.steps.state import AttributesOutsideUnits, StepState, holds_objects
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.reductions.facts import Facts
from lightning_pp.split.reductions.recording import EarlierRun

Depth = Callable[[Blocks, Any], int]


class Steps:
    """Steps of a model of four blocks, of which it calls as many as ``depth`` says, and how often its code ran."""

    def __init__(self, depth: Depth, module: Blocks | None = None, first: Any = None) -> None:
        self.depth = depth
        self.num_runs = 0
        self.num_recorded = 0
        self.num_units_called = 0
        self.module = module or Blocks()
        self.module.depth = 2
        split = split_model(
            record_model(
                self.module,
                device=torch.device("cpu"),
                step=self.step(torch.zeros(2, 8) if first is None else first),
                with_gradients=True,
                patterns=None,
                num_stages=2,
            ),
            2,
        )
        self.record = split.record
        self.cache: StepPlanCache = split.plans
        self.attributes = AttributesOutsideUnits(self.module, split.units)

    def step(self, batch: Any, progress: Any = None) -> Callable[[DryRun], Tensor]:
        def run(dry: DryRun) -> Tensor:
            self.progress = progress
            self.note_progress_read = dry.note_progress_read
            self.num_runs += 1
            self.num_recorded += isinstance(dry, DryRun)
            h = batch[0] if isinstance(batch, tuple) else batch
            for block in self.module.blocks[: self.depth(self.module, batch)]:
                self.num_units_called += 1
                h = block(h)
            return self.module.head(h).mean()

        return run

    def num_blocks(self, batch: Any, progress: Any = None) -> int:
        """How many blocks the plan of a step calls."""
        plan = self.cache.plan(
            signature_of(batch),
            self.step(batch, progress),
            with_gradients=True,
            state=StepState(progress, self.attributes.version()),
            rehearses=holds_objects(batch),
        )
        return len(plan.record.calls) - 1


def test_what_stays_as_it_was_costs_no_run() -> None:
    steps = Steps(lambda module, batch: module.depth)
    batch = torch.zeros(2, 8)
    assert steps.num_blocks(batch) == 2
    before = steps.num_runs
    assert [steps.num_blocks(batch, progress) for progress in range(20)] == [2] * 20
    assert steps.num_runs == before


def of_start(batch: Tensor) -> Any:
    return key_of("training_step", [], batch, [])


@pytest.mark.parametrize("size", [2, 6])
def test_the_recording_that_the_model_was_cut_by_serves_the_first_step(size: int) -> None:
    steps = Steps(lambda module, batch: module.depth)
    steps.cache.start_with(of_start(torch.zeros(2, 8)), steps.record, with_gradients=True)
    batch, num_recorded = torch.zeros(size, 8), steps.num_recorded
    plan = steps.cache.plan(of_start(batch), steps.step(batch), with_gradients=True)
    assert steps.num_recorded == num_recorded
    again = steps.cache.record(steps.step(batch), with_gradients=True)
    assert plan.record.sizes == again.sizes
    assert [call.flops for call in plan.record.calls] == [call.flops for call in again.calls]


@pytest.mark.parametrize("change", ["attribute", "unit", "mode", "frozen"])
def test_the_recording_that_the_model_was_cut_by_does_not_serve_another_step(change: str) -> None:
    steps = Steps(lambda module, batch: module.depth)
    batch, module, frozen = torch.zeros(2, 8), steps.module, []
    steps.cache.start_with(of_start(batch), steps.record, with_gradients=True)
    if change == "attribute":
        module.depth = 4
    elif change == "unit":
        module.blocks[0].scale = 2.0
    elif change == "mode":
        module.blocks[1].eval()
    else:
        frozen = ["blocks.0.weight"]
    num_recorded = steps.num_recorded
    key = key_of("training_step", [], batch, frozen)
    plan = steps.cache.plan(key, steps.step(batch), with_gradients=True)
    assert steps.num_recorded == num_recorded + 1
    assert len(plan.record.calls) == module.depth + 1


def masked_mean(h: Tensor, batch: Tensor) -> Tensor:
    mask = batch[:, 0] > 0
    return (h.sum(-1) * mask).sum() / mask.sum()


def weighted(h: Tensor, batch: Tensor) -> Tensor:
    weights = batch.abs().mean(-1)
    return (h.mean(-1) * weights).sum() / weights.sum() + 1e-3 * h.square().mean()


def with_its_number(h: Tensor, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(h, batch.argmax(-1), reduction="sum") / len(batch)


def in_a_loop(h: Tensor, batch: Tensor) -> Tensor:
    return torch.stack([row.square().sum() for row in h]).mean()


@pytest.mark.parametrize("loss", [masked_mean, weighted, with_its_number, in_a_loop])
def test_reductions_of_a_rehearsal_are_those_of_a_dry_run(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Ends(Steps):
        def step(self, batch: Any, progress: Any = None) -> Callable[[DryRun], Tensor]:
            def run(dry: DryRun) -> Tensor:
                self.num_recorded += isinstance(dry, DryRun)
                h = batch
                for block in self.module.blocks:
                    h = block(h)
                return loss(self.module.head(h), batch)

            return run

    torch.manual_seed(1)
    small, large = torch.randn(4, 8), torch.randn(8, 8)
    steps = Ends(lambda *_: 0, first=torch.randn(2, 8))
    found = []
    for rehearses in (True, False):
        facts, earlier, records = Facts(), None, []
        for batch in (small, large):
            step = steps.step(batch)
            plan = steps.cache.plan(signature_of(batch), step, with_gradients=True)
            num_recorded = steps.num_recorded
            if rehearses:
                record = steps.cache.record_of_reductions(plan, step, lambda _: None, earlier, with_gradients=True)
                assert steps.num_recorded == num_recorded
            else:
                record = steps.cache.record(step, with_gradients=True, earlier=earlier)
            records.append(record)
            earlier = EarlierRun(record.reductions, 2.0)
        facts.learn(
            records[0].reductions,
            records[1].reductions,
            2.0,
            has_dynamic_shapes=any(record.has_dynamic_shapes for record in records),
        )
        found.append((facts.by_place, [record.has_dynamic_shapes for record in records]))
    assert found[0][0]
    assert found[0] == found[1]


def test_an_attribute_is_looked_at_however_often_it_has_changed_nothing() -> None:
    steps = Steps(lambda module, batch: module.depth)
    found = []
    for number in range(40):
        steps.module.num_seen = number
        steps.module.depth = 4 if number >= 30 else 2
        found.append(steps.num_blocks(torch.zeros(2, 8)))
    assert found == [2] * 30 + [4] * 10
    assert steps.num_recorded == 3  # one for the cut, one for each depth


@pytest.mark.parametrize("holder", [{"depth": 2}, [2]])
def test_plain_values_in_lists_and_dicts_are_looked_at(holder: Any) -> None:
    key = "depth" if isinstance(holder, dict) else 0
    module = Blocks()
    module.holder = holder
    steps = Steps(lambda module, batch: module.holder[key], module)
    assert steps.num_blocks(torch.zeros(2, 8)) == 2
    holder[key] = 3
    assert steps.num_blocks(torch.zeros(2, 8)) == 3


def test_values_that_decide_are_always_looked_at() -> None:
    steps = Steps(lambda module, batch: 4 if batch.sum() > 0 else 2)
    signs = [-1.0] * 30 + [1.0, -1.0, -1.0] * 20
    assert [steps.num_blocks(torch.full((2, 8), sign)) for sign in signs] == [4 if sign > 0 else 2 for sign in signs]


def test_a_step_that_begins_to_look_at_values_is_recorded_anew() -> None:
    steps = Steps(lambda module, batch: 4 if getattr(module, "flag", False) and batch.sum() > 0 else 2)
    steps.module.flag = False
    high, low = torch.ones(2, 8), -torch.ones(2, 8)
    assert steps.num_blocks(high) == 2
    steps.module.flag = True
    assert [steps.num_blocks(batch) for batch in (low, high, low, high)] == [2, 4, 2, 4]
    steps.module.flag = False
    assert [steps.num_blocks(batch) for batch in (low, high)] == [2, 2]


def test_a_step_that_begins_to_read_progress_is_recorded_anew() -> None:
    def depth(module: Blocks, batch: Any) -> int:
        if not getattr(module, "flag", False):
            return 2
        steps.note_progress_read()
        return 4 if steps.progress > 3 else 2

    steps = Steps(depth)
    steps.module.flag = False
    found = []
    for progress in range(6):
        found.append(steps.num_blocks(torch.zeros(2, 8), progress))
        steps.module.flag = progress >= 1
    assert found == [2, 2, 2, 2, 4, 4]


def test_a_look_at_a_constant_does_not_have_the_step_recorded_again() -> None:
    steps = Steps(lambda module, batch: int(torch.arange(3).max()))
    assert steps.num_blocks(torch.zeros(2, 8)) == 2
    for number in range(10):
        steps.module.num_seen = number
        assert steps.num_blocks(torch.zeros(2, 8)) == 2
    assert steps.num_recorded == 2  # one for the cut


def test_what_was_seen_under_other_conditions_says_nothing() -> None:
    steps = Steps(lambda module, batch: 4 if batch.sum() > 0 and module.flag else 2)
    steps.module.flag = False
    high, low = torch.ones(2, 8), -torch.ones(2, 8)
    assert steps.num_blocks(high) == 2
    steps.module.flag = True
    assert [steps.num_blocks(batch) for batch in (low, high, low, high)] == [2, 4, 2, 4]


@pytest.mark.parametrize("text", ["text", b"bytes"])
def test_text_may_decide(text: Any) -> None:
    steps = Steps(lambda module, batch: 4 if len(batch[1]) > 20 else 2)
    texts = [text * (1 + number // 12) for number in range(60)]
    found = [steps.num_blocks((torch.zeros(2, 8), each)) for each in texts]
    assert found == [4 if len(each) > 20 else 2 for each in texts]


class Packs(nn.Module):
    """Gives as many rows as the longest of its sequences has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.linear(x)[:, : int(lengths.max())]  # type: ignore[no-any-return]


class PacksFirst(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Packs()


class PackingSteps(Steps):
    def step(self, batch: Any, progress: Any = None) -> Callable[[DryRun], Tensor]:
        def run(dry: DryRun) -> Tensor:
            self.num_recorded += isinstance(dry, DryRun)
            first, *others = self.module.blocks
            h = first(torch.zeros(2, 5, 8), batch)
            for block in others:
                h = block(h)
            return self.module.head(h).mean()

        return run


def test_a_unit_that_looks_at_values_is_run_on_fakes_and_no_other_shape_is_recorded() -> None:
    lengths = [[5, 1], [5, 2], [3, 5], [5, 5], [4, 4], [1, 4], [2, 5]]
    steps = PackingSteps(lambda *_: 0, PacksFirst(), torch.tensor(lengths[0]))
    num_recorded = []
    for each in lengths:
        batch = torch.tensor(each)
        plan = steps.cache.plan(0, steps.step(batch), with_gradients=True)
        spec = plan.record.calls[0].leaves[0].spec
        assert spec is not None and spec.shape == (2, max(each), 8)
        num_recorded.append(steps.num_recorded - 1)
    assert num_recorded == [1] * 7
