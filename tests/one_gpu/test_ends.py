"""Ranks that share a device end within ten seconds after one has raised, or has been named because it stands still."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from one_device import TIMEOUT_S, take_place
from pool import WorkerPool
from torch import Tensor

from lightning_pp.doctor.checks.trainings import Batch, Chain, batches, loader, num_blocks_for, trainer_for
from lightning_pp.doctor.findings import Rank

Record = Callable[[str, object], None]
AT_BATCH, SOON_S, STANDS_AFTER_S = 2, 10.0, 5.0


class Failing(Chain):
    """Raises or stands still on the last rank, in the third batch, and writes down when."""

    def __init__(self, rank: Rank, fault: str) -> None:
        super().__init__(num_blocks_for(rank))
        self._rank, self._fault = rank, fault

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == AT_BATCH and self._rank.rank == self._rank.num_ranks - 1:
            (self._rank.folder / "fault.txt").write_text(str(time.time()))
            if self._fault == "raises":
                raise ValueError("the rank's own error")
            time.sleep(1000)
        return super().training_step(batch, batch_idx)


def fit(device_type: str, fault: str, folder: Path) -> None:
    """In a worker: a training that one rank ends."""
    rank = replace(take_place(device_type), folder=folder)
    timeout_s = 60.0 if fault == "raises" else STANDS_AFTER_S
    trainer = trainer_for(rank, callbacks=[], timeout=timedelta(seconds=timeout_s))
    trainer.fit(Failing(rank, fault), loader(batches(AT_BATCH + 3)))


CAUSES = {"raises": "raised ValueError: the rank's own error", "stands": "kept the others waiting"}


def case(device_type: str, fault: str, num_ranks: int) -> Any:
    """By day the shortest one; a rank that stands is waited for."""
    of_night = [] if (device_type, fault, num_ranks) == ("cpu", "raises", 2) else [pytest.mark.nightly]
    marks = [pytest.mark.gpu] if device_type == "cuda" else of_night
    return pytest.param(device_type, fault, num_ranks, marks=marks)


@pytest.mark.parametrize(
    ("device_type", "fault", "num_ranks"),
    [
        case(device_type, fault, num_ranks)
        for device_type in ("cpu", "cuda")
        for fault in CAUSES
        for num_ranks in (2, 4)
    ],
)
def test_all_ranks_end_soon(
    pool: WorkerPool, record_property: Record, tmp_path: Path, device_type: str, fault: str, num_ranks: int
) -> None:
    report: Any = pool.run(
        fit, device_type, fault, tmp_path, world_size=num_ranks, timeout=TIMEOUT_S, grace=20.0, expect_failure=True
    )
    seconds = time.time() - float((tmp_path / "fault.txt").read_text())
    assert all(failure is not None and failure.type != "WorkerHung" for failure in report.failures), report
    named_s = 0.0
    for failure in report.failures[:-1]:
        assert f"because rank {num_ranks - 1} " in failure.message and CAUSES[fault] in failure.message, failure
        if fault == "stands":
            named_s = float(re.findall(r"has not moved since [^;]*, for (\d+) s;", failure.message)[0])
    record_property("figure", f"all ended {seconds:.1f} s after the fault; it was named after {named_s:.0f} s")
    assert seconds - named_s < SOON_S, report
    assert named_s <= 3 * STANDS_AFTER_S, report
