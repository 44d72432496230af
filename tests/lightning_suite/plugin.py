"""A pytest plugin that runs tests written for Lightning's Trainer with PipelineParallelStrategy, unchanged.

``PYTHONPATH=LIGHTNING_PP/tests pytest -p lightning_suite.plugin TESTS`` gives every Trainer on one device that names no
strategy this one, with one stage. With ``--stages 2`` it has two: each test runs once for each stage, in processes of
their own, and passes if it passes in all of them. Lightning's ``BoringModel`` has one layer; it gets as many as there
are stages. ``--plain`` changes only that: what fails with it does not fail because of the strategy.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import time
import traceback
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
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
    context = get_context("fork")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends: list[Connection] = []
    processes = []
    gc.disable()  # a process that is forked collects before its code runs, and what the parent made is not its to end
    for rank in range(number):
        mine, its = context.Pipe()
        process = context.Process(target=run_test, args=(pyfuncitem, torchrun_environ(rank, number, store.port), its))
        process.start()
        its.close()
        ends.append(mine)
        processes.append(process)
    gc.enable()
    deadline = time.monotonic() + LIMIT_S
    while (left := [p for p in processes if p.is_alive()]) and time.monotonic() < deadline:
        wait([process.sentinel for process in left], deadline - time.monotonic())
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    for process in processes:
        process.kill()
        process.join()
    report([outcome_at(end) for end in ends])
    return True


def outcome_at(end: Connection) -> tuple[str, str]:
    """What a process has told before it ended or was killed."""
    try:
        told: tuple[str, str] = end.recv()
    except EOFError:
        told = ("failed", "it did not end by itself")
    return told


def report(told: list[tuple[str, str]]) -> None:
    """Gives the test the outcome of its processes, of which each has told an outcome and why."""
    failed = [f"Rank {rank}:\n{text}" for rank, (outcome, text) in enumerate(told) if outcome == "failed"]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    if told[0][0] == "skipped":
        pytest.skip(told[0][1])


def run_test(item: pytest.Function, environ: dict[str, str], end: Connection) -> None:
    """Runs in a process of its own, forked with the test's fixtures; exits with 1 if the test fails."""
    gc.freeze()  # what the parent made is not this process's to end
    gc.enable()
    os.environ.update(environ)
    arguments = {
        name: item.funcargs[name] for name in inspect.signature(item.function).parameters if name in item.funcargs
    }
    try:
        item.obj(**arguments)
        outcome = ("passed", "")
    except pytest.skip.Exception as reason:
        outcome = ("skipped", str(reason))
    except BaseException:
        outcome = ("failed", traceback.format_exc())
    end.send(outcome)
    os._exit(outcome[0] == "failed")
