"""Which steps a fit shows, and that its files have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from page_reading import data_of, view_of
from pool import WorkerPool
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
def slow(folder: Path) -> dict[str, Any]:
    return data_of((folder / "timelines" / f"after-batch-{SLOW_BATCH}.html").read_text())


def test_the_page_is_of_the_latest_step_and_replaced_every_fourth(folder: Path, slow: dict[str, Any]) -> None:
    pages = sorted((folder / "timelines").glob("after-batch-*.html"))
    assert [page.name for page in pages] == ["after-batch-3.html"]
    assert slow["step"] == SLOW_BATCH == 3
    assert data_of((folder / "timelines" / "timeline.html").read_text())["step"] == NUM_BATCHES - 1


def test_the_slow_action_is_seen_in_the_step_and_not_in_its_plan(slow: dict[str, Any]) -> None:
    took = {
        view: {name: end - start for rank in view_of(slow, view) for name, (_, _, start, end) in rank}
        for view in ("measured", "planned")
    }
    assert took["measured"][SLOW_ACTION] > SLOW_MS > took["planned"][SLOW_ACTION]
    # rank 0 waited for what came late
    waits = {name: start - begun for name, (_, begun, start, _) in view_of(slow, "measured")[0]}
    assert max(waits.values()) > SLOW_MS / 2


def test_page_and_trace_have_the_program_and_the_same_times(folder: Path) -> None:
    data = data_of((folder / "timelines" / "timeline.html").read_text())
    events = json.loads((folder / "timelines" / "timeline.json").read_text())["traceEvents"]
    program = build_schedule("zb_h1", num_ranks=2, num_microbatches=4).programs
    took = {
        (event["pid"], event["tid"], event["name"]): event["dur"] / 1e3
        for event in events
        if event["ph"] == "X" and event["cat"] in "FIWB"
    }
    for process, view in ((1, "measured"), (2, "planned")):
        for rank, row in enumerate(view_of(data, view)):
            assert [name for name, _ in row] == [str(action) for action in program[rank]]
            for name, (_, _, start, end) in row:
                assert end > start
                assert took[process, rank, name] == pytest.approx(end - start, abs=2e-3), (view, name)


def test_a_folder_that_cannot_be_written_is_told_and_training_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    first, last = pool.run(fit_where_nothing_can_be_written, str(tmp_path), world_size=2, timeout=120)
    told = [text for text in first if "timeline" in text]
    assert len(told) == 2 and all(str(tmp_path / "own") in text and "Training continues" in text for text in told)
    assert not [text for text in last if "timeline" in text]


@pytest.mark.parametrize("every", [0, -1])
def test_an_impossible_interval_is_refused(every: int) -> None:
    with pytest.raises(ConfigurationError, match=f"timeline_every_n_steps={every}.*at least 1"):
        PipelineMonitor(timeline_every_n_steps=every)
