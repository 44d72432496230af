"""A process that has imported everything, and forks the ranks of jobs that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_job import serve
from pool import fork_context

Jobs = Callable[[dict[str, Any], Path], dict[str, Any]]


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    context = fork_context()
    connection, child = context.Pipe()
    process = context.Process(target=serve, args=(child,))
    process.start()
    child.close()

    def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
        connection.send((job, folder))
        answer: dict[str, Any] = connection.recv()
        return answer

    yield run
    connection.close()
    process.join(30)
