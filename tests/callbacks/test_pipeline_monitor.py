"""The monitor's numbers in loggers and in its report, and what it costs in between."""

from __future__ import annotations

import csv
import math
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import yaml
from monitored_fit import (
    BATCH_SIZE,
    LENGTH,
    NUM_BATCHES,
    MemoryLogger,
    fit_one_batch_then_a_short_one,
    fit_replicas,
    fit_with_loggers,
    loader,
)
from page_reading import data_of, view_of
from pool import WorkerPool
from small_models import WIDTH, TokenModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode
from wandb_runs import config_of, history_of, records
from wandb_runs import table as table_of

from lightning_pp import PipelineMonitor
from lightning_pp.errors import ConfigurationError
from lightning_pp.telemetry.metric_table import PIPELINE_METRICS, STAGE_METRICS

TIMES = ["forward_ms", "backward_input_ms", "backward_weight_ms"]
COLLECTIVES, EXTENTS = ("gather", "reduce"), ("exposed", "hidden")
OF_COLLECTIVES = {f"{collective}_{extent}_ms" for collective in COLLECTIVES for extent in EXTENTS}
NUM_TOKENS = BATCH_SIZE * LENGTH
LOGGED_STEPS = [1, 3, 5]  # every second of seven, as Lightning counts


def metric_names(num_stages: int, *, absent: set[str], has_tokens: bool = True) -> set[str]:
    """What a run on CPUs logs, whose allocator reserves nothing."""
    names = {metric.name for metric in STAGE_METRICS} - absent - {"memory_reserved_gib"}
    stages = {f"pp/{name}/stage_{stage}" for stage in range(num_stages) for name in names}
    others = {f"pp/{metric.name}" for metric in PIPELINE_METRICS}
    return stages | others - (set() if has_tokens else {"pp/tokens", "pp/tokens_per_s"})


ALL_NAMES = metric_names(2, absent=OF_COLLECTIVES)


def check_plausible(metrics: dict[str, float], num_stages: int = 2, num_microbatches: int = 4) -> None:
    step_ms = metrics["pp/step_ms"]
    for stage in range(num_stages):
        names = [metric.name for metric in STAGE_METRICS]
        of_stage = {
            name: metrics[f"pp/{name}/stage_{stage}"] for name in names if f"pp/{name}/stage_{stage}" in metrics
        }
        passes = [of_stage[name] for name in TIMES]
        assert of_stage["backward_ms"] == pytest.approx(passes[1] + passes[2])
        assert passes[0] > 0 and passes[1] > 0 and passes[2] >= 0
        assert num_microbatches * sum(passes) < step_ms
        assert 0 <= of_stage["bubble_fraction"] < 1
        # a rank may begin to wait while rank 0 still writes its logs, so waits are not bounded by the step
        assert 0 <= of_stage.get("p2p_wait_ms", 0) < 60_000
        assert 0.05 < of_stage["memory_allocated_gib"] <= of_stage["peak_memory_gib"] + 0.01 < 50
    assert 0 <= metrics["pp/bubble_fraction"] < 1


