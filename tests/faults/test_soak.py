"""Faults at random steps, restarted by torchrun: the last weights are those of a run without faults, bit for bit."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import time
from pathlib import Path

import pytest

import lightning_pp.checkpoint  # noqa: F401  (for the same reason)

# here, since importing Lightning sets environment variables, which no test may
_benchmark = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "reliability" / "soak.py"))
soak, soak_with, start = _benchmark["soak"], _benchmark["soak_with"], _benchmark["start"]


@pytest.mark.nightly
def test_two_faults(tmp_path: Path) -> None:
    figures = soak(tmp_path, 60, 2, 10)
    assert figures["equal"] and figures["losses equal"] and figures["faults"] == 2, figures
    assert figures["attempts that went on"] == 2, figures


def check_two_nodes(folder: Path, planned: list[tuple[int, str, int]]) -> None:
    """Two ``torchrun`` of two processes each: ranks 0 and 1 are of the first. All attempts have a checkpoint."""
    figures = soak_with(folder, 20, planned, 5, num_nodes=2)
    assert figures["equal"] and figures["losses equal"] and figures["steps logged"] == 20, figures
    assert figures["faults"] == figures["attempts that went on"] == len(planned), figures


@pytest.mark.nightly
def test_a_worker_of_either_node_is_killed(tmp_path: Path) -> None:
    """Each torchrun counts the failures of its own processes, so that they never agree on which attempt it is."""
    check_two_nodes(tmp_path, [(7, "SIGKILL", 3), (13, "SIGKILL", 0)])


@pytest.mark.nightly
def test_a_static_rendezvous_uses_up_a_restart_of_each_node(tmp_path: Path) -> None:
    """The torchrun of the node without a fault is told nothing: its processes end by it, and are started again."""
    figures = soak_with(tmp_path, 10, [(7, "SIGKILL", 3)], 5, num_nodes=2, backend="static")
    assert figures["equal"] and figures["losses equal"] and figures["attempts that went on"] == 1, figures
    for node in range(2):
        log = (tmp_path / f"faulty-{node}.log").read_text()
        assert log.count("Worker group FAILED. 4/4 attempts left") == 1 and "3/4 attempts left" not in log, log


@pytest.mark.nightly
def test_the_torchrun_with_the_store_is_lost(tmp_path: Path) -> None:
    """All processes of both nodes end, and say why; torchrun of the other node ends with its own error."""
    first, second = start(tmp_path, "lost", 100_000, 5, [], 2, "c10d")
    logs = [tmp_path / f"lost-{node}.log" for node in range(2)]
    try:
        deadline = time.monotonic() + 120
        while not any(tmp_path.glob("lost/checkpoints/step5.ckpt")):
            assert time.monotonic() < deadline and first.poll() is second.poll() is None, logs[0].read_text()
            time.sleep(0.1)
        first.kill()
        first.wait()
        assert second.wait(90) == 1
        deadline = time.monotonic() + 10
        while processes_with(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_with(tmp_path) == []
    finally:
        for process in (first.pid, second.pid, *processes_with(tmp_path)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    printed = [log.read_text() for log in logs]
    for text in printed:
        assert "the job's key-value store, which torchrun's agent keeps, is gone" in text, text
    assert "RendezvousConnectionError" in printed[1], printed[1]


def processes_with(folder: Path) -> list[int]:
    """Those whose command line names ``folder``; torchrun starts each in a session of its own."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if str(folder) in line]


@pytest.mark.nightly
@pytest.mark.parametrize("second", range(4))
@pytest.mark.parametrize("first", range(4))
def test_any_workers_of_two_nodes_are_killed(tmp_path: Path, first: int, second: int) -> None:
    check_two_nodes(tmp_path, [(7, "SIGKILL", first), (8, "SIGKILL", second)])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_thirty_faults_in_three_thousand_steps(tmp_path: Path) -> None:
    figures = soak(tmp_path, 3000, 30, 50)
    assert (
        figures["equal"]
        and figures["losses equal"]
        and figures["faults"] == 30
        and figures["attempts that went on"] == 30
    ), figures
    first, last = figures["MiB at peak, first and last attempt"]
    assert last < 1.2 * first, figures
