"""Faults at random steps, restarted by torchrun: the last weights are those of a run without faults, bit for bit."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import lightning_pp.checkpoint  # noqa: F401  (for the same reason)

# here, since importing Lightning sets environment variables, which no test may
soak = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "soak.py"))["soak"]


def test_two_faults(tmp_path: Path) -> None:
    figures = soak(tmp_path, 60, 2, 10)
    assert figures["equal"] and figures["faults"] == 2 and figures["attempts that went on"] == 2, figures


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_thirty_faults_in_three_thousand_steps(tmp_path: Path) -> None:
    figures = soak(tmp_path, 3000, 30, 50)
    assert figures["equal"] and figures["faults"] == 30 and figures["attempts that went on"] == 30, figures
    first, last = figures["MiB at peak, first and last attempt"]
    assert last < 1.2 * first, figures
