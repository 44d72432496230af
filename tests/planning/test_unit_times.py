"""Units that run alone to be measured: what is measured once, what has memory, and the times of units that sleep."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import choose_layout
from one_process import CPU, OneProcessPipeline, recorded
from torch import Tensor, nn

from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.schedules.given_costs import GivenCosts
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.stage_model import RecordedModel, record_model
from lightning_pp.planning.steps.plans import UnrecordedRun
from lightning_pp.planning.tuning import Layout, LayoutRequest
from lightning_pp.planning.unit_times.distinct import groups_alike
from lightning_pp.planning.unit_times.measure import UnitTimes, run_each_once
from lightning_pp.split.cut.unit_costs import stage_costs
from lightning_pp.split.fakes.parameters import has_data
from lightning_pp.split.fakes.without_memory import parameters_without_memory

RUNS: list[nn.Module] = []  # not on the module, whose state is as before
WORDS, WIDTH = 12, 8
LONG_S, SHORT_S = 0.06, 0.02


class Sleeping(torch.autograd.Function):
    """Sleeps in forward, and twice as long in the backward of its input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Short(nn.Module):
    seconds = SHORT_S

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        if has_data(hidden):
            RUNS.append(self)
        return hidden + self.linear(Sleeping.apply(hidden, self.seconds))


class Long(Short):
    seconds = LONG_S


class Net(nn.Module):
    """Two long blocks, four short ones, and a loss that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Long(), Long(), *(Short() for _ in range(4))])
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Tensor) -> Tensor:
        hidden = self.embedding(batch)
        for block in self.blocks:
            hidden = block(hidden)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch.flatten())
        self.log("loss", loss)  # type: ignore[operator]
        return Sleeping.apply(loss, LONG_S)


BATCH = torch.arange(2 * 5).view(2, 5) % WORDS


class Passing(nn.Module):
    """Returns an argument as it was given, besides its result, as blocks of T5 return their position bias."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.linear = place, nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + self.linear(hidden) * given[0] * given[1], given[self.place]


class PassingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passing(place) for place in (0, 0, 0, 1))

    def training_step(self, batch: Tensor) -> Tensor:
        hidden, given = batch.unsqueeze(2).expand(-1, -1, WIDTH).float(), (torch.ones(WIDTH), torch.ones(WIDTH))
        for block in self.blocks:
            hidden, _ = block(hidden, *given)
        return hidden.square().mean()


def recording_of(module: nn.Module) -> RecordedModel:
    return record_model(
        module, device=CPU, step=recorded(module, BATCH), with_gradients=True, patterns=None, num_stages=2
    )


@pytest.fixture(scope="module")
def measured() -> tuple[Net, UnitTimes, GivenCosts]:
    with parameters_without_memory():
        module = Net()
    times = UnitTimes(recorded(module, BATCH), CPU, most_seconds=2.0)
    RUNS.clear()
    return module, times, times.of(recording_of(module))


def test_units_that_return_the_same_argument_as_it_was_given_are_alike() -> None:
    groups = [[group.units for group in alike] for alike in groups_alike(recording_of(PassingNet())).values()]
    assert [("blocks.1",), ("blocks.2",)] in groups and [("blocks.3",)] in groups


def test_units_take_what_they_sleep(measured: tuple[Net, UnitTimes, GivenCosts]) -> None:
    costs = measured[1].costs
    for unit, seconds in (("blocks.0", LONG_S), ("blocks.3", SHORT_S), ("head", LONG_S)):
        assert costs[unit].forward >= 1e3 * seconds, "the loss counts for the head"
        assert costs[unit].backward_input >= 2e3 * seconds
        assert costs[unit].backward_weight < 1e3 * seconds
    assert costs["embedding"].total < 1e3 * SHORT_S, "nothing of the others counts for it"
    assert costs["blocks.0"].total > costs["blocks.3"].total


def test_what_does_the_same_is_measured_once(measured: tuple[Net, UnitTimes, GivenCosts]) -> None:
    module, times, _ = measured
    assert times.num_measured == 4, "embedding, long, short, head"
    runs = [RUNS.count(block) for block in module.blocks]
    assert runs[0] == 0 < runs[1], "of two the second"
    assert sorted(runs[2:])[:3] == [0, 0, 0] and max(runs[2:]) > 0
    assert times.costs["blocks.0"] == times.costs["blocks.1"] != times.costs["blocks.2"]
    assert "4 distinct units of 8, each alone on cpu" in times.about


