"""A logger that fails while a run is under way is told of once; the run goes on, and trains what it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from outage_parts import NUM_BATCHES, fit_with
from pool import WorkerPool

PIPELINE = 2


def check_losses(ranks: list[dict[str, Any]], folder: Path) -> None:
    """As a plain Trainer on one device without a logger."""
    alone = fit_with("none", str(folder / "alone"), 1)
    assert alone["error"] is None and len(alone["losses"]) == NUM_BATCHES
    for rank in ranks:
        assert rank["error"] is None
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["left_as_it_was"]


@pytest.mark.by_day(2)
@pytest.mark.parametrize("of_rank", [None, 0, 1])
def test_a_logger_that_fails_in_all_it_is_asked(of_rank: int | None, pool: WorkerPool, tmp_path: Path) -> None:
    ranks = pool.run(fit_with, "failing", str(tmp_path), PIPELINE, False, of_rank, world_size=PIPELINE)
    check_losses(ranks, tmp_path)
    for number, rank in enumerate(ranks):
        fails = of_rank in (None, number)
        assert len(rank["told"]) == fails, rank["told"]
        said = f"raised ConnectionError on rank {number}: the server is gone. The run continues"
        assert not fails or said in rank["told"][0]
        assert {"log_metrics", "log_hyperparams", "save", "finalize"} <= rank["asked"]
        assert ("after_save_checkpoint" in rank["asked"]) == (number == 0)  # Lightning asks there alone


@pytest.mark.parametrize("kind", ["csv", "wandb"])
def test_a_full_disk_and_a_service_that_is_gone(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    first, last = pool.run(fit_with, kind, str(tmp_path), PIPELINE, world_size=PIPELINE)
    check_losses([first, last], tmp_path)
    assert len(first["told"]) == 1 and last["told"] == []
    if kind == "csv":
        assert "CSVLogger." in first["told"][0] and "[Errno 28] No space left on device" in first["told"][0]
    else:
        assert "WandbLogger." in first["told"][0] and "The run continues" in first["told"][0]


def test_a_logger_that_fails_before_the_first_batch_ends_the_run_on_every_rank(
    pool: WorkerPool, tmp_path: Path
) -> None:
    first, last = pool.run(fit_with, "failing", str(tmp_path), PIPELINE, True, 0, world_size=PIPELINE)
    assert first["error"] == "ConnectionError: the server is gone"
    assert "rank 0" in last["error"] and "ConnectionError: the server is gone" in last["error"]
    assert first["losses"] == last["losses"] == []
