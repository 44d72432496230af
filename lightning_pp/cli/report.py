"""The report at the end of a run: stages, a picture of one step, findings, the loss, where the results are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_pp.telemetry.diagnosis.diagnose import Diagnosis
from lightning_pp.telemetry.report import PipelineReport, StageReport

WIDTH = 140


@dataclass
class RunSummary:
    """The data of this report.

    Args:
        report: The pipeline's measurements; None where there was no pipeline.
        metrics: Lightning's ``callback_metrics`` at the end.
        checkpoint: The saved checkpoint: a file, or a folder of shards.
        tracking: Folder of each logger, by the name to print.
        predictions: Folder of what was predicted.
        output_folder: Hydra's folder of this run.
    """

    report: PipelineReport | None
    metrics: dict[str, float]
    checkpoint: str | None
    output_folder: Path
    tracking: dict[str, Path] = field(default_factory=dict)
    predictions: Path | None = None


def stage_table(stages: Sequence[StageReport]) -> Table:
    """The table of stages; F, I and W are forward, input gradient and weight gradient of one microbatch."""
    table = Table(
        title="Pipeline stages",
        caption="F, I, W: of one microbatch; I is the whole backward where W is 0. Wait on neighbours: of one step.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("stage", justify="right")
    table.add_column("units", overflow="fold")
    for heading in ("parameters", "F ms", "I ms", "W ms", "bubble", "wait ms", "peak GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in stages:
        times = (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)
        last = (f"{stage.bubble_fraction:.1%}", f"{stage.p2p_wait_ms:.1f}", f"{stage.peak_memory_gib:.2f}")
        first = (str(stage.stage), summarise_units(stage.units), f"{stage.num_parameters:,}")
        table.add_row(*first, *(f"{ms:.1f}" for ms in times), *last)
    return table


def summarise_units(units: Sequence[str]) -> str:
    """Name units in order, runs of numbered ones as a range: ``embedding, blocks.0-3``."""
    parts: list[str] = []
    start: tuple[str, int] | None = None
    last = -1
    for unit in [*units, ""]:
        parent, _, number = unit.rpartition(".")
        if start is not None and number.isdecimal() and (parent, int(number)) == (start[0], last + 1):
            last += 1
            continue
        if start is not None:
            parts.append(f"{start[0]}.{start[1]}-{last}" if last > start[1] else f"{start[0]}.{last}")
            start = None
        if parent and number.isdecimal():
            start, last = (parent, int(number)), int(number)
        elif unit:
            parts.append(unit)
    return ", ".join(parts)


def wide(console: Console | None = None) -> Console:
    """``console``; where it is not a terminal, one so wide that no path or table is broken."""
    console = console or Console()
    return console if console.is_terminal else Console(file=console.file, width=WIDTH)


def print_timeline(console: Console, picture: str, diagnosis: Diagnosis | None) -> None:
    """Print a step as a picture, and what to change."""
    console.print(Text.from_ansi(picture), soft_wrap=True)
    console.print()
    if diagnosis is not None:
        console.print(Text(diagnosis.text), soft_wrap=True)
        console.print()


def print_facts(console: Console, facts: Mapping[str, str], width: int = 18) -> None:
    """Print a line for each fact, its name in a column of ``width``."""
    for name, value in facts.items():
        console.print(Text.assemble((f"{name:<{width}}", "bold"), value), soft_wrap=True)


def print_summary(summary: RunSummary, console: Console | None = None) -> None:
    """Print a summary."""
    console, report = wide(console), summary.report
    console.print()
    if report is not None:
        console.print(stage_table(report.stages))
        console.print()
        print_timeline(console, report.timeline_text, report.diagnosis)
    print_facts(console, facts(summary))


def facts(summary: RunSummary) -> dict[str, str]:
    """The lines below the table: what was reached, and where it lies."""
    lines: dict[str, str] = {}
    report = summary.report
    if report is not None:
        if report.first_loss is not None and report.last_loss is not None:
            lines["loss"] = f"{report.first_loss:.3f} at the start, {report.last_loss:.3f} at the end"
        # the picture is of the last step and the diagnosis of the latest: three numbers that differ
        whole = f"{report.step_ms:.1f} ms, mean of the run with data, optimizer and logs"
        lines["step"] = f"{whole} (picture: the last step, from its first action to its last)"
        if report.tokens_per_s is not None:
            lines["tokens per second"] = f"{report.tokens_per_s:,.0f}"
    lines |= {
        name.removesuffix("_epoch"): f"{value:.4g}"
        for name, value in sorted(summary.metrics.items())
        if name.startswith(("val", "test")) and not name.endswith("_step")
    }
    if summary.predictions is not None:
        lines["predictions"] = f"{summary.predictions} (lightning_pp.callbacks.read_predictions)"
    if summary.checkpoint is not None:
        lines["checkpoint"] = str(summary.checkpoint)
    lines |= {name: str(path) for name, path in summary.tracking.items()}
    lines["output folder"] = str(summary.output_folder)
    return lines