def test_only_the_unit_that_runs_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with parameters_without_memory():
        module = Net()
    recording = recording_of(module)
    found: list[set[str]] = []

    def forward(self: Short, hidden: Tensor) -> Tensor:
        if has_data(hidden):
            found.append({name for name, parameter in module.named_parameters() if has_data(parameter)})
        return self.linear(hidden)

    monkeypatch.setattr(Short, "forward", forward)
    UnitTimes(recorded(module, BATCH), CPU, most_seconds=0.0).of(recording)
    assert found == [{f"blocks.{block}.linear.{key}" for key in ("weight", "bias")} for block in (1, 4)]
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.head.weight is module.embedding.weight


def test_without_any_time_each_runs_once() -> None:
    module = Net()
    times = UnitTimes(recorded(module, BATCH), CPU, most_seconds=0.0)
    before = [parameter.clone() for parameter in module.parameters()]
    times.of(recording_of(module))
    assert sum(RUNS.count(block) for block in module.blocks) == 2
    assert times.fewest_runs == 1 and "at least 1 run each" in times.about
    for parameter, value in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, value) and parameter.grad is None, "the model is as it was"


def test_training_is_cut_by_them_with_messages_as_estimated(measured: tuple[Net, UnitTimes, GivenCosts]) -> None:
    module, times, given = measured
    recording = recording_of(module)

    def layout_by(costs: GivenCosts | None) -> Layout:
        options = ScheduleOptions(schedule_source("1f1b"), None, costs)
        request = LayoutRequest(options, 2, 4, CutOptions(), "cpu")
        return choose_layout(recording.record, recording.num_parameters, request)

    layout = layout_by(given)
    taken = layout.costs.per_stage(2).forward
    assert sum(taken) == pytest.approx(sum(cost.forward for cost in times.costs.values()))
    first = sum(cost.forward for unit, cost in times.costs.items() if layout.partition.stage_of_unit[unit] == 0)
    assert taken[0] == pytest.approx(first)
    p2p = layout.costs.per_stage(2).p2p
    assert p2p == layout_by(None).costs.per_stage(2).p2p and p2p[0] > 0


def test_planned_stages_take_what_they_are_measured_to_take(measured: tuple[Net, UnitTimes, GivenCosts]) -> None:
    """Beside the plan: the forwards of the stages of a pipeline, by a clock around each."""
    pipeline = OneProcessPipeline(Net, BATCH, 2, split_points=["blocks.1"])
    planned = stage_costs(measured[1].costs, pipeline.split.partition.stage_of_unit, [1.0, 1.0])
    taken: list[list[float]] = [[], []]

    def timed(stage: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = forward(*args, **kwargs)
        taken[stage].append(1e3 * (time.perf_counter() - started))
        return result

    for stage in pipeline.stages:
        stage.runner.forward = partial(timed, stage.number, stage.runner.forward)  # type: ignore[method-assign]
    for _ in range(3):
        pipeline.forward(BATCH)
    by_clock = [min(times) for times in taken]
    sleeps = [1e3 * LONG_S, 1e3 * (2 * LONG_S + 4 * SHORT_S)]
    for found in (planned.per_stage(2).forward, by_clock):
        assert all(time_ms >= slept for time_ms, slept in zip(found, sleeps, strict=True))
        assert found[1] > 1.5 * found[0]


def test_a_step_that_writes_into_its_batch_gets_a_copy_each_time() -> None:
    batch = {"ids": torch.zeros(3)}
    copy = UnrecordedRun(copies_batch=True).own(batch)
    copy["ids"] += 1
    assert batch["ids"].sum() == 0
    assert UnrecordedRun(copies_batch=False).own(batch)["ids"].data_ptr() == batch["ids"].data_ptr()


class Fragile(Short):
    """Cannot run on zeros."""

    def forward(self, hidden: Tensor) -> Tensor:
        if has_data(hidden) and not hidden.any():
            raise ValueError("zeros")
        return super().forward(hidden)


def test_each_distinct_unit_of_a_rank_runs_once_and_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    module = Net()
    module.blocks[1] = Fragile()
    parameters = dict(module.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    draws = torch.get_rng_state()
    RUNS.clear()
    with caplog.at_level("DEBUG"):
        run_each_once(recording_of(module), [f"blocks.{block}" for block in range(1, 6)], recorded(module, BATCH), CPU)
    assert [module.blocks[2]] == RUNS, "four are alike, one cannot run, the others are of other ranks"
    assert "blocks.1 did not run alone on zeros: ValueError: zeros" in caplog.text
    assert torch.equal(torch.get_rng_state(), draws)
    for name, parameter in module.named_parameters():
        assert parameter is parameters[name] and parameter.grad is None
        assert torch.equal(parameter, values[name])
