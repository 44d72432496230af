"""Numbers per stage and rank, against the schedule simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pool import WorkerPool
from simulated_steps import UNEVEN_COSTS, schedule_and_costs, simulated_times
from virtual_time import run_in_virtual_time

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import Action, ActionKind, StageCosts, build_schedule
from lightning_pp.telemetry.metric_table import PIPELINE_METRICS, STAGE_METRICS
from lightning_pp.telemetry.reading import RankReading, StepPrediction
from lightning_pp.telemetry.report import Measurements
from lightning_pp.telemetry.sums import RankSums, imbalance_of, longest_span_bubble
from lightning_pp.telemetry.throughput import Throughput


def readings(peaks_gib: list[float]) -> list[RankReading]:
    return [RankReading(peak, data_wait_ms=10.0 * rank if peak else 0.0) for rank, peak in enumerate(peaks_gib)]


SCHEDULES = ["gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v", "interleaved_1f1b"]


def sums_of(name: str) -> list[RankSums]:
    schedule, costs = schedule_and_costs(name)
    return [
        RankSums.of_step(times, schedule.placement.stages_of_rank(rank))
        for rank, times in enumerate(simulated_times(schedule, costs))
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_are_those_of_the_simulation(name: str) -> None:
    schedule, costs = schedule_and_costs(name)
    simulation = schedule.simulate(costs)
    sums = sums_of(name)
    assert [rank.bubble_fraction for rank in sums] == pytest.approx(simulation.bubble_fraction.per_rank, abs=1e-12)
    assert longest_span_bubble(sums) == pytest.approx(float(simulation.bubble_fraction), abs=1e-12)
    assert simulation.bubble_fraction > 0.05  # there is something to see


@pytest.mark.parametrize("name", SCHEDULES)
def test_means_are_the_costs_of_each_stage(name: str) -> None:
    schedule, _ = schedule_and_costs(name)
    sums = sums_of(name)
    twice = [rank + rank for rank in sums]  # means do not depend on the number of steps
    peaks = [float(rank) for rank in range(len(sums))]
    times = Measurements(schedule.placement, twice, readings(peaks), Throughput()).stage_times()
    assert [stage.forward_ms for stage in times] == pytest.approx(UNEVEN_COSTS["forward"])
    backward = [stage.backward_input_ms + stage.backward_weight_ms for stage in times]
    whole = [sum(pair) for pair in zip(UNEVEN_COSTS["backward_input"], UNEVEN_COSTS["backward_weight"], strict=True)]
    assert backward == pytest.approx(whole)
    merged = [any(a.kind is ActionKind.B for a in schedule.programs[r]) for r in schedule.placement.rank_of_stage]
    for stage, times_of_stage in enumerate(times):
        if not merged[stage]:
            assert times_of_stage.backward_input_ms == pytest.approx(UNEVEN_COSTS["backward_input"][stage])
    if not schedule.splits_backward:
        assert all(stage.backward_weight_ms == 0.0 for stage in times)
    assert [stage.peak_memory_gib for stage in times] == [peaks[rank] for rank in schedule.placement.rank_of_stage]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_not_work_within_the_span_is_waited_for(name: str) -> None:
    schedule, costs = schedule_and_costs(name)
    times = simulated_times(schedule, costs)
    for rank, sums in enumerate(sums_of(name)):
        waits = sum(stage.wait_ms for stage in sums.stages)
        before_the_first = times[rank][0].wait_ms
        assert waits - before_the_first == pytest.approx(sums.span_ms - sums.work_ms)


UNIFORM = StageCosts(3.0, 4.0, 2.0)  # F, I and W of every stage
# the papers' bubbles of p = 4 ranks, each a part of the longest span: arXiv:2401.10241, table 2
BUBBLES_MS = {
    "gpipe": 3 * (3.0 + 4.0 + 2.0),
    "1f1b": 3 * (3.0 + 4.0 + 2.0),
    "zb_h1": 3 * (3.0 + 4.0 - 2.0),
    "zb_h2": 3 * (3.0 + 4.0 - 2 * 2.0),
}


def test_what_real_processes_take_on_emulated_devices_is_what_is_reported(pool: WorkerPool) -> None:
    """Actions are those of the runtime, with a clock that is a number in every message."""
    cases = [(build_schedule(name, num_ranks=4, num_microbatches=9), UNIFORM) for name in BUBBLES_MS]
    by_rank = pool.run(run_in_virtual_time, cases, world_size=4, process_group=True, timeout=120.0)
    for index, (schedule, _) in enumerate(cases):
        rows = [[*by_rank[rank][index].values()] for rank in range(4)]
        sums = []
        for rank, row in enumerate(rows):
            asked = [0.0, *(end for _, end in row[:-1])]
            times = [
                ActionTimes(action, since, start, end)
                for action, since, (start, end) in zip(schedule.programs[rank], asked, row, strict=True)
            ]
            sums.append(RankSums.of_step(times, [rank]))
        step_ms = max(end for row in rows for _, end in row)
        for row, rank in zip(rows, sums, strict=True):
            idle_after = step_ms - row[-1][1]
            assert rank.work_ms + rank.stages[0].wait_ms + idle_after == pytest.approx(step_ms)
        found = Measurements(schedule.placement, sums, readings([0.0] * 4), Throughput()).stage_times()
        for stage in found:
            assert stage.forward_ms == pytest.approx(3.0, rel=0.03)
            assert stage.backward_ms == pytest.approx(4.0 + 2.0, rel=0.03)
        closed = BUBBLES_MS[schedule.name] / (9 * (3.0 + 4.0 + 2.0) + BUBBLES_MS[schedule.name])
        assert longest_span_bubble(sums) == pytest.approx(closed, abs=0.01), schedule.name


def test_waits_are_a_stages_own() -> None:
    forward, backward = Action(3, ActionKind.F, 0), Action(3, ActionKind.B, 0)
    first, other = Action(0, ActionKind.F, 0), Action(0, ActionKind.F, 1)
    times = [
        ActionTimes(first, 0.0, 0.5, 1.5),
        ActionTimes(forward, 1.5, 4.5, 6.5),
        ActionTimes(other, 6.5, 6.75, 7.75),
        ActionTimes(backward, 8.75, 10.75, 14.75),
    ]
    sums = RankSums.of_step(times, (0, 3))
    assert [stage.wait_ms for stage in sums.stages] == [0.75, 5.0]
    assert [stage.num_microbatches for stage in sums.stages] == [2, 1]
    assert (sums.work_ms, sums.span_ms) == (8.0, 14.25)
    assert sums.stages[1].backward_input_ms == 4.0


def test_nothing_measured_gives_zeros() -> None:
    schedule, _ = schedule_and_costs("1f1b")
    nothing = [RankSums.none(1)] * 4
    metrics = Measurements(schedule.placement, nothing, readings([0.0] * 4), Throughput()).metrics()
    assert set(metrics.values()) == {0.0}


def test_measurements_add_up() -> None:
    schedule, _ = schedule_and_costs("zb_h1")
    peaks = [[1.0, 4.0, 2.0, 2.0], [3.0, 1.0, 2.0, 5.0]]
    first = Measurements(schedule.placement, sums_of("zb_h1"), readings(peaks[0]), Throughput(2, 1.0, 8, 80, 6e12))
    looked_at = [replace(reading, gradient_square=4.0, gradient_squares=(9.0,)) for reading in readings(peaks[1])]
    later, prediction = Throughput(1, 2.0, 4, 40, 6e12), StepPrediction(800.0, (1.0, 2.0, 3.0, 4.0))
    second = Measurements(schedule.placement, sums_of("zb_h1"), looked_at, later, prediction, num_devices=4)
    both = first + second
    assert [reading.peak_memory_gib for reading in both.readings] == [3.0, 4.0, 2.0, 5.0]
    assert both.throughput == Throughput(3, 3.0, 12, 120, 12e12)
    assert both.stage_times()[1].p2p_wait_ms == pytest.approx(first.stage_times()[1].p2p_wait_ms)
    metrics = both.metrics()
    assert metrics["pp/step_ms"] == 1000.0
    assert metrics["pp/tokens_per_s"] == 40.0
    assert metrics["pp/samples_per_s"] == 4.0
    assert metrics["pp/data_wait_ms"] == 2 * 30.0 / 3  # of the rank that waited longest
    assert metrics["pp/tflops_per_device"] == 1.0  # 12 TFLOP in 3 s on 4 devices
    assert metrics["pp/predicted_over_measured"] == 0.8
    assert metrics["pp/gradient_norm"] == 4.0 and metrics["pp/gradient_norm/stage_2"] == 3.0
    assert [metrics[f"pp/activations_gib/stage_{stage}"] for stage in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert "pp/model_flops_utilization" not in metrics
    assert both.metrics(peak_tflops=2.5)["pp/model_flops_utilization"] == 0.4


def of_stages(names: set[str]) -> set[str]:
    return {f"pp/{name}/stage_{stage}" for stage in range(4) for name in names}


def test_only_what_exists_is_logged_and_that_is_what_is_documented() -> None:
    schedule, _ = schedule_and_costs("zb_h1")
    looked_at = [RankReading(1.0, 2.0, 2.0, 0.0, 4.0, (9.0,))] * 4
    prediction, everything = StepPrediction(800.0, (1.0,) * 4), {metric.name for metric in STAGE_METRICS}
    through = Throughput(2, 1.0, 8, 80, 6e12)
    alone = Measurements(schedule.placement, sums_of("zb_h1"), looked_at, through, prediction, num_devices=4)
    # the monitor adds what the trainer and the batches tell
    others = {f"pp/{metric.name}" for metric in PIPELINE_METRICS} - {"pp/samples", "pp/tokens", "pp/learning_rate"}
    gathers = {"gather_exposed_ms", "gather_hidden_ms"}
    reductions = {"reduce_exposed_ms", "reduce_hidden_ms"}
    on_a_cpu = of_stages(everything - {"memory_reserved_gib"} - gathers - reductions)
    assert set(alone.metrics(2.5)) == on_a_cpu | others
    replicas = replace(alone, num_devices=8)
    assert set(replicas.metrics(2.5)) == on_a_cpu | of_stages(reductions) | others
    assert replicas.metrics()["pp/reduce_exposed_ms/stage_3"] == 0.0
    sums = [replace(rank, stages=(replace(rank.stages[0], gather_hidden_ms=2.0),)) for rank in replicas.ranks]
    on_cuda = [replace(reading, memory_reserved_gib=3.0) for reading in looked_at]
    sharded = replace(replicas, ranks=sums, readings=on_cuda)
    assert set(sharded.metrics(2.5)) == of_stages(everything) | others
    assert "pp/activations_gib/stage_0" not in replace(sharded, prediction=None).metrics()


def test_imbalance_is_that_of_the_work() -> None:
    sums = [RankSums(1.0, work_ms, 20.0, ()) for work_ms in (10.0, 10.0, 10.0, 14.0)]
    assert imbalance_of(sums) == pytest.approx(14 / 11 - 1)
