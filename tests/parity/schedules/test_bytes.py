"""A plan is not charged for the way in which a model is written: bytes counted in the transport."""

from __future__ import annotations

import pytest
from bytes_run import LENGTH, WIDTH, bytes_sent
from pool import WorkerPool

NUM_MICROBATCHES, NUM_ROWS = 2, 4
INSIDE = ("layers.1.mlp", "layers.4", "layers.5.mlp")


@pytest.mark.nightly
def test_residuals_outside_of_units_send_what_those_inside_send(pool: WorkerPool) -> None:
    """Between four stages one activation goes forward over each of three edges, and its gradient comes back."""
    expected = 3 * 2 * NUM_ROWS * LENGTH * WIDTH * 4
    for outside in (False, True):
        ranks = pool.run(bytes_sent, outside, NUM_MICROBATCHES, world_size=4, timeout=120)
        assert sum(sent for sent, _ in ranks) == expected
        assert {planned * NUM_MICROBATCHES for _, planned in ranks} == {expected}


@pytest.mark.by_day(1)
@pytest.mark.parametrize("schedule", ["zb_h2", "zb_h1", "1f1b"])
def test_a_cut_inside_a_block_sends_what_one_between_blocks_sends(pool: WorkerPool, schedule: str) -> None:
    """Behind attention's residual: one activation, and its gradient, over each edge."""
    expected = 3 * 2 * NUM_ROWS * LENGTH * WIDTH * 4
    ranks = pool.run(bytes_sent, False, NUM_MICROBATCHES, INSIDE, schedule, world_size=4, timeout=120)
    assert sum(sent for sent, _ in ranks) == expected
    assert {planned * NUM_MICROBATCHES for _, planned in ranks} == {expected}
