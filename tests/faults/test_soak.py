"""Faults at random steps, restarted by torchrun: the last weights are those of a run without faults, bit for bit."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import lightning_pp.checkpoint  # noqa: F401  (for the same reason)

# here, since importing Lightning sets environment variables, which no test may
_benchmark = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "soak.py"))
soak, soak_with = _benchmark["soak"], _benchmark["soak_with"]


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


def test_a_worker_of_either_node_is_killed(tmp_path: Path) -> None:
    """Each torchrun counts the failures of its own processes, so that they never agree on which attempt it is."""
    check_two_nodes(tmp_path, [(7, "SIGKILL", 3), (13, "SIGKILL", 0)])


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
