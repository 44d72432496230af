"""Writes the tables of metrics in ``docs/training/metrics.md`` from the code: ``python docs/tools/metric_table.py``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lightning_pp.telemetry.metric_table import PIPELINE_METRICS, STAGE_METRICS, stage_metric

DOCUMENT = Path(__file__).parents[1] / "training" / "metrics.md"
TABLES = re.compile(r"(?<=<!-- metrics -->\n).*?(?=<!-- end of metrics -->)", re.DOTALL)


def tables() -> str:
    """Both tables, as Markdown."""
    of_stages = [(stage_metric(metric.name, "{s}"), metric.meaning) for metric in STAGE_METRICS]
    return f"{_table(of_stages)}\n{_table([(f'pp/{metric.name}', metric.meaning) for metric in PIPELINE_METRICS])}"


def document() -> str:
    """The page with the tables of today."""
    return TABLES.sub(lambda _: tables(), DOCUMENT.read_text())


def _table(metrics: Sequence[tuple[str, str]]) -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in metrics]
    return "\n".join(["| metric | meaning |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
