"""The command is told to stop and goes on, goes on with more steps as documented, and says when it trains nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from command import TINY_RUN, run_forked, start_command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my.txt").write_text("It is a truth universally acknowledged. " * 400)
    return tmp_path


TEXT = ["data.files=[my.txt]", "logger=none"]


def checkpoint_of(output: str) -> str:
    match = re.search(r"^checkpoint\s+(\S+)$", output, flags=re.MULTILINE)
    assert match, output
    return match.group(1)


@pytest.mark.nightly
def test_a_finished_run_goes_on_with_more_steps_as_documented(folder: Path) -> None:
    run = [*TINY_RUN, *TEXT]
    finished = run_forked(run, folder, num_processes=2)
    assert finished.code == 0, finished.output
    first = checkpoint_of(finished.output)
    assert first.endswith("step4.ckpt")
    finished = run_forked([*run, "trainer.max_steps=8", f"ckpt_path={first}"], folder, num_processes=2)
    assert finished.code == 0, finished.output
    assert checkpoint_of(finished.output).endswith("step8.ckpt")
    finished = run_forked([*run, f"ckpt_path={first}"], folder, num_processes=2)
    assert finished.code == 0, finished.output
    assert finished.output.count("This fit has trained no batch") == 1, finished.output
    assert re.search(r"step 4 of\s+max_steps=4. All steps are done: set max_steps above 4", finished.output)


def check_saved_and_resumed(folder: Path, output: str, rank: int) -> None:
    match = re.search(rf"SIGTERM on rank {rank}: training has ended after (\d+) batches", output)
    (saved,) = folder.glob("outputs/*/*/checkpoints/preempted-*.ckpt")
    assert match and str(saved) in output.replace("\n", ""), output
    steps = int(match.group(1)) + 2
    resumed = run_forked([*TINY_RUN, *TEXT, f"trainer.max_steps={steps}", f"ckpt_path='{saved}'"], folder, 2)
    assert resumed.code == 0 and checkpoint_of(resumed.output).endswith(f"step{steps}.ckpt"), resumed.output


SIGNALLED = """
import os
import signal

from lightning.pytorch import Callback

class Once(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_to_a_rank_saves_and_ends_with_143(folder: Path) -> None:
    """The checkpoint's name is one for Hydra."""
    (folder / "signalled.py").write_text(SIGNALLED)
    endless = ["trainer.max_steps=100000", "+callbacks.once._target_=signalled.Once"]
    ended = run_forked([*TINY_RUN, *TEXT, *endless], folder, 2)
    assert ended.code == 143, ended.output
    check_saved_and_resumed(folder, ended.output, 1)


@pytest.mark.nightly
def test_a_signal_to_the_command_saves_and_ends_with_143(folder: Path) -> None:
    """The processes that the command has started end with it."""
    endless = ["trainer.max_steps=100000", "trainer.val_check_interval=3"]
    process = start_command([*TINY_RUN, *TEXT, *endless], folder)
    try:
        deadline = time.monotonic() + 60
        while not list(folder.glob("outputs/*/*/checkpoints/step*.ckpt")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 143, output
    check_saved_and_resumed(folder, output, 0)
