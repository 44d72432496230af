"""What takes long is told while it goes on; what does not is not."""

from __future__ import annotations

import re
import threading

import pytest

from lightning_pp.long_tasks import LongTask


def test_a_long_task_is_told_until_it_is_over() -> None:
    lines: list[str] = []
    three = threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            three.set()

    with LongTask("The search", tell, first_after_s=0.01, then_every_s=0.01) as task:
        task.update("Building gpipe")
        assert three.wait(60)
    assert all(re.fullmatch(r"Building gpipe: \d+ s so far\.", line) for line in lines[:-1])
    assert re.fullmatch(r"The search took \d+ s\.", lines[-1])


def test_a_short_task_is_not_told() -> None:
    lines: list[str] = []
    with LongTask("The search", lines.append, first_after_s=60.0):
        pass
    with LongTask("The search", None):
        pass
    assert lines == []


def test_nothing_is_said_to_be_done_that_has_failed() -> None:
    lines: list[str] = []
    told = threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        told.set()

    def fail() -> None:
        with LongTask("The search", tell, first_after_s=0.01):
            assert told.wait(60)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert not any("took" in line for line in lines)
