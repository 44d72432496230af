"""Lightning's model summaries under a pipeline, against those of the whole model."""

from __future__ import annotations

import io
from typing import Any

import pytest
import rich
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary import ModelSummary as LayerSummaries
from pipelined_fit import fit
from pool import WorkerPool
from rich.console import Console
from small_models import Blocks

from lightning_pp.strategy.lightning.callbacks import _ranges


class Kept(ModelSummary):
    """Keeps what it would print."""

    def __init__(self, max_depth: int) -> None:
        super().__init__(max_depth)
        self.shown: dict[str, Any] = {}

    def summarize(self, summary_data: Any, *totals: Any, **others: Any) -> None:  # type: ignore[override]
        self.shown = {"columns": dict(summary_data), "totals": totals}


def summarize() -> tuple[list[dict[str, Any]], str]:
    """Both kinds at once, in every process; what was kept, and what rich printed."""
    printed = io.StringIO()
    console, rich._console = rich.get_console(), Console(file=printed, width=120)
    kept = [Kept(1), Kept(2)]
    try:
        fit(Blocks(), callbacks=[*kept, RichModelSummary(max_depth=2)], max_steps=1, enable_model_summary=True)
    finally:
        rich._console = console
    return [callback.shown for callback in kept], printed.getvalue()


@pytest.fixture(scope="module")
def ranks(pool: WorkerPool) -> list[tuple[list[dict[str, Any]], str]]:
    return pool.run(summarize, world_size=2, timeout=60)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_summary_is_that_of_the_whole_model_with_stages(depth: int, ranks: list[Any]) -> None:
    shown = ranks[0][0][depth - 1]
    whole = LayerSummaries(Blocks(), max_depth=depth)
    columns = dict(whole._get_summary_data())
    kinds = shown["columns"].pop("Type")
    assert [kind.partition(" (stage ")[0] for kind in kinds] == columns.pop("Type")
    assert shown["columns"] == columns
    assert shown["totals"] == (
        whole.total_parameters,
        whole.trainable_parameters,
        whole.model_size,
        whole.total_training_modes,
    )
    by_layer = dict(zip(columns["Name"], kinds, strict=True))
    assert by_layer["blocks"] == "ModuleList (stage 0-1)" and by_layer["head"] == "Linear (stage 1)"
    if depth == 2:
        assert (by_layer["blocks.0"], by_layer["blocks.3"]) == ("Linear (stage 0)", "Linear (stage 1)")


def test_rich_shows_the_same(ranks: list[Any]) -> None:
    printed = ranks[0][1]
    heading, *_ = [line for line in printed.splitlines() if "Name" in line]
    assert [word for word in heading.split() if word.isalpha()] == ["Name", "Type", "Params", "Mode", "FLOPs"]
    (row,) = [line for line in printed.splitlines() if "blocks.3" in line]
    assert [cell.strip() for cell in row.split("│")[2:6]] == ["blocks.3", "Linear (stage 1)", "72", "train"]
    total = sum(parameter.numel() for parameter in Blocks().parameters())
    assert f"Total params: {total}" in " ".join(printed.split())
    assert "stage" not in ranks[1][1]  # only rank 0 prints


def test_stages_are_written_as_ranges() -> None:
    assert [_ranges(numbers) for numbers in ([], [3], [0, 1, 2], [0, 2, 3])] == ["", "3", "0-2", "0, 2-3"]
