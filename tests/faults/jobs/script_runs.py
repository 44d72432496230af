"""Runs scripts in processes of their own, by Lightning's launcher or by torchrun."""

from __future__ import annotations

import contextlib
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
        at: When it ended, in seconds since the epoch.
        left: Processes that were still there ten seconds after it; they are ended.
    """

    code: int
    output: str
    seconds: float
    at: float
    left: list[str]


def run_script(
    launcher: str,
    folder: Path,
    meanwhile: Callable[[subprocess.Popen[str]], None] | None = None,
    environment: dict[str, str] | None = None,
    **asked: Any,
) -> Ended:
    """Runs ``training_script.py``; what it takes is ``asked``, the rest is as in :func:`run_launched`.

    Args:
        launcher: A key of :data:`LAUNCHERS`.
        folder: Where it writes.
        meanwhile: Called with the started process.
        environment: Variables besides this process's own.
        asked: What the script takes.
    """
    script = [str(SCRIPT), json.dumps({"folder": str(folder), **asked})]
    return run_launched([*LAUNCHERS[launcher], *script], folder, meanwhile, environment=environment)


def run_launched(
    arguments: list[str],
    folder: Path,
    meanwhile: Callable[[subprocess.Popen[str]], None] | None = None,
    timeout_s: float = 240.0,
    environment: dict[str, str] | None = None,
) -> Ended:
    """Runs Python in a session of its own, which is ended if it hangs.

    Args:
        arguments: Of Python.
        folder: Where it runs.
        meanwhile: Called with the started process.
        timeout_s: For all of it.
        environment: Variables besides this process's own.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _SET_BY_LAUNCHERS}
    environ["PYTHONPATH"] = str(Path(lightning_pp.__file__).parents[1])
    environ |= {"OMP_NUM_THREADS": "1", **(environment or {})}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_as_from_a_terminal,
    )
    try:
        if meanwhile is not None:
            meanwhile(process)
        started = time.monotonic()
        output, _ = process.communicate(timeout=timeout_s)
        seconds, at = time.monotonic() - started, time.time()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the run did not end within {timeout_s:.0f} s; its output:\n{output}") from None
    return Ended(process.returncode, output, seconds, at, _left_of_session(process.pid))


def _as_from_a_terminal() -> None:
    """A process that was started in the background ignores Ctrl-C, and so would those that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _left_of_session(session: int) -> list[str]:
    """Processes that have not ended ten seconds from now; they are ended."""
    deadline = time.monotonic() + 10
    while left := _processes_of_session(session):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
            break
        time.sleep(0.05)
    return left


def _processes_of_session(session: int) -> list[str]:
    listed = subprocess.run(["ps", "-o", "pid=,stat=,args=", "-s", str(session)], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if line.split()[1][0] != "Z"]


def when_batches_are_done(folder: Path, number: int, action: Callable[[subprocess.Popen[str]], None]) -> Any:
    """For ``meanwhile``: ``action`` once rank 1 has done so many batches."""

    def wait_and_act(process: subprocess.Popen[str]) -> None:
        wait_until(lambda: len(losses(folder, 1)) >= number, process)
        action(process)

    return wait_and_act


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Returns when ``condition`` holds; ``process`` has to run until then."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def losses(folder: Path, rank: int) -> list[list[float]]:
    """For each batch that a rank has done, its number in the run and its loss."""
    path = folder / f"losses-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
