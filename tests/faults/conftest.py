"""A process that has imported everything, and forks the ranks of jobs that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Jobs = Callable[[dict[str, Any], Path], dict[str, Any]]


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "jobs" / "faulty_job.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
        stdin.write(json.dumps({**job, "folder": str(folder)}) + "\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(stdout.readline())
        return answer

    yield run
    stdin.close()
    process.wait(30)
