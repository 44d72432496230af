"""Reading offline runs of W&B back, by wandb's own reader."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@cache
def records(run: Path) -> list[dict[str, Any]]:
    """All records of a run that has ended, in the order in which they were written."""
    (file,) = run.rglob("*.wandb")
    spec = find_spec("wandb")
    assert spec is not None and spec.origin is not None
    # what `wandb leet inspect --json` starts, without the seconds that importing wandb takes
    inspect = [Path(spec.origin).parent / "bin" / "wandb-core", "leet", "inspect", "--no-observability", "--json"]
    command = [*map(str, inspect), "--run-file", str(file), str(file.parent)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def of_type(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """What is in the records of one type."""
    return [record[kind] for record in found if record["type"] == kind]


def config_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The configuration, as its last update has left it."""
    config: dict[str, Any] = {}
    for record in of_type(found, "config"):
        config |= record["update"]
    return config


def summary_of(run: Path) -> dict[str, Any]:
    """The summary of the run in a folder, as its last update has left it."""
    summary: dict[str, Any] = {}
    for record in of_type(records(run), "summary"):
        summary |= record["update"]
    return summary


def history_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was logged, a dict for each step of wandb's own."""
    return [record["item"] for record in of_type(found, "history")]


def table(run: Path, name: str) -> list[dict[str, Any]]:
    """The rows of the newest table of that name."""
    files = sorted(run.rglob(f"media/table/{name}_*.table.json"), key=lambda file: int(file.name.split("_")[-2]))
    written = json.loads(files[-1].read_text())
    return [dict(zip(written["columns"], row, strict=True)) for row in written["data"]]
