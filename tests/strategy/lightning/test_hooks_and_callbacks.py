"""What hooks, callbacks and steps do beside training comes out as with a plain Trainer, on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
from feature_parts import assert_equal_trees, check_on_every_rank
from hook_scenarios import SCENARIOS, summaries, throughput
from parity_run import Layout
from pool import WorkerPool

TWO_STAGES = Layout("1f1b", 2, 1, 2)
CASES: list[Any] = [(name, TWO_STAGES) for name in SCENARIOS]
CASES += [("clipping_in_a_hook", Layout("1f1b", 2, 2, 2))]
CASES += [pytest.param(name, Layout("zb_h1", 3, 1, 2), marks=pytest.mark.nightly) for name in SCENARIOS]


@pytest.mark.by_day(4)
@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_as_with_a_plain_trainer(pool: WorkerPool, name: str, layout: Layout) -> None:
    assert check_on_every_rank(pool, SCENARIOS[name], layout)


def rows_without_stages(text: str) -> list[list[str]]:
    """The cells of printed tables, without rules and without the stages that only a pipeline has."""
    rows = []
    for line in text.splitlines():
        cells = [re.sub(r" \(stage [0-9-]+\)", "", cell).strip() for cell in re.split("[|│┃]", line)]
        if set(line) - set(" ─━-┏┳┓┡╇┩└┴┘"):
            rows.append(cells)
    return rows


def test_summaries_count_the_whole_model(pool: WorkerPool) -> None:
    expected = summaries(None)
    found, other = pool.run(summaries, TWO_STAGES, world_size=2)
    assert_equal_trees(rows_without_stages(found), rows_without_stages(expected))
    assert "323       Total params" in found and "(stage 0-1) " in found and other == "only on rank 0"


def test_throughput_is_of_replicas(pool: WorkerPool) -> None:
    expected = throughput(None)
    assert pool.run(throughput, TWO_STAGES, world_size=2)[0] == expected
    assert "train/device/samples_per_sec" in expected and "train/samples_per_sec" not in expected
