"""A rank fails, somewhere, somehow: all processes end soon, none with exit code 0, and each says whose fault it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from script_runs import run_launched

LAYOUTS = {"2x1": ("1f1b", 2, 1), "4x1": ("zb_v", 4, 1), "2x2": ("zb_h1", 2, 2)}
PLACES = [
    "configure_optimizers", "dry run", "loading", "forward", "backward", "weight gradient", "send", "reduce",
    "optimizer", "callback", "validation", "saving",
]  # fmt: skip
FAULTS = ["exception", "memory", "SIGKILL", "SIGSTOP", "exit(0)", "loop"]
# seconds from the end of the first process to that of the last
SOON = 10.0
# shorter ones are reached where nothing has failed, on a host that is busy
TIMEOUT_OF_LOOPS = 5

Jobs = Callable[[dict[str, Any], Path], dict[str, Any]]

CAUSES = {
    "exception": r"raised ValueError: the user's own error at .*faulty_job\.py:\d+ in _fail",
    "memory": r"raised MemoryError: cannot allocate 80 GiB",
    "SIGKILL": r"ended without a message: it was killed|was killed by SIGKILL",
    "SIGSTOP": r"was stopped by a signal and did not continue within 3 s",
    "exit(0)": r"called exit\(0\)",
    "loop": r"kept the others waiting: it has not moved since .*, for \d+ s; its stack: .*faulty_job\.py:\d+ in _loop",
}


def check(jobs: Jobs, folder: Path, layout: str, fault: str, place: str, rank: int, **more: Any) -> None:
    timeout = TIMEOUT_OF_LOOPS if fault == "loop" else 60
    job = {"layout": LAYOUTS[layout], "fault": fault, "place": place, "rank": rank, "timeout": timeout, **more}
    result = jobs(job, folder)
    printed = "\n".join(f"--- rank {number}\n{text}" for number, text in enumerate(result["texts"]))
    assert not result["left"], f"ranks {result['left']} stayed:\n{printed}"
    assert 0 not in result["codes"], f"exit codes {result['codes']}:\n{printed}"
    assert result["took"] < SOON, f"{result['took']:.1f} s from the first end to the last:\n{printed}"
    told = rf"(this rank|rank \d) ended because rank {rank} .*({CAUSES[fault]})"
    for number, text in enumerate(result["texts"]):
        lines = [line for line in text.splitlines() if line.startswith("lightning_pp: ")]
        if number != rank:
            assert any(re.search(told, line) for line in lines), f"rank {number} does not say why:\n{printed}"
            assert "Traceback" not in text, printed
        elif fault in ("exception", "memory"):
            assert re.search(rf"rank {rank} \(on .*\) failed\.", text) and "faulty_job.py" in text, printed


# every fault but a loop, which takes its timeout, every layout and end of the pipeline, and most places
USUAL = [
    ("2x1", "exception", "dry run", 1),
    ("2x1", "SIGKILL", "forward", 0),
    ("2x1", "SIGSTOP", "loading", 1),
    ("2x1", "exit(0)", "optimizer", 0),
    ("2x2", "exception", "saving", 3),
    ("2x2", "memory", "configure_optimizers", 2),
    ("2x2", "SIGKILL", "validation", 1),
    ("4x1", "exception", "send", 1),
    ("2x2", "exception", "reduce", 1),
]


@pytest.mark.by_day(3)
@pytest.mark.parametrize(("layout", "fault", "place", "rank"), USUAL)
def test_every_rank_ends_and_says_why(
    jobs: Jobs, tmp_path: Path, layout: str, fault: str, place: str, rank: int
) -> None:
    check(jobs, tmp_path, layout, fault, place, rank)


@pytest.mark.parametrize(
    ("layout", "place", "rank"), [("2x1", "callback", 1), pytest.param("2x2", "loading", 2, marks=pytest.mark.nightly)]
)
def test_a_rank_that_stands_is_named_where_no_wait_raises(
    jobs: Jobs, tmp_path: Path, layout: str, place: str, rank: int
) -> None:
    check(jobs, tmp_path, layout, "loop", place, rank, waits_for_ever=True)


def check_nan(jobs: Jobs, folder: Path, layout: str, place: str, rank: int) -> None:
    job = {"layout": LAYOUTS[layout], "fault": "NaN", "place": place, "rank": rank, "timeout": 60}
    result = jobs(job, folder)
    assert not result["left"] and 0 not in result["codes"] and result["took"] < SOON, result
    for text in result["texts"]:
        assert re.search("NonFiniteError.*(nan|not finite)|CheckpointError.*not finite", text), text


@pytest.mark.parametrize(
    ("layout", "place", "rank"), [("2x1", "backward", 0), pytest.param("4x1", "forward", 2, marks=pytest.mark.nightly)]
)
def test_no_rank_trains_on_what_is_not_a_number(jobs: Jobs, tmp_path: Path, layout: str, place: str, rank: int) -> None:
    check_nan(jobs, tmp_path, layout, place, rank)


@pytest.mark.nightly
def test_a_short_timeout_does_not_bound_the_start(jobs: Jobs, tmp_path: Path) -> None:
    job = {"layout": LAYOUTS["2x1"], "fault": "none", "place": "none", "rank": -1, "timeout": 5, "late": 7.0}
    assert jobs(job, tmp_path)["codes"] == [0, 0]


def check_launched(folder: Path, launcher: str, layout: str, fault: str, place: str, rank: int) -> None:
    """The launcher ends soon after the fault, with an error; no process stays; what is printed names rank and cause.

    Launchers end the ranks that are left as soon as one has ended, so not every rank may come to say why.
    """
    _, pipeline, replicas = LAYOUTS[layout]
    timeout = TIMEOUT_OF_LOOPS if fault == "loop" else 60
    job = {"layout": LAYOUTS[layout], "fault": fault, "place": place, "rank": rank, "timeout": timeout}
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(pipeline * replicas)]
    script = [str(Path(__file__).parent / "jobs" / "faulty_job.py"), json.dumps({**job, "folder": str(folder)})]
    ended = run_launched([*(arguments if launcher == "torchrun" else []), *script], folder)
    since_fault = ended.at - float((folder / "fault.txt").read_text())
    printed = ended.output + "".join(
        f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("[0-9].txt"))
    )
    assert not ended.left, f"{ended.left} stayed:\n{printed}"
    assert ended.code != 0, printed
    # a loop is told after its timeout; torchrun gives ranks up to 30 s to end after it has sent them a signal
    assert since_fault < (40 if launcher == "torchrun" or fault == "loop" else 20), f"{since_fault:.1f} s:\n{printed}"
    by_us = rf"rank \d ended because rank {rank} .*({CAUSES[fault]})|rank {rank} \(on .*\) failed\."
    by_torchrun = rf"rank +: {rank} .*\n +exitcode +: -9" if fault == "SIGKILL" else "nothing"
    assert re.search(by_us, printed) or re.search(by_torchrun, printed), printed


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("launcher", "layout", "fault", "place", "rank"),
    [("trainer", "2x1", "SIGSTOP", "forward", 1), ("torchrun", "2x2", "exception", "validation", 2)],
)
def test_under_launchers(tmp_path: Path, launcher: str, layout: str, fault: str, place: str, rank: int) -> None:
    check_launched(tmp_path, launcher, layout, fault, place, rank)


# gradients are reduced where there are replicas
PRODUCT = [case for case in product(LAYOUTS, FAULTS, PLACES) if case[2] != "reduce" or LAYOUTS[case[0]][2] > 1]
# where there are numbers that can become none: weights, but in passes and in what is loaded
PLACES_OF_NAN = ["configure_optimizers", "loading", "forward", "backward", "optimizer", "callback", "validation"]


def rank_at(where: str, layout: str) -> int:
    _, pipeline, replicas = LAYOUTS[layout]
    return {"first": 0, "middle": pipeline * replicas // 2, "last": pipeline * replicas - 1}[where]


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "fault", "place"), PRODUCT)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_the_product(jobs: Jobs, tmp_path: Path, layout: str, fault: str, place: str, where: str) -> None:
    check(jobs, tmp_path, layout, fault, place, rank_at(where, layout))


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES_OF_NAN)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_the_product_of_what_is_not_a_number(jobs: Jobs, tmp_path: Path, layout: str, place: str, where: str) -> None:
    check_nan(jobs, tmp_path, layout, place, rank_at(where, layout))


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["trainer", "torchrun"])
@pytest.mark.parametrize(("layout", "fault", "place"), PRODUCT)
def test_the_product_under_launchers(tmp_path: Path, launcher: str, layout: str, fault: str, place: str) -> None:
    where = ["first", "middle", "last"][(FAULTS.index(fault) + PLACES.index(place)) % 3]
    check_launched(tmp_path, launcher, layout, fault, place, rank_at(where, layout))
