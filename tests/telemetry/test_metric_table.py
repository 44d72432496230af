"""The page about metrics has those of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_of_metrics_are_those_of_today() -> None:
    spec = importlib.util.spec_from_file_location("metric_table", DOCS / "tools" / "metric_table.py")
    assert spec is not None and spec.loader is not None
    metric_table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(metric_table)
    assert metric_table.DOCUMENT.read_text() == metric_table.document(), "run python docs/tools/metric_table.py"
