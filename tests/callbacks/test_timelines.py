"""Which steps a fit shows, and that files and TensorBoard have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from page_reading import data_of, view_of
from pool import WorkerPool
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from timelines_fit import (
    NUM_BATCHES,
    SLOW_ACTION,
    SLOW_BATCH,
    SLOW_MS,
    fit_where_nothing_can_be_written,
    fit_with_timelines,
)

from lightning_pp import PipelineMonitor
from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import build_schedule


@pytest.fixture(scope="module")
def folder(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timelines")
    pool.run(fit_with_timelines, str(folder), True, world_size=2, timeout=120)
    return folder / "board" / "run"


@pytest.fixture(scope="module")
def data(folder: Path) -> dict[str, Any]:
    return data_of((folder / "timelines" / "timeline.html").read_text())


def test_every_fourth_step_the_slowest_between_and_the_last_are_kept(data: dict[str, Any]) -> None:
    steps = [(one["step"], one["why"]) for one in data["steps"]]
    assert SLOW_BATCH == 3  # the fourth step is the slowest since the first, which warms up
    assert (3, "every 4 steps; the slowest since step 1") in steps
    rest = [one for one in steps if one[0] != 3]
    assert rest[-1] == (6, "the last step") or rest == [(6, "the last step; the slowest since step 4")]
    assert all(why == "the slowest since step 4" and step in (4, 5) for step, why in rest[:-1])


def test_the_slow_action_is_seen_in_the_step_and_not_in_its_plan(data: dict[str, Any]) -> None:
    index = [one["step"] for one in data["steps"]].index(3)
    took = {
        view: {name: end - start for rank in view_of(data, index, view) for name, (_, _, start, end) in rank}
        for view in ("measured", "planned")
    }
    assert took["measured"][SLOW_ACTION] > SLOW_MS > took["planned"][SLOW_ACTION]
    # rank 0 waited for what came late
    waits = {name: start - begun for name, (_, begun, start, _) in view_of(data, index, "measured")[0]}
    assert max(waits.values()) > SLOW_MS / 2


def test_page_and_trace_have_the_program_and_the_same_times(folder: Path, data: dict[str, Any]) -> None:
    events = json.loads((folder / "timelines" / "timeline.json").read_text())["traceEvents"]
    begins = {event["name"]: event["ts"] for event in events if event.get("cat") == "step"}
    assert list(begins) == [f"step {one['step']}" for one in data["steps"]]
    program = build_schedule("zb_h1", num_ranks=2, num_microbatches=4).programs
    ends = {
        (event["pid"], event["name"], round(event["ts"] + event["dur"]))
        for event in events
        if event["ph"] == "X" and event["cat"] in "FIWB"
    }
    for index, step in enumerate(data["steps"]):
        for process, view in ((1, "measured"), (2, "planned")):
            for rank, row in enumerate(view_of(data, index, view)):
                assert [name for name, _ in row] == [str(action) for action in program[rank]]
                for name, (_, _, start, end) in row:
                    assert end > start
                    at = round(begins[f"step {step['step']}"] + 1e3 * end)
                    assert any((process, name, at + by) in ends for by in (-1, 0, 1)), (view, name)


def test_tensorboard_shows_text(folder: Path) -> None:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    assert not events.Tags()["images"]
    (tag,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("pp/timeline")]
    text = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
    assert "rank 1 (stage 1)" in text and "zb_h1, 4 microbatches" in text
    assert all(line.startswith("    ") for line in text.splitlines())


@pytest.mark.nightly
def test_a_last_step_that_is_one_of_those_is_there_once_and_in_the_trace(pool: WorkerPool, tmp_path: Path) -> None:
    assert NUM_BATCHES == 7
    pool.run(fit_with_timelines, str(tmp_path), False, 7, world_size=2, timeout=120)
    data = data_of((tmp_path / "own" / "timeline.html").read_text())
    assert [(one["step"], one["why"]) for one in data["steps"]] == [
        (3, "the slowest since step 1"),
        (6, "every 7 steps"),
    ]
    events = json.loads((tmp_path / "own" / "timeline.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "step"] == ["step 3", "step 6"]


def test_a_folder_that_cannot_be_written_is_told_and_training_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    first, last = pool.run(fit_where_nothing_can_be_written, str(tmp_path), world_size=2, timeout=120)
    told = [text for text in first if "timeline" in text]
    assert len(told) == 2 and all(str(tmp_path / "own") in text and "Training goes on" in text for text in told)
    assert not [text for text in last if "timeline" in text]


@pytest.mark.parametrize("every", [0, -1])
def test_an_impossible_interval_is_refused(every: int) -> None:
    with pytest.raises(ConfigurationError, match=f"timeline_every_n_steps={every}.*at least 1"):
        PipelineMonitor(timeline_every_n_steps=every)
