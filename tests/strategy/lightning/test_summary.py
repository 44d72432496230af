"""Lightning's model summaries under a pipeline, against those of the whole model."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary import ModelSummary as LayerSummaries
from pipelined_fit import fit
from pool import WorkerPool
from small_models import Blocks

from lightning_pp.strategy.lightning.summary import _ranges


class Kept(ModelSummary):
    """Keeps what it would print."""

    def __init__(self, max_depth: int) -> None:
        super().__init__(max_depth)
        self.shown: dict[str, Any] = {}

    def summarize(self, summary_data: Any, *totals: Any, **others: Any) -> None:  # type: ignore[override]
        self.shown = {"columns": dict(summary_data), "totals": totals}


def summarize() -> tuple[list[dict[str, Any]], str]:
    """Both kinds at once, in every process; what was kept, and what that of rich told."""
    told = io.StringIO()
    log, handler = logging.getLogger("lightning.pytorch.callbacks.model_summary"), logging.StreamHandler(told)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    kept = [Kept(1), Kept(2)]
    try:
        fit(Blocks(), callbacks=[*kept, RichModelSummary(max_depth=2)], max_steps=1, enable_model_summary=True)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return [callback.shown for callback in kept], told.getvalue()


@pytest.fixture(scope="module")
def ranks(pool: WorkerPool) -> list[tuple[list[dict[str, Any]], str]]:
    return pool.run(summarize, world_size=2, timeout=60)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_summary_is_that_of_the_whole_model_with_stages(depth: int, ranks: list[Any]) -> None:
    shown = ranks[0][0][depth - 1]
    whole = LayerSummaries(Blocks(), max_depth=depth)
    columns = dict(whole._get_summary_data())
    stages = shown["columns"].pop("Stage")
    assert shown["columns"] == columns
    assert shown["totals"] == (
        whole.total_parameters,
        whole.trainable_parameters,
        whole.model_size,
        whole.total_training_modes,
    )
    by_layer = dict(zip(columns["Name"], stages, strict=True))
    assert by_layer["blocks"] == "0-1" and by_layer["head"] == "1"
    if depth == 2:
        assert (by_layer["blocks.0"], by_layer["blocks.3"]) == ("0", "1")


def test_the_summary_of_rich_is_a_plain_table_with_stages(ranks: list[Any]) -> None:
    told = ranks[0][1]
    heading, *_ = [line for line in told.splitlines() if "Name" in line]
    assert [word for word in heading.split() if word.isalpha()] == ["Name", "Type", "Stage", "Params", "Mode", "FLOPs"]
    (row,) = [line for line in told.splitlines() if "blocks.3" in line]
    assert [cell.strip() for cell in row.split("|")[1:5]] == ["blocks.3", "Linear", "1", "72"]
    total = sum(parameter.numel() for parameter in Blocks().parameters())
    assert f"{total} Total params" in " ".join(told.split())
    assert "Stage" not in ranks[1][1]  # only rank 0 tells


def test_stages_are_written_as_ranges() -> None:
    assert [_ranges(numbers) for numbers in ([], [3], [0, 1, 2], [0, 2, 3])] == ["", "3", "0-2", "0, 2-3"]