@pytest.fixture(scope="module")
def logged(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a run of two ranks, and what each of them saw."""
    folder = tmp_path_factory.mktemp("monitored")
    homes = {f"WANDB_{kind}_DIR": str(folder / "home") for kind in ("DATA", "CACHE", "CONFIG")}
    ranks = pool.run(
        fit_with_loggers, str(folder), world_size=2, timeout=180, environ={**homes, "WANDB_SILENT": "true"}
    )
    return folder, ranks


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    return history_of(records(folder))


def test_wandb_has_every_metric_at_lightnings_steps(logged: tuple[Path, list[dict[str, Any]]]) -> None:
    history = wandb_history(logged[0])
    rows = [row for row in history if "pp/step_ms" in row]
    assert [row["trainer/global_step"] for row in rows] == LOGGED_STEPS
    assert [row["trainer/global_step"] for row in history if "train_loss" in row] == LOGGED_STEPS
    for row in rows:
        # one replica gathers and reduces nothing
        assert {name for name in row if name.startswith("pp")} == ALL_NAMES
        check_plausible(row)
        assert row["pp/tokens_per_s"] * row["pp/step_ms"] / 1e3 == pytest.approx(NUM_TOKENS)


def test_wandb_has_the_table_of_stages_and_the_timeline(logged: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = logged
    history = wandb_history(folder)
    (table,) = [row for row in history if "pp/stages._type" in row or "pp/stages" in row]
    assert table["_step"] == 0
    stages = ranks[0]["report"]["stages"]
    assert table_of(folder, "pp/stages") == [
        {"stage": s["stage"], "rank": s["stage"], "units": ", ".join(s["units"]), "num_parameters": s["num_parameters"]}
        for s in stages
    ]
    (page,) = folder.rglob("media/html/pp/*.html")
    data = data_of(page.read_text())
    assert (data["program"]["name"], data["program"]["num_microbatches"]) == ("zb_h1", 4)
    last = view_of(data, "measured")
    assert list(map(len, last)) == list(map(len, ranks[0]["report"]["timeline"].ranks))


def test_wandb_has_a_chart_and_a_table_over_the_stages(logged: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = logged
    stages = ranks[0]["report"]["stages"]
    numbers = ("forward_ms", "backward_input_ms", "backward_weight_ms", "bubble_fraction", "peak_memory_gib")
    last = table_of(folder, "pp/over_stages")
    assert last == [{"stage": s["stage"], **{name: pytest.approx(s[name]) for name in numbers}} for s in stages]
    # after the first and the second of three loggings, and at the end
    history = wandb_history(folder)
    assert sum("pp/over_stages._type" in row or "pp/over_stages" in row for row in history) == 3
    lines = table_of(folder, "pp/times_over_stages_table")
    assert lines == [
        {"step": s["stage"], "lineKey": name, "lineVal": pytest.approx(s[name])} for name in numbers[:3] for s in stages
    ]


def test_wandb_has_the_plan(logged: tuple[Path, list[dict[str, Any]]]) -> None:
    config = config_of(records(logged[0]))
    sizes = ("pipeline_parallel_size", "data_parallel_size", "world_size", "num_microbatches", "num_stages")
    assert [config[f"pp/{name}"] for name in sizes] == [2, 1, 2, 4, 2]
    assert (config["pp/schedule"], config["pp/costs_from"]) == ("zb_h1", "estimated")
    assert config["pp/num_parameters"] == sum(p.numel() for p in TokenModel().parameters())
    assert config["pp/version_torch"] == str(torch.__version__)
    assert config["pp/units/stage_0"].startswith("embedding, blocks.0")
    chosen, *others = table_of(logged[0], "pp/schedules")
    assert (chosen["schedule"], chosen["is_chosen"], chosen["num_stages"]) == ("zb_h1", True, 2)
    assert {"1f1b", "gpipe", "zb_h2"} <= {row["schedule"] for row in others if not row["is_chosen"]}
    gpipe = next(row for row in others if row["schedule"] == "gpipe")
    assert chosen["step_ms"] < gpipe["step_ms"] and chosen["bubble_fraction"] < gpipe["bubble_fraction"]


def test_gradients_bytes_operations_and_counts_are_right(logged: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, _) = logged
    with FlopCounterMode(display=False) as counter:
        module = TokenModel()
        module.loss_of(next(iter(loader()))).backward()
    for (step, row), num_batches in zip(first["rows"][1:-1], (2, 4, 6), strict=True):
        norms = first["norms"][step]
        assert row["pp/gradient_norm"] == pytest.approx(norms["grad_2.0_norm_total"], rel=1e-5)
        for stage in first["report"]["stages"]:
            own = [value for name, value in norms.items() if name.partition("/")[2].startswith(tuple(stage["units"]))]
            assert row[f"pp/gradient_norm/stage_{stage['stage']}"] == pytest.approx(math.hypot(*own), rel=1e-5)
        # the first layer takes embeddings of ids, so what its embedding costs is no product either way
        flops = row["pp/tflops_per_device"] * 1e12 * 2 * row["pp/step_ms"] / 1e3
        assert flops == pytest.approx(counter.get_total_flops(), rel=0.01)
        assert row["pp/model_flops_utilization"] == pytest.approx(row["pp/tflops_per_device"] / 1e-3)
        # a residual stack: one sum goes to the next stage, and its gradient comes back
        sent = BATCH_SIZE * LENGTH * WIDTH * 4
        assert row["pp/sent_bytes/stage_0"] == row["pp/sent_bytes/stage_1"] == sent
        assert (row["pp/samples"], row["pp/tokens"]) == (num_batches * BATCH_SIZE, num_batches * NUM_TOKENS)
        assert row["pp/learning_rate"] == 0.1
        assert 0 < row["pp/data_wait_ms"] < row["pp/step_ms"]


def test_csv_has_the_same(logged: tuple[Path, list[dict[str, Any]]]) -> None:
    folder = logged[0] / "csv" / "version_0"
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["pp/step_ms"]]
    assert [int(row["step"]) for row in rows] == LOGGED_STEPS
    for row in rows:
        check_plausible({name: float(row[name]) for name in ALL_NAMES})
    hyperparameters = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert hyperparameters["pp/units/stage_0"].startswith("embedding, blocks.0")
    assert hyperparameters["pp/units/stage_1"].endswith("head")
    assert hyperparameters["pp/rank/stage_1"] == 1


def test_tensorboard_has_the_same(logged: tuple[Path, list[dict[str, Any]]]) -> None:
    (file,) = (logged[0] / "board" / "run").glob("events.out.tfevents.*")
    board = EventAccumulator(str(file))
    board.Reload()
    assert {tag for tag in board.Tags()["scalars"] if tag.startswith("pp")} == ALL_NAMES
    of_rows = dict(logged[1][0]["rows"][1:-1])
    for name in ALL_NAMES:
        scalars = board.Scalars(name)
        assert [scalar.step for scalar in scalars] == LOGGED_STEPS
        assert [scalar.value for scalar in scalars] == pytest.approx([of_rows[step][name] for step in LOGGED_STEPS])


def test_the_progress_bar_has_loss_tokens_and_bubble(logged: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, last) = logged
    assert last["bar"] == []
    assert len(first["bar"]) == NUM_BATCHES
    assert {description.strip() for description, _ in first["bar"]} == {"Epoch 0"}  # there is no last epoch
    assert not {"tokens/s", "bubble", "loss"} & set(first["bar"][0][1])
    rows = dict(first["rows"][1:-1])
    for batch, (_, shown) in enumerate(first["bar"][1:], start=1):
        step = batch - (batch + 1) % 2  # the latest that was logged
        assert shown["tokens/s"] == f"{rows[step]['pp/tokens_per_s']:.0f}"
        assert shown["bubble"] == f"{rows[step]['pp/bubble_fraction']:.1%}"
        assert shown["loss"] == f"{first['losses'][step]:.3f}"


def test_only_rank_zero_writes(logged: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, last) = logged
    *of_steps, (_, diagnosis) = first["rows"]
    assert [step for step, _ in of_steps] == [None, *LOGGED_STEPS]
    assert set(diagnosis) == {"pp/diagnosis"}
    assert last["rows"] == []
    assert last["report"] is None
    assert len(first["files"]) == 1


def test_between_intervals_nothing_is_gathered_or_read(logged: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in logged[1]:
        gathers = [gathers for gathers, _ in rank["after_batches"]]
        reads = [reads for _, reads in rank["after_batches"]]
        assert gathers == [0, 1, 1, 2, 2, 3, 3]
        # the first batch is never read; each interval reads its own steps
        assert reads == [0, 1, 1, 3, 3, 5, 5]
        assert rank["num_gathers"] == 3 + 3  # at the end: the diagnosis, the rest, and the report's timeline


def test_report(logged: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, _) = logged
    report = first["report"]
    stages = report["stages"]
    assert [stage["stage"] for stage in stages] == [0, 1]
    units = [unit for stage in stages for unit in stage["units"]]
    assert units == ["embedding", *(f"blocks.{block}" for block in range(4)), "head"]
    assert sum(stage["num_parameters"] for stage in stages) == sum(p.numel() for p in TokenModel().parameters())
    assert report["first_loss"] == pytest.approx(first["losses"][0])
    assert report["last_loss"] == pytest.approx(first["losses"][-1])
    assert report["last_loss"] < report["first_loss"]
    assert report["tokens_per_s"] * report["step_ms"] / 1e3 == pytest.approx(NUM_TOKENS)
    assert report["samples_per_s"] * report["step_ms"] / 1e3 == pytest.approx(BATCH_SIZE)
    names = [metric.name for metric in STAGE_METRICS]
    metrics = {f"pp/{name}/stage_{stage['stage']}": stage[name] for stage in stages for name in names}
    check_plausible({**metrics, "pp/step_ms": report["step_ms"], "pp/bubble_fraction": report["bubble_fraction"]})
    assert stages[1]["backward_weight_ms"] > 0  # zb_h1 splits the backward of the last stage
    text = report["timeline_text"].splitlines()
    assert [line.split(" (")[0] for line in text[2:]] == ["rank 0", "rank 1"]


def test_replicas_count_all_samples_and_accumulation_logs_optimizer_steps(pool: WorkerPool) -> None:
    first, last = pool.run(fit_replicas, 2, world_size=2, timeout=120)
    assert (last["rows"], last["report"]) == ([], None)
    rows = [(step, row) for step, row in first["rows"] if step is not None]
    assert [step for step, _ in rows] == [0, 1, 2, 3]  # batches 2, 4, 6, and 7, the last
    for _, row in rows:
        names = metric_names(1, absent={"p2p_wait_ms", "sent_bytes"}, has_tokens=False)
        assert set(row) == names
        check_plausible(row, num_stages=1)
        assert row["pp/samples_per_s"] * row["pp/step_ms"] / 1e3 == pytest.approx(2 * BATCH_SIZE)
        # every batch gathers, every second one reduces
        for name in COLLECTIVES:
            extents = [row[f"pp/{name}_{extent}_ms/stage_0"] for extent in EXTENTS]
            assert min(extents) >= 0 and sum(extents) > 0 and extents[0] < row["pp/step_ms"]
    report = first["report"]
    assert report["tokens_per_s"] is None
    # Lightning divides losses by the accumulation; the report's are means over the two replicas
    for name, batch in [("first_loss", 0), ("last_loss", -1)]:
        assert report[name] == pytest.approx(2 * (first["losses"][batch] + last["losses"][batch]) / 2)
    assert first["losses"] != last["losses"]
    assert report["first_loss"] == pytest.approx(math.log(13), rel=0.3)
    assert first["num_gathers"] == last["num_gathers"] == 0  # pipelines of one rank


def test_one_batch_is_reported_although_it_is_the_warm_up(pool: WorkerPool) -> None:
    (once, short), (nothing, _) = pool.run(fit_one_batch_then_a_short_one, world_size=2, timeout=120)
    report = once["report"]
    assert report["first_loss"] == report["last_loss"] == pytest.approx(once["losses"][0])
    assert [stage["stage"] for stage in report["stages"]] == [0, 1, 2, 3]
    assert all(stage["forward_ms"] > 0 for stage in report["stages"])
    assert report["stages"][0]["bubble_fraction"] == report["stages"][3]["bubble_fraction"]  # of their rank
    assert nothing["report"] is None
    assert len(short["losses"]) == 3
    assert short["num_microbatches"] == 4  # the picture is of a whole batch, not of the last with 2


def test_other_strategies_are_told_once() -> None:
    monitor, memory = PipelineMonitor(), MemoryLogger()
    options: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer = L.Trainer(
                accelerator="cpu", devices=1, logger=memory, callbacks=[monitor], enable_model_summary=False, **options
            )
            trainer.fit(TokenModel(), loader())
    told = [str(warning.message) for warning in caught if "PipelineMonitor" in str(warning.message)]
    assert len(told) == 1
    assert "SingleDeviceStrategy" in told[0] and "PipelineParallelStrategy" in told[0]
    assert monitor.report is None
    assert memory.monitored() == []


@pytest.mark.parametrize("every_n_steps", [0, -3])
def test_an_impossible_interval_is_refused(every_n_steps: int) -> None:
    with pytest.raises(ConfigurationError, match=f"every_n_steps={every_n_steps}.*log_every_n_steps"):
        PipelineMonitor(every_n_steps)
