"""What a Trainer does with its callbacks, loops, loggers and hooks it does with a pipeline, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract_scenarios import SCENARIOS, stochastic_weight_averaging
from feature_parts import check_on_every_rank
from parity_run import Layout
from pool import WorkerPool

ONE_STAGE, TWO_STAGES = Layout("1f1b", 1, 1, 1), Layout("1f1b", 2, 1, 3)
AT_NIGHT = [ONE_STAGE, Layout("zb_h1", 3, 1, 4)]
# restarts, averages, early stopping and hooks around the update have tests of their own by day
BY_DAY = (
    "checkpoints_with_every_option", "schedulers_and_their_monitor", "accumulation_that_changes",
    "loops_that_end_early", "order_of_callback_hooks", "how_often_a_data_module_is_asked", "evaluation_results",
    "timers_stop",
)  # fmt: skip
LAYOUTS = [TWO_STAGES, *(pytest.param(layout, marks=pytest.mark.nightly) for layout in AT_NIGHT)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in SCENARIOS]
)
def test_as_with_a_plain_trainer(pool: WorkerPool, tmp_path: Path, name: str, layout: Layout) -> None:
    assert check_on_every_rank(pool, SCENARIOS[name], layout, tmp_path)


def test_stochastic_weight_averaging_needs_one_stage(pool: WorkerPool, tmp_path: Path) -> None:
    for message in pool.refusals("ConfigurationError", stochastic_weight_averaging, TWO_STAGES, tmp_path):
        assert "Use WeightAveraging (equal weights, as SWA) or EMAWeightAveraging" in message
    assert check_on_every_rank(pool, stochastic_weight_averaging, ONE_STAGE, tmp_path)
