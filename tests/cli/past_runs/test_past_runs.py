"""``lightning-pp-report``: what a run leaves is shown again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_pp.cli.past_runs.command import main
from lightning_pp.cli.past_runs.run_file import FILE_NAME, read_run_file, write_run_file
from lightning_pp.cli.problems import UserError
from lightning_pp.schedule import StageCosts, build_schedule
from lightning_pp.telemetry import Diagnosis, Finding, PipelineReport, StageReport, Timeline, text_timeline

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
    """Four microbatches of 8 rows, and sixteen of 2."""
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


def test_one_run_is_shown(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    main([runs[0]])
    shown = capsys.readouterr().out
    for words in ("blocks.1", "1f1b, 4 microbatches", "rank 1 (stage 1)", FINDING.text, "100.0 ms", "10,000", "2.250"):
        assert words in shown


def test_one_run_is_printed_as_json(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    main([runs[1], "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["strategy"] == {"num_microbatches": 16} and found["metrics"] == {"val_loss": 2.5}
    assert found == read_run_file(runs[1]).content


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
    for arguments, code, said in (
        (["nowhere"], 1, "nowhere does not exist"),
        (list(runs), 2, "unrecognized arguments"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == code
        assert said in capsys.readouterr().err
