"""Runs ``training_script.py`` in processes of its own, by Lightning's launcher or by torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning_pp

SCRIPT = Path(__file__).with_name("training_script.py")
LAUNCHERS = {
    "trainer": (),
    "srun": (str(Path(__file__).with_name("two_tasks.py")),),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}
_SET_BY_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")


@dataclass
class Ended:
    """How a run ended.

    Attributes:
        code: Of the process that was started.
        output: Its stdout and stderr together.
        seconds: From ``meanwhile`` to the end.
    """

    code: int
    output: str
    seconds: float


def run_script(
    launcher: str,
    folder: Path,
    meanwhile: Callable[[subprocess.Popen[str]], None] | None = None,
    timeout_s: float = 120.0,
    environment: dict[str, str] | None = None,
    **asked: Any,
) -> Ended:
    """Runs the script, in a process group of its own that is ended if it hangs.

    Args:
        launcher: A key of :data:`LAUNCHERS`.
        folder: Where it writes.
        meanwhile: Called with the started process.
        timeout_s: For all of it.
        environment: Variables besides this process's own.
        asked: What the script takes.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _SET_BY_LAUNCHERS}
    environ["PYTHONPATH"] = str(Path(lightning_pp.__file__).parents[1])
    environ |= {"OMP_NUM_THREADS": "1", **(environment or {})}
    process = subprocess.Popen(
        [sys.executable, *LAUNCHERS[launcher], str(SCRIPT), json.dumps({"folder": str(folder), **asked})],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        if meanwhile is not None:
            meanwhile(process)
        started = time.monotonic()
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the run did not end within {timeout_s:.0f} s; its output:\n{output}") from None
    return Ended(process.returncode, output, time.monotonic() - started)


def when_batches_are_done(folder: Path, number: int, action: Callable[[subprocess.Popen[str]], None]) -> Any:
    """For ``meanwhile``: ``action`` once rank 1 has done so many batches."""

    def wait_and_act(process: subprocess.Popen[str]) -> None:
        wait_until(lambda: len(losses(folder, 1)) >= number, process)
        action(process)

    return wait_and_act


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Returns when ``condition`` holds; ``process`` has to run until then."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def losses(folder: Path, rank: int) -> list[list[float]]:
    """For each batch that a rank has done, its number in the run and its loss."""
    path = folder / f"losses-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
