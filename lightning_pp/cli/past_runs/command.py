"""``lightning-pp-report RUN_DIR [RUN_DIR]``: shows a run again, or compares two."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_pp.cli.past_runs.comparison import Comparison, Pair
from lightning_pp.cli.past_runs.run_file import RunFile, read_run_file
from lightning_pp.cli.problems import UserError
from lightning_pp.cli.report import WIDTH, print_facts, print_timeline, stage_table
from lightning_pp.telemetry import html_timeline
from lightning_pp.telemetry.timeline.text import text_timeline
from lightning_pp.versions import parser_of

_EPILOG = """\
RUN_DIR is the output folder of a training by lightning-pp (outputs/DAY/TIME, or a job's folder of a sweep).

examples:
  lightning-pp-report outputs/2026-11-24/09-30-00
  lightning-pp-report outputs/2026-11-24/09-30-00 outputs/2026-11-24/09-45-00
  lightning-pp-report RUN_DIR --html report.html
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    options = _parser().parse_args(arguments)
    try:
        runs = [read_run_file(path) for path in options.run_dir]
        if len(runs) > 2:
            raise UserError(f"{len(runs)} folders were given. Give one to show it, or two to compare them.")
        if options.json:
            found = runs[0].content if len(runs) == 1 else Comparison(*runs).to_dict()
            sys.stdout.write(json.dumps(found, indent=2) + "\n")
            return
        console = _Page(None if sys.stdout.isatty() else WIDTH)
        for run in runs if len(runs) == 1 else ():
            show(run, console)
        if len(runs) == 2:
            show_comparison(Comparison(*runs), console)
        if options.html is not None:
            _save_html(console, runs, options.html)
    except (UserError, OSError) as error:
        sys.stderr.write(f"lightning-pp-report: {error}\n")
        sys.exit(1)


def show(run: RunFile, console: Console) -> None:
    """Prints what the run printed at its end."""
    pipeline = run.pipeline
    console.print(Text(f"{run.folder}", "bold"), soft_wrap=True)
    console.print(stage_table(run.stages))
    console.print()
    picture = text_timeline(run.timeline, width=min(max(console.width, 60), WIDTH))
    print_timeline(console, picture, run.diagnosis)
    lines = {"step": f"{pipeline['step_ms']:.1f} ms", "bubble": f"{pipeline['bubble_fraction']:.1%}"}
    if pipeline["tokens_per_s"] is not None:
        lines["tokens per second"] = f"{pipeline['tokens_per_s']:,.0f}"
    lines["samples per second"] = f"{pipeline['samples_per_s']:,.1f}"
    if pipeline["first_loss"] is not None and pipeline["last_loss"] is not None:
        lines["loss"] = f"{pipeline['first_loss']:.3f} at the start, {pipeline['last_loss']:.3f} at the end"
    lines |= {name: f"{value:.4g}" for name, value in sorted(run.content["metrics"].items()) if name.startswith("val")}
    print_facts(console, lines, 20)


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Prints two runs side by side."""
    first, second = comparison.first, comparison.second
    console.print(Text.assemble(("A  ", "bold"), str(first.folder)), soft_wrap=True)
    console.print(Text.assemble(("B  ", "bold"), str(second.folder)), soft_wrap=True)
    console.print()
    settings = comparison.settings()
    table = _table("Settings", "A", "B")
    for name, (mine, other) in settings.items():
        table.add_row(name, str(mine), str(other))
    console.print(table if settings else Text("The settings are the same."))
    console.print()
    for title, pairs in (("Pipeline", comparison.whole()), *comparison.stages()):
        table = _table(title, "A", "B", "B by A")
        for pair in pairs:
            table.add_row(pair.name, _number(pair.first), _number(pair.second), _change(pair))
        console.print(table)
        console.print()
    if len(first.stages) != len(second.stages):
        console.print(Text(f"A has {len(first.stages)} stages, B has {len(second.stages)}."))
    if (speed := comparison.speed_text()) is not None:
        console.print(Text(speed), soft_wrap=True)
        console.print()
    for name, run in (("A", first), ("B", second)):
        console.print(Text.assemble((f"{name}  ", "bold"), f"bubble {run.pipeline['bubble_fraction']:.1%}"))
        print_timeline(console, text_timeline(run.timeline, width=min(console.width, WIDTH)), run.diagnosis)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _change(pair: Pair) -> str:
    if pair.name.startswith("bubble") and pair.first is not None and pair.second is not None:
        return f"{100 * (pair.second - pair.first):+.1f} points"
    return "" if pair.change is None else f"{pair.change:+.1%}"


class _Page(Console):
    """Prints, and keeps what it prints as HTML: tables as tables, lines as paragraphs, pictures not at all."""

    def __init__(self, width: int | None) -> None:
        super().__init__(width=width)
        self.parts: list[str] = []

    def print(self, *objects: Any, **options: Any) -> None:
        """As :meth:`Console.print`."""
        super().print(*objects, **options)
        for shown in objects:
            if isinstance(shown, Table):
                heads = "".join(f"<th>{escape(str(column.header))}</th>" for column in shown.columns)
                rows = zip(*(column.cells for column in shown.columns), strict=True)
                cells = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
                body = "".join(f"<tr>{row}</tr>" for row in (heads, *cells))
                self.parts.append(f"<h2>{escape(str(shown.title))}</h2><table>{body}</table>")
            elif isinstance(shown, Text) and not ("\n" in shown.plain and shown.spans):
                self.parts.append(f"<p>{escape(shown.plain)}</p>")


def _save_html(page: _Page, runs: Sequence[RunFile], path: Path) -> None:
    """What was printed, and the timelines as pictures, in one page that needs nothing else."""
    frame = '<h2>Last step of {}</h2><iframe srcdoc="{}"></iframe>'
    pictures = [frame.format(escape(str(run.folder)), escape(html_timeline(run.timeline))) for run in runs]
    style = (files("lightning_pp.cli.past_runs") / "page.css").read_text(encoding="utf-8")
    title = escape(" and ".join(run.folder.name for run in runs))
    head = f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
    path.write_text("\n".join([head, *page.parts, *pictures]), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("lightning-pp-report", "Shows a run that has ended, or compares two.", _EPILOG)
    parser.add_argument("run_dir", nargs="+", metavar="RUN_DIR", help="output folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="PATH", help="also write a page")
    return parser


if __name__ == "__main__":
    main()
