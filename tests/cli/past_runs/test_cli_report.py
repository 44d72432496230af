"""The final report, rendered from measurements."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from lightning_pp.cli.report import RunSummary, print_summary, summarise_units
from lightning_pp.schedule import build_schedule
from lightning_pp.telemetry.report import PipelineReport, StageReport
from lightning_pp.telemetry.timeline.step import Timeline


def stage(number: int, units: list[str]) -> StageReport:
    return StageReport(
        stage=number,
        units=units,
        num_parameters=1_234_567,
        forward_ms=12.34,
        backward_input_ms=23.45,
        backward_weight_ms=34.56,
        bubble_fraction=0.125,
        p2p_wait_ms=4.5,
        peak_memory_gib=1.25,
    )


def report() -> PipelineReport:
    return PipelineReport(
        stages=[stage(0, ["embedding", "blocks.0"]), stage(1, ["head"])],
        first_loss=5.5,
        last_loss=2.25,
        tokens_per_s=12345.6,
        samples_per_s=96.0,
        step_ms=250.0,
        bubble_fraction=0.125,
        timeline_text="\x1b[1m0 FFFF II WW\x1b[0m",
        timeline=Timeline(build_schedule("gpipe", num_ranks=2, num_microbatches=2), ((), ())),
    )


def rendered(summary: RunSummary) -> str:
    stream = io.StringIO()
    print_summary(summary, Console(file=stream, width=60))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("units", "text"),
    [
        ([], ""),
        (["embedding"], "embedding"),
        (["embedding", "blocks.0", "blocks.1", "blocks.2"], "embedding, blocks.0-2"),
        (["blocks.3", "norm", "head"], "blocks.3, norm, head"),
        (["blocks.0", "blocks.2", "blocks.3"], "blocks.0, blocks.2-3"),
        (["encoder.block.5", "decoder.block.6", "decoder.block.7"], "encoder.block.5, decoder.block.6-7"),
        (["0", "1"], "0, 1"),
    ],
)
def test_units_are_named_as_ranges(units: list[str], text: str) -> None:
    assert summarise_units(units) == text


def test_report_has_the_table_the_timeline_the_loss_and_the_paths() -> None:
    text = rendered(
        RunSummary(
            report=report(),
            metrics={"val_loss": 2.34567, "train_loss": 2.2},
            checkpoint="/runs/a/checkpoints/step200.ckpt",
            output_folder=Path("/runs/a"),
            tracking={"W&B run": Path("/runs/a/wandb/" + "long-" * 30)},
        )
    )
    row = next(line for line in text.splitlines() if "blocks.0" in line)
    for value in ("0", "embedding, blocks.0", "1,234,567", "12.3", "23.4", "34.6", "12.5%", "4.5", "1.25"):
        assert value in row
    lines = text.splitlines()
    assert "0 FFFF II WW" in lines
    assert "loss              5.500 at the start, 2.250 at the end" in lines
    assert "tokens per second 12,346" in lines
    # the picture has a time of its own, so each says what it is of
    (step,) = [line for line in lines if line.startswith("step  ")]
    assert "250.0 ms, mean of the run with data, optimizer and logs" in step and "the last step" in step
    assert "val_loss          2.346" in lines
    assert not any(line.startswith("train_loss") for line in lines)
    assert "checkpoint        /runs/a/checkpoints/step200.ckpt" in lines
    assert "W&B run           /runs/a/wandb/" + "long-" * 30 in lines  # not broken: it can be copied


def test_without_a_pipeline_only_what_is_known_is_told() -> None:
    text = rendered(RunSummary(report=None, metrics={}, checkpoint=None, output_folder=Path("/runs/b")))
    assert text.split() == ["output", "folder", "/runs/b"]
