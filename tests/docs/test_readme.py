"""README: its example runs as it stands, its commands come first, its figures are those of the benchmarks page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import environment
from pool import WorkerPool
from test_code_blocks import DOCS, blocks, run_script

README = DOCS.parent / "README.md"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    (script,) = blocks(README, "python")
    (tmp_path / "train.py").write_text(script)
    return tmp_path


def test_the_example_trains_two_processes(pool: WorkerPool, example: Path) -> None:
    pool.run(run_script, str(example), "train.py", world_size=2, timeout=120)


@pytest.mark.nightly
def test_the_example_starts_its_second_process(example: Path) -> None:
    command = [sys.executable, "train.py"]
    finished = subprocess.run(
        command, cwd=example, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0 and "MEMBER: 2/2" in output, output
    assert "`Trainer.fit` stopped: `max_epochs=2` reached." in output, output


def test_the_first_two_commands_are_the_ones_that_are_timed() -> None:
    install = "python3.11 -m venv .venv && .venv/bin/pip install -c constraints.txt . && .venv/bin/lightning-pp"
    test = ".venv/bin/pip install -c constraints.txt '.[test]' && .venv/bin/pytest -n 2"
    assert [block.rstrip("\n") for block in blocks(README, "bash")[:2]] == [install, test]


def test_measured_results_are_on_the_benchmarks_page_with_their_commands() -> None:
    recorded = (DOCS / "inside" / "benchmarks.md").read_text()
    rows = re.findall(r"^\| (.+) \| ([\d.]+)[^|]* \| ([\d.]+)[^|]* \| `(.+)` \|$", README.read_text(), re.MULTILINE)
    assert len(rows) == 3
    for what, ours, theirs, command in rows:
        assert command in recorded and {ours, theirs} <= set(re.findall(r"\d+(?:\.\d+)?", recorded)), what
