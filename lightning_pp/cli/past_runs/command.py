"""``lightning-pp-report RUN_DIR``: shows a run again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from lightning_pp.cli.past_runs.run_file import RunFile, read_run_file
from lightning_pp.cli.problems import UserError
from lightning_pp.cli.report import WIDTH, print_facts, print_timeline, stage_table
from lightning_pp.telemetry import text_timeline
from lightning_pp.versions import parser_of

_EPILOG = """\
RUN_DIR is the output folder of a training by lightning-pp (outputs/DAY/TIME, or a job's folder of a sweep).

examples:
  lightning-pp-report outputs/2026-11-24/09-30-00
  lightning-pp-report RUN_DIR --json
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    options = _parser().parse_args(arguments)
    try:
        run = read_run_file(options.run_dir)
        if options.json:
            sys.stdout.write(json.dumps(run.content, indent=2) + "\n")
        else:
            show(run, Console(width=None if sys.stdout.isatty() else WIDTH))
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


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("lightning-pp-report", "Shows a run that has ended.", _EPILOG)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="output folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    main()
