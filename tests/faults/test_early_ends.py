"""Runs that end before their time, not by a signal that saves them: the code says so, and nobody waits."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core import rank_zero
from parity_run import QUIET
from pool import WorkerPool
from script_runs import losses, run_script, wait_until, when_batches_are_done
from training_script import Regression, loader

from lightning_pp import PipelineParallelStrategy


@pytest.mark.nightly
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("launcher", "ranks"), [("trainer", (0,)), ("trainer", (1,)), ("trainer", (0, 1)), ("torchrun", (0, 1))]
)
def test_a_rank_that_leaves_by_exit_makes_the_job_fail(tmp_path: Path, launcher: str, ranks: tuple[int, ...]) -> None:
    ended = run_script(launcher, tmp_path, event="exit", ranks=ranks, at=2)
    assert ended.code != 0, ended.output
    for rank in ranks:
        told = f"Rank {rank} called exit() before the run was finished"
        # a launcher that sees the first failure may end the others before they speak
        assert told in ended.output or len(ranks) > 1, ended.output
    assert "called exit() before the run was finished" in ended.output
    assert max(len(losses(tmp_path, rank)) for rank in range(2)) <= 3


@pytest.mark.nightly
def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    """Both come from the terminal, to all processes, while Lightning waits for a logger after the first."""

    def interrupt(process: subprocess.Popen[str]) -> None:
        os.killpg(process.pid, signal.SIGINT)
        wait_until((tmp_path / "finalizing").exists, process)
        os.killpg(process.pid, signal.SIGINT)

    meanwhile = when_batches_are_done(tmp_path, 2, interrupt)
    ended = run_script("trainer", tmp_path, meanwhile, pause_s=0.2, ends_slowly=True)
    assert ended.code == -signal.SIGINT, ended.output  # a shell says 130
    assert ended.seconds < 40 and "Interrupted again: ended at once." in ended.output


@pytest.mark.nightly
def test_a_signal_ends_an_evaluation_on_all_ranks(tmp_path: Path) -> None:
    ended = run_script("trainer", tmp_path, method="test", event="SIGTERM", ranks=(1,), at=2)
    assert ended.code == 143, ended.output
    assert "SIGTERM on rank 1: test has ended before its last batch." in ended.output
    assert not list(tmp_path.rglob("*.ckpt"))


def evaluated_until_a_signal() -> tuple[str, list[str]]:
    """In a worker: the code with which an evaluation ends, and what is said of it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    trainer = pl.Trainer(**QUIET, devices=2, strategy=PipelineParallelStrategy(num_microbatches=2))
    try:
        trainer.test(Regression("SIGTERM", (1,), 2), loader(), verbose=False)
    except SIGTERMException as end:
        return str(end.code), [line for line in lines if "SIGTERM on rank" in line]
    finally:
        rank_zero.log.removeHandler(handler)
    raise AssertionError("the signal has not ended the evaluation")


def test_an_evaluation_ends_with_the_code_of_the_signal(pool: WorkerPool) -> None:
    first, second = pool.run(evaluated_until_a_signal, world_size=2)
    assert first == ("143", ["SIGTERM on rank 1: test has ended before its last batch."])
    assert second == ("143", [])
