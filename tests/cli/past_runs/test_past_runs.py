"""``lightning-pp-report``: what a run leaves is shown again, and two runs are compared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_pp.cli.past_runs.command import main
from lightning_pp.cli.past_runs.run_file import FILE_NAME, read_run_file, write_run_file
from lightning_pp.cli.problems import UserError
from lightning_pp.schedule import StageCosts, build_schedule
from lightning_pp.telemetry.diagnosis.diagnose import Diagnosis
from lightning_pp.telemetry.diagnosis.finding import Finding
from lightning_pp.telemetry.report import PipelineReport, StageReport
from lightning_pp.telemetry.timeline.step import Timeline
from lightning_pp.telemetry.timeline.text import text_timeline

FINDING = Finding("data", "Rank 0 waits.", "4 of them", 31.2, 0.12, "data.num_workers=4", "DataLoader(num_workers=4)")
SAMPLES = 32


def report(num_microbatches: int, forward_ms: float, step_ms: float) -> PipelineReport:
    """Of two even stages, a run of so many microbatches of a batch of ``SAMPLES``."""
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=num_microbatches)
    timeline = Timeline.simulated(schedule, StageCosts(forward_ms, forward_ms, forward_ms, p2p=0.1))
    stages = [
        StageReport(
            stage=number,
            units=[f"blocks.{number}"],
            num_parameters=1000,
            forward_ms=forward_ms,
            backward_input_ms=2 * forward_ms,
            backward_weight_ms=0.0,
            bubble_fraction=0.2,
            p2p_wait_ms=1.0,
            peak_memory_gib=1.5,
        )
        for number in range(2)
    ]
    return PipelineReport(
        stages=stages,
        first_loss=5.5,
        last_loss=2.25,
        tokens_per_s=1e6 / step_ms,
        samples_per_s=1e3 * SAMPLES / step_ms,
        step_ms=step_ms,
        bubble_fraction=0.2,
        timeline_text="",
        timeline=timeline,
        diagnosis=Diagnosis([FINDING], 8, step_ms, step_ms),
    )


def leave(folder: Path, of_run: PipelineReport, **strategy: Any) -> Path:
    """A run's folder with its file."""
    folder.mkdir()
    config = {"strategy": strategy, "model": {"dim": 8}, "trainer": {"default_root_dir": str(folder)}}
    return write_run_file(folder, of_run, {"val_loss": 2.5}, config).parent


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """Four microbatches of 8 rows, and sixteen of 2 that take 5 of 12 ms each, where 3 would be as fast by the row."""
    first = leave(tmp_path / "a", report(4, 4.0, 100.0), num_microbatches=4)
    second = leave(tmp_path / "b", report(16, 5 / 3, 80.0), num_microbatches=16)
    return str(first), str(second)


def test_what_a_run_leaves_is_what_is_read(runs: tuple[str, str]) -> None:
    written, read = report(4, 4.0, 100.0), read_run_file(runs[0])
    assert read.stages == written.stages
    assert read.diagnosis == written.diagnosis
    assert text_timeline(read.timeline) == text_timeline(written.timeline)
    assert read.pipeline["step_ms"] == 100.0 and read.pipeline["schedule"] == "1f1b"
    assert read_run_file(Path(runs[0]) / FILE_NAME).content == read.content


def test_one_run_is_shown(runs: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    main([runs[0], "--html", str(page)])
    shown = capsys.readouterr().out
    for words in ("blocks.1", "1f1b, 4 microbatches", "rank 1 (stage 1)", FINDING.text, "100.0 ms", "10,000", "2.250"):
        assert words in shown
    content = page.read_text()
    assert "lightning_pp.timeline/2" in content and not re.search(r"https?://", content)
    # a page: tables and lines that wrap, and no picture of a terminal
    assert "<th>units</th>" in content and re.search(r"<td>[^<]*blocks\.1", content)
    assert "overflow-wrap: anywhere" in content and "<pre" not in content and "BBBB" not in content
    assert content.count("<iframe") == 1 and "<p>loss" in content


def test_two_runs_are_compared(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    main(list(runs))
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "step ms" in line)
    assert all(value in row for value in ("100", "80", "-20.0%"))
    assert next(line for line in shown.splitlines() if "tokens per second" in line).count("+25.0%") == 1
    setting = next(line for line in shown.splitlines() if "strategy.num_microbatches" in line)
    assert "4" in setting and "16" in setting
    assert "default_root_dir" not in shown and "model.dim" not in shown
    # by the row: 12 ms / 8 against 5 ms / 2
    assert "Microbatches of 2 rows reach 60% of the speed of those of 8 rows." in shown
    assert "stage 1, the same units" in shown and "+0.0 points" in shown


def test_two_runs_are_compared_as_json(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*runs, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"strategy.num_microbatches": [4, 16]}
    whole = {pair["name"]: pair for pair in found["whole"]}
    assert whole["step ms"]["change"] == pytest.approx(-0.2)
    assert whole["val_loss"] == {"name": "val_loss", "first": 2.5, "second": 2.5, "change": 0.0}


def test_speeds_of_other_models_are_not_compared(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = leave(tmp_path / "c", report(16, 5 / 3, 80.0), num_microbatches=16)
    file = other / FILE_NAME
    content = json.loads(file.read_text())
    content["config"]["model"]["dim"] = 16
    file.write_text(json.dumps(content))
    main([runs[0], str(other)])
    shown = capsys.readouterr().out
    assert "model.dim" in shown and "of the speed" not in shown


def test_a_folder_without_a_run_names_those_below_it(runs: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no pipeline_report.json.*below it have one: .*/a, .*/b\."):
        read_run_file(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="The callback PipelineMonitor measures what the file holds"):
        read_run_file(tmp_path / "empty")
    with pytest.raises(UserError, match="does not exist"):
        read_run_file(tmp_path / "none")
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(UserError, match="is not the report of a run"):
        read_run_file(tmp_path / "other.json")


def test_mistakes_are_told_without_a_traceback(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (([runs[0], "nowhere"], "nowhere does not exist"), ([*runs, runs[0]], "3 folders")):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 1
        assert said in capsys.readouterr().err
