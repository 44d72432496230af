"""Which plan serves a step, where more than the shapes of its batch decides which units it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Blocks
from torch import Tensor

from lightning_pp.planning.stage_model import assign_stages, record_model
from lightning_pp.planning.step_plans import StepPlanCache
from lightning_pp.schedule import Placement
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.strategy.step.progress import Progress, watched_batch_idx

Depth = Callable[[Blocks, int, Tensor], int]


class Steps:
    """Steps of a model of four blocks, of which it calls as many as ``depth`` says, and how often its code ran."""

    def __init__(self, depth: Depth) -> None:
        self.depth = depth
        self.num_runs = 0
        self.module = Blocks()
        self.module.depth = 2
        split = assign_stages(
            record_model(
                self.module,
                device=torch.device("cpu"),
                step=self.step(0, torch.zeros(2, 8)),
                with_gradients=True,
                patterns=None,
                num_stages=2,
            ),
            placement=Placement.interleaved(2),
        )
        self.book: StepPlanCache = split.plans

    def step(self, number: int, batch: Tensor) -> Callable[[DryRun], Tensor]:
        def run(dry: DryRun) -> Tensor:
            self.num_runs += 1
            h = batch
            index = watched_batch_idx(number, dry.ask_of_progress)
            for block in self.module.blocks[: self.depth(self.module, index, h)]:
                h = block(h)
            return self.module.head(h).mean()

        return run

    def num_blocks(self, number: int, batch: Tensor, text: str | None = None) -> int:
        """How many blocks the plan of a step calls."""
        data: Any = (batch, text) if text else batch
        situation = self.book.situation(data, Progress(number, number, 0))
        plan = self.book.plan(0, self.step(number, batch), with_gradients=True, situation=situation)
        return len(plan.record.calls) - 1


@pytest.mark.parametrize(
    "depth",
    [
        lambda _, number, batch: 2 if number < 30 else 4,
        lambda _, number, batch: 4 if number / 10 - 1 >= 2 else 2,
        lambda _, number, batch: 4 if not bool(30 // max(number, 1)) or number == 30 else 2,
    ],
)
def test_a_late_change_is_seen_and_what_leads_up_to_it_costs_nothing(depth: Depth) -> None:
    steps = Steps(depth)
    found = [steps.num_blocks(number, torch.zeros(2, 8)) for number in range(60)]
    assert found == [2] * 30 + [4] * 30
    assert steps.num_runs < 30


def test_an_attribute_that_counts_is_soon_left_alone_and_another_is_not() -> None:
    steps = Steps(lambda module, number, batch: module.depth)
    found = []
    for number in range(40):
        steps.module.num_seen = number
        steps.module.depth = 4 if number >= 30 else 2
        found.append(steps.num_blocks(number, torch.zeros(2, 8)))
    assert found == [2] * 30 + [4] * 10
    assert steps.num_runs < 20


def test_values_that_decide_are_always_looked_at() -> None:
    steps = Steps(lambda module, number, batch: 4 if batch.sum() > 0 else 2)
    signs = [1.0, -1.0, -1.0] * 20
    assert [steps.num_blocks(0, torch.full((2, 8), sign)) for sign in signs] == [4 if sign > 0 else 2 for sign in signs]


@pytest.mark.parametrize("text", [None, "what else a batch holds"])
def test_values_and_text_that_decide_nothing_are_soon_left_alone(text: str | None) -> None:
    steps = Steps(lambda module, number, batch: 4 if text or batch.isfinite().all() else 2)
    assert {steps.num_blocks(0, torch.rand(2, 8), text) for _ in range(40)} == {4}
    assert steps.num_runs < 15
