"""A pytest plugin that runs tests written for Lightning's Trainer with PipelineParallelStrategy, unchanged.

``PYTHONPATH=LIGHTNING_PP/tests pytest -p lightning_suite.plugin TESTS`` gives every Trainer on one device that names no
strategy this one, with one stage. With ``--stages 2`` it has two: each test runs once for each stage, in processes of
their own, and passes if it passes in all of them. Lightning's ``BoringModel`` has one layer; it gets as many as there
are stages. ``--plain`` changes only that: what fails with it does not fail because of the strategy.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import inspect
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from pool import torchrun_environ
from torch import nn
from torch.distributed import TCPStore

from lightning_pp import PipelineParallelStrategy

LIMIT_S = 60.0
GRACE_S = 5.0  # for the other stages, once one has failed
STACK_S = 0.5  # for a process to write where it is


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stages", type=int, default=1, help="stages of each Trainer, and layers of BoringModel")
    parser.addoption("--plain", action="store_true", help="leave Trainer as it is, in one process")


def pytest_configure(config: pytest.Config) -> None:
    num_stages = config.getoption("--stages")
    give_layers(num_stages)
    if not config.getoption("--plain"):
        give_strategy(num_stages)


def give_layers(number: int) -> None:
    """Puts square layers before the layer of ``BoringModel``; subclasses that replace ``layer`` have their own."""
    init = BoringModel.__init__

    def with_layers(self: BoringModel) -> None:
        init(self)
        if number > 1:
            self.layer = nn.Sequential(*(nn.Linear(32, 32) for _ in range(number - 1)), self.layer)

    BoringModel.__init__ = with_layers  # type: ignore[method-assign]


def give_strategy(num_stages: int) -> None:
    """Changes ``Trainer``: one that would run on one device without a strategy named runs on ``num_stages``."""
    init = Trainer.__init__

    @functools.wraps(init)
    def with_strategy(self: Trainer, **options: Any) -> None:
        is_cpu = options.get("accelerator", "auto") in ("auto", "cpu")
        if is_cpu and options.get("devices", "auto") in ("auto", 1, "1") and options.get("strategy", "auto") == "auto":
            # tests read checkpoints, so these are files
            patience = timedelta(seconds=LIMIT_S / 2)
            strategy = PipelineParallelStrategy(
                num_stages, save_distributed_checkpoint=False, timeout=patience, on_nonfinite="ignore"
            )
            options.update(accelerator="cpu", devices=num_stages, strategy=strategy)
        init(self, **options)

    Trainer.__init__ = with_strategy  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    number = pyfuncitem.config.getoption("--stages")
    if number == 1 or pyfuncitem.config.getoption("--plain"):
        return None
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gc.disable()  # a process that is forked collects before its code runs, and what the parent made is not its to end
    stages = [Stage(pyfuncitem, torchrun_environ(rank, number, store.port)) for rank in range(number)]
    gc.enable()
    deadline, why = time.monotonic() + LIMIT_S, f"it was still running after {LIMIT_S:.0f} s, and was killed"
    while (left := [stage for stage in stages if stage.process.is_alive()]) and time.monotonic() < deadline:
        # after is_alive, which is where a process that has ended gets its exit code
        if any(stage.process.exitcode for stage in stages) and time.monotonic() + GRACE_S < deadline:
            deadline = time.monotonic() + GRACE_S
            why = f"it was still running {GRACE_S:.0f} s after another rank had failed, and was killed"
        wait([stage.process.sentinel for stage in left], deadline - time.monotonic())
    report([stage.outcome(why) for stage in stages])
    return True


class Stage:
    """A process of its own that runs a test as one stage, forked with the test's fixtures.

    Args:
        item: The test.
        environ: What tells the process its rank.
    """

    def __init__(self, item: pytest.Function, environ: dict[str, str]) -> None:
        context = get_context("fork")
        self._end, its = context.Pipe()
        descriptor, name = tempfile.mkstemp(prefix="stage_stack_")
        os.close(descriptor)
        self._stack = Path(name)
        self.process = context.Process(target=run_test, args=(item, environ, its, name))
        self.process.start()
        its.close()

    def outcome(self, why_killed: str) -> tuple[str, str]:
        """What the process has told; of one that has told nothing how it ended, and where it was.

        Args:
            why_killed: Said of a process that is still running, which is killed.
        """
        is_running = self.process.is_alive()
        if is_running:
            os.kill(self.process.pid or 0, signal.SIGUSR2)
            time.sleep(STACK_S)
            self.process.kill()
        self.process.join()
        stack = self._stack.read_text()
        self._stack.unlink()
        try:
            told: tuple[str, str] = self._end.recv()
        except EOFError:
            told = ("failed", f"{why_killed if is_running else ended_by(self.process.exitcode or 0)}\n{stack}")
        return told


def ended_by(code: int) -> str:
    """How a process ended that has told nothing; ``code`` is its exit code, negative for a signal."""
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"it ended {how}, before the test had an outcome"


def report(told: list[tuple[str, str]]) -> None:
    """Gives the test the outcome of its processes, of which each has told an outcome and why."""
    failed = [f"Rank {rank}:\n{text}" for rank, (outcome, text) in enumerate(told) if outcome == "failed"]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    if told[0][0] == "skipped":
        pytest.skip(told[0][1])


def run_test(item: pytest.Function, environ: dict[str, str], end: Connection, stack_file: str) -> None:
    """Runs in a process of its own; exits with 1 if the test fails. When it crashes, and when asked, it tells where."""
    gc.freeze()  # what the parent made is not this process's to end
    gc.enable()
    stacks = open(stack_file, "w")  # noqa: SIM115  # until the process ends
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR2, stacks)
    try:
        os.environ.update(environ)
        names = inspect.signature(item.function).parameters
        item.obj(**{name: item.funcargs[name] for name in names if name in item.funcargs})
        outcome = ("passed", "")
    except pytest.skip.Exception as reason:
        outcome = ("skipped", str(reason))
    except BaseException:
        outcome = ("failed", traceback.format_exc())
    end.send(outcome)
    os._exit(outcome[0] == "failed")
