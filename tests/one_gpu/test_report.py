"""The report of a trial on one GPU has a line for each check: what came of it, and figures or the reason."""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
_script = runpy.run_path(str(BENCHMARKS / "one_gpu.py"))
lines_of_doctor, lines_of_tests = _script["lines_of_doctor"], _script["lines_of_tests"]

TESTS = """
import time
import pytest

def test_passes(record_property):
    record_property("figure", "3 MiB")

def test_fails(record_property):
    record_property("figure", "4 MiB")
    assert 2 == 3, "two is not three"

@pytest.mark.skip(reason="needs 9 CUDA devices")
def test_is_skipped(): ...

@pytest.fixture
def broken():
    raise OSError("no space")

def test_has_no_beginning(broken): ...

def test_takes_long():
    time.sleep(1000)

def test_comes_too_late(): ...
"""


@pytest.mark.nightly
def test_each_test_has_a_line_when_the_time_is_up(tmp_path: Path) -> None:
    path = tmp_path / "test_example.py"
    path.write_text(TESTS)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), str(BENCHMARKS)])}
    with (tmp_path / "log.txt").open("w") as log:
        lines = lines_of_tests([str(path)], [], environ, time.monotonic() + 45.0, log)
        (line,) = lines_of_doctor(2, environ, time.monotonic() + 1.0, log)
    assert line == ("not run", 0.0, "doctor, 2 ranks", "the time was up")
    found = {line.name.rpartition("::")[2]: (line.result, line.told) for line in lines}
    failed, told = found.pop("test_fails")
    assert failed == "failed" and told.startswith("4 MiB; AssertionError: two is not three")
    assert found == {
        "test_passes": ("passed", "3 MiB"),
        "test_is_skipped": ("not run", "needs 9 CUDA devices"),
        "test_has_no_beginning": ("failed", "OSError: no space"),
        "test_takes_long": ("not run", "the time was up"),
        "test_comes_too_late": ("not run", "the time was up"),
    }
    report = _script["report_of"](lines, 90.0).splitlines()
    assert report[0] == _script["first_line"]() and len(report) == 8
    assert report[-1] == "1 passed, 2 failed, 3 not run; 1.5 minutes."
