"""Trainers of tests that know nothing of the plugin get this strategy, in as many processes as there are stages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command import run_forked

TESTS = """
import os
import signal
import time

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel


def fitted(tmp_path):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(default_root_dir=tmp_path, max_steps=2, limit_val_batches=1, **quiet)
    trainer.fit(BoringModel())
    return trainer


def test_trains_as_plain(tmp_path):
    trainer = fitted(tmp_path)
    assert trainer.global_step == 2 and trainer.strategy.is_plain


def test_trains_in_two_stages(tmp_path):
    strategy = fitted(tmp_path).strategy
    assert strategy.engine.placement.num_stages == 2 and strategy.global_rank == int(os.environ["RANK"])


def test_names_a_strategy():
    assert type(Trainer(strategy="ddp").strategy).__name__ == "DDPStrategy"


def test_fails_on_one_rank():
    assert os.environ.get("RANK") != "1", "not here"


def test_crashes_on_one_rank():
    if os.environ.get("RANK") == "1":
        signal.raise_signal(signal.SIGSEGV)


def test_leaves_on_one_rank():
    if os.environ.get("RANK") == "1":
        os._exit(3)


def wait_for_nobody():
    time.sleep(60)


def test_hangs_on_one_rank():
    if "RANK" in os.environ:
        wait_for_nobody() if os.environ["RANK"] == "0" else pytest.fail("alone")


def test_is_skipped():
    pytest.skip("by itself")
"""

# what is told of each, wherever it fails
FAILURES = {
    "fails": ["Rank 1:", "not here"],
    "crashes": ["Rank 1:", "it ended by SIGSEGV, before the test had an outcome", "in test_crashes_on_one_rank"],
    "leaves": ["Rank 1:", "it ended with exit code 3, before the test had an outcome"],
    "hangs": ["Rank 0:", "still running 5 s after another rank had failed", "in wait_for_nobody", "alone"],
}


def outcomes(folder: Path, *options: str) -> tuple[dict[str, str], str]:
    """Test to outcome, and all that was printed."""
    (folder / "test_of_others.py").write_text(TESTS)
    arguments = ["-p", "lightning_suite.plugin", "-rA", "--tb=short", "-c", "/dev/null", "--rootdir", ".", *options]
    output = run_forked([*arguments, "test_of_others.py"], folder, module="pytest").output
    found = re.findall(r"^(PASSED|FAILED|SKIPPED).*?(?:::test_(\w+)|by itself)", output, re.MULTILINE)
    return {name or "is_skipped": outcome for outcome, name in found}, output


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("options", "failing"),
    [
        ((), {"trains_in_two_stages"}),
        (("--stages", "2"), {"trains_as_plain", *(f"{what}_on_one_rank" for what in FAILURES)}),
        (("--plain",), {"trains_as_plain", "trains_in_two_stages"}),
    ],
    ids=["one stage", "two stages", "plain"],
)
def test_tests_of_others_run_with_the_strategy(tmp_path: Path, options: tuple[str, ...], failing: set[str]) -> None:
    found, output = outcomes(tmp_path, *options)
    assert {name for name, outcome in found.items() if outcome == "FAILED"} == failing, output
    assert found["is_skipped"] == "SKIPPED" and found["names_a_strategy"] == "PASSED"
    for what, texts in FAILURES.items() if "fails_on_one_rank" in failing else ():
        told = output.partition(f"_ test_{what}_on_one_rank _")[2].partition("\n___")[0]
        assert all(text in told for text in texts), output
