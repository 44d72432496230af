"""The output of the doctor: a table to read, and a file to attach to an issue."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_pp.doctor.findings import Row, Status

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "bold red", Status.NOT_APPLICABLE: "dim"}


def print_report(console: Console, rows: Sequence[Row], num_ranks: int, device_type: str, seconds: float) -> None:
    """Prints the table and how many findings there are of each kind."""
    table = Table(title=f"lightning-pp-doctor: {num_ranks} processes, {device_type}", title_justify="left")
    table.add_column("check", overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("found, and what to do", ratio=1)
    table.add_column("s", justify="right", no_wrap=True)
    previous = ""
    for row in rows:
        text = Text(row.finding.found)
        if row.finding.advice:
            text.append(f"\n→ {row.finding.advice}", style="bold")
        is_first = row.check != previous
        status = Text(row.finding.status.value, style=_STYLES[row.finding.status])
        seconds_text = f"{row.seconds:.1f}" if is_first and row.seconds else ""
        table.add_row(row.check if is_first else "", status, text, seconds_text)
        previous = row.check
    console.print(table)
    counts = Counter(row.finding.status for row in rows)
    counted = ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status])
    console.print(f"{counted}; {seconds:.0f} s.", style=_STYLES[worst_status(rows)])


def worst_status(rows: Sequence[Row]) -> Status:
    """The worst status of all rows."""
    order = list(Status)
    return max((row.finding.status for row in rows), key=order.index, default=Status.OK)


def write_json(path: Path, rows: Sequence[Row], **about: Any) -> None:
    """Writes all findings, and facts of the run, to a file; its folder is made."""
    data = {
        "format": 1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **about,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "status": worst_status(rows).value,
        "findings": [_finding(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2, default=str) + "\n")


def _finding(row: Row) -> dict[str, Any]:
    finding = {
        "check": row.check,
        "shows": row.shows,
        "status": row.finding.status.value,
        "found": row.finding.found,
        "advice": row.finding.advice,
        "seconds": row.seconds,
        "details": row.finding.details,
    }
    if row.finding.status not in (Status.OK, Status.NOT_APPLICABLE):
        finding["processes"] = [asdict(outcome) for outcome in row.outcomes]
    return finding
