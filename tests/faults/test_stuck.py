"""No run is stuck: all ranks know what has ended a check, and ranks that wait for each other, or get SIGTERM, end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parity_run import QUIET
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy

Jobs = Callable[[dict[str, Any], Path], dict[str, Any]]

LAYOUTS = {2: ("1f1b", 2, 1), 4: ("zb_v", 4, 1)}
BATCHES = 7


class Skips(pl.LightningModule):
    """Returns None for some batches, before or after its units, or for some microbatches of one."""

    def __init__(self, how: str, batches: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)))
        self.how, self.batches = how, batches
        self.losses: list[float | None] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        is_skipped = batch_idx in self.batches
        if is_skipped and self.how == "before the units":
            return None
        loss = self.blocks(batch).pow(2).mean()
        if is_skipped and (self.how == "after the units" or batch[0, 0] % 1 == 0):
            return None
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def losses(how: str, batches: tuple[int, ...], devices: int) -> list[float | None]:
    module = Skips(how, batches)
    trainer = pl.Trainer(
        **QUIET,
        devices=devices,
        strategy="auto" if devices == 1 else PipelineParallelStrategy(num_microbatches=2),
        max_epochs=1,
    )
    # the first sample of each batch is a whole number, and that of its second microbatch is not
    samples = [torch.full((4,), 1.0 + number / 4) for number in range(4 * BATCHES)]
    trainer.fit(module, DataLoader(samples, 4))
    return module.losses


@pytest.mark.by_day(2)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(
    ("how", "batches"), [("before the units", (1, 5)), ("after the units", (1,)), ("before the units", (1, 2, 6))]
)
def test_a_batch_for_which_the_step_returns_none_is_skipped(
    pool: WorkerPool, how: str, batches: tuple[int, ...], devices: int
) -> None:
    expected = losses(how, batches, 1)
    assert [number for number, loss in enumerate(expected) if loss is None] == list(batches)
    for found in pool.run(losses, how, batches, devices, world_size=devices):
        assert found == [None if loss is None else pytest.approx(loss, rel=1e-5) for loss in expected]


@pytest.mark.by_day(3)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(
    ("how", "batches", "sentence"),
    [
        ("before the units", (0,), "not in the first batch"),
        ("some microbatches", (1,), "training_step returned None for some microbatches of a batch and a loss"),
        ("after the units", (5,), "None for a microbatch of batch 5 after units were run"),
    ],
)
def test_none_that_cannot_be_skipped_ends_all_ranks_with_a_sentence(
    pool: WorkerPool, how: str, batches: tuple[int, ...], sentence: str, devices: int
) -> None:
    report = pool.run(losses, how, batches, devices, world_size=devices, expect_failure=True)
    for rank, failure in enumerate(report.failures):
        assert failure is not None and sentence in str(failure), f"rank {rank}: {failure}"


def job(num_stages: int, fault: str, place: str, rank: int, **more: Any) -> dict[str, Any]:
    return {"layout": LAYOUTS[num_stages], "fault": fault, "place": place, "rank": rank, "timeout": 600, **more}


WAYS_OUT = {
    "exception": (1, r"raised ValueError: the user's own error"),
    "SIGKILL": (1, r"killed"),
    "exit(0)": (1, r"called exit\(0\)"),
    "SIGTERM": (143, ""),
}


@pytest.mark.by_day(2)
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("fault", WAYS_OUT)
def test_whatever_ends_the_check_of_a_first_batch_ends_it_on_all_ranks(
    jobs: Jobs, tmp_path: Path, num_stages: int, fault: str
) -> None:
    code, cause = WAYS_OUT[fault]
    result = jobs(job(num_stages, fault, "check", num_stages - 1), tmp_path)
    expected = [code] * num_stages
    if fault == "SIGKILL":
        expected[-1] = -9
    assert result["codes"] == expected and result["took"] < 10, result
    for text in result["texts"][:-1]:
        assert re.search(cause, text), text


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("num_stages", "place", "rank"), [(2, "callback", 1), (4, "check", 0), (4, "validation", 2)])
def test_ranks_that_all_wait_end_with_a_report(
    jobs: Jobs, tmp_path: Path, num_stages: int, place: str, rank: int
) -> None:
    """The user's code waits on one rank in a collective that the others never join."""
    result = jobs(job(num_stages, "barrier", place, rank, strategy={"deadlock_seconds": 3}), tmp_path)
    assert result["codes"] == [1] * num_stages and 3 < result["since_fault"] < 30, result
    for text in result["texts"]:
        assert "every rank has waited for the others for 3 s or longer (deadlock_seconds)" in text, text
        assert re.search(rf"Rank {rank} \(.*\) has not moved since .*; its stack: .*faulty_job\.py:\d+ in ", text), text


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("num_stages", "fault", "place", "rank"),
    [
        (2, "barrier and SIGTERM", "callback", 1),
        (4, "loop and SIGTERM", "forward", 2),
        (2, "loop and SIGTERM", "optimizer", 0),
    ],
)
def test_a_signal_ends_ranks_that_do_not_come_to_the_next_batch(
    jobs: Jobs, tmp_path: Path, num_stages: int, fault: str, place: str, rank: int
) -> None:
    result = jobs(job(num_stages, fault, place, rank, strategy={"preemption_seconds": 2}), tmp_path)
    assert result["codes"] == [143] * num_stages and 2 < result["since_fault"] < 20, result
    for text in result["texts"]:
        assert f"rank {rank} (" in text and "got SIGTERM, and no other batch began within preemption_seconds=2" in text
        assert "nothing was saved" in text
    assert not list(tmp_path.glob("preempted*"))


def test_work_that_takes_longer_is_no_deadlock(jobs: Jobs, tmp_path: Path) -> None:
    """One rank runs the user's code for longer than ``deadlock_seconds``, and the others wait for it."""
    result = jobs(job(2, "pause", "callback", 1, strategy={"deadlock_seconds": 1}), tmp_path)
    assert result["codes"] == [0, 0], result
