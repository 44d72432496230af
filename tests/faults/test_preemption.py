"""A signal to a training: all ranks end at one batch, the training is saved there, and goes on from it."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from parity_run import QUIET
from pool import WorkerPool
from script_runs import losses, run_script, when_batches_are_done
from training_script import BATCHES_PER_EPOCH, Losses, Regression, loader

from lightning_pp import PipelineParallelStrategy


def fit(folder: Path, devices: int = 1, ckpt_path: Path | None = None, **options: Any) -> None:
    trainer = pl.Trainer(
        **QUIET,
        devices=devices,
        strategy="auto" if devices == 1 else PipelineParallelStrategy(num_microbatches=2, check_first_batches=False),
        callbacks=[Losses(folder)],
        **{"max_epochs": 3, **options},
    )
    trainer.fit(Regression(), loader(), ckpt_path=ckpt_path)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def check_ended(folder: Path, ended: Any, name: str, checkpoints: Path, num_batches: int) -> Path:
    """The one line that tells of it is true; returns the checkpoint."""
    told = re.findall(rf"{name} on rank (\d): training has ended after (\d+) batches of epoch (\d+) .*", ended.output)
    assert len(told) == 1, ended.output
    assert BATCHES_PER_EPOCH * int(told[0][2]) + int(told[0][1]) == num_batches
    assert len(losses(folder, 0)) == len(losses(folder, 1)) == num_batches
    (saved,) = checkpoints.glob("preempted-*.ckpt")
    assert str(saved) in ended.output
    return saved


def check_goes_on(pool: WorkerPool, folder: Path, saved: Path, **options: Any) -> None:
    """From where it was saved on, the training is that of one device."""
    pool.run(fit, folder, 2, saved, world_size=2, **options)
    (folder / "one").mkdir()
    fit(folder / "one", **options)
    expected = losses(folder / "one", 0)
    assert [number for number, _ in expected] == list(range(3 * BATCHES_PER_EPOCH))
    for rank in range(2):
        assert [number for number, _ in losses(folder, rank)] == [number for number, _ in expected]
        found = [loss for _, loss in losses(folder, rank)]
        assert found == pytest.approx([loss for _, loss in expected], rel=1e-5)


@pytest.mark.nightly  # by day a signal within processes of the pool, and one to a command
@pytest.mark.parametrize(
    ("launcher", "name", "ranks", "at", "accumulate"),
    [
        ("trainer", "SIGTERM", (0,), 2, 1),
        ("trainer", "SIGTERM", (1,), 4, 1),  # not where an epoch begins
        ("trainer", "SIGUSR1", (0, 1), 2, 1),
        ("torchrun", "SIGTERM", (1,), 1, 3),  # not within an accumulation
    ],
)
def test_a_signal_in_a_step_saves_the_training_which_goes_on_as_one_device(
    pool: WorkerPool, tmp_path: Path, launcher: str, name: str, ranks: tuple[int, ...], at: int, accumulate: int
) -> None:
    options = {"accumulate_grad_batches": accumulate}
    dirpath = tmp_path / "kept"
    ended = run_script(launcher, tmp_path, event=name, ranks=ranks, at=at, dirpath=str(dirpath), trainer=options)
    code = 128 + getattr(signal, name)
    if launcher == "trainer":
        assert ended.code == code, ended.output
    else:
        assert ended.code == 1 and f"exitcode  : {code}" in ended.output, ended.output
    num_batches = len(losses(tmp_path, 0))
    assert num_batches % accumulate == 0 and at + 1 <= num_batches <= at + 2 + accumulate
    assert num_batches % BATCHES_PER_EPOCH > 0
    saved = check_ended(tmp_path, ended, name, dirpath, num_batches)
    check_goes_on(pool, tmp_path, saved, **options)


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["trainer", "torchrun"])
def test_a_signal_to_the_process_that_was_started_is_enough(tmp_path: Path, launcher: str) -> None:
    """As Kubernetes does it; without a ModelCheckpoint, in the background, written to the default folder."""
    ended = run_script(
        launcher,
        tmp_path,
        when_batches_are_done(tmp_path, 2, lambda process: process.send_signal(signal.SIGTERM)),
        pause_s=0.2,
        strategy={"async_checkpoint": True},
    )
    # torchrun tells its own end by a signal with a traceback and 1
    assert ended.code == (143 if launcher == "trainer" else 1), ended.output
    check_ended(tmp_path, ended, "SIGTERM", tmp_path, len(losses(tmp_path, 0)))
    assert len(losses(tmp_path, 0)) < 3 * BATCHES_PER_EPOCH


@pytest.mark.nightly
def test_lightnings_requeueing_under_slurm_acts_between_two_batches(tmp_path: Path) -> None:
    """The checkpoint that Lightning looks for is there, the job is requeued once, and training goes on meanwhile."""
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    command.chmod(0o755)
    environment = {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "MASTER_PORT": str(free_port())}
    asked: dict[str, Any] = {"environment": environment}
    ended = run_script("srun", tmp_path, event="SIGUSR1", ranks=(0, 1), at=2, **asked)
    assert ended.code == 0, ended.output
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    assert [number for number, _ in losses(tmp_path, 1)] == list(range(3 * BATCHES_PER_EPOCH))
    before = losses(tmp_path, 0)
    for rank in range(2):
        (tmp_path / f"losses-{rank}.jsonl").unlink()
    ended = run_script("srun", tmp_path, **asked)  # the job that Slurm starts again
    assert ended.code == 0, ended.output
    for rank in range(2):
        assert losses(tmp_path, rank) == [pytest.approx(each) for each in before[-len(losses(tmp_path, rank)) :]]
        assert losses(tmp_path, rank)[0][0] == 4  # told in the third, and set by the time of the next


def fit_that_saves_on_exceptions(folder: Path) -> tuple[int, bool]:
    keeper = ModelCheckpoint(folder / "kept", "on_exception", save_top_k=-1, every_n_epochs=50, save_on_exception=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineParallelStrategy(num_microbatches=2, check_first_batches=False),
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Losses(folder), keeper],
    )
    try:
        trainer.fit(Regression("SIGTERM", (1,), 2), loader())
    except SIGTERMException as end:
        return int(str(end.code)), trainer.received_sigterm
    raise AssertionError("the signal has not ended the training")


def test_callbacks_may_save_where_a_signal_ends_all_ranks_and_the_training_goes_on(
    pool: WorkerPool, tmp_path: Path
) -> None:
    assert pool.run(fit_that_saves_on_exceptions, tmp_path, world_size=2) == [(143, True)] * 2
    (saved,) = (tmp_path / "kept").glob("preempted-*.ckpt")
    others = [path for path in saved.parent.iterdir() if path != saved]
    assert [bool(re.search(r"exception", path.name)) for path in others] == [True], others
    check_goes_on(pool, tmp_path, saved)
