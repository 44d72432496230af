"""Times of actions: taken only where somebody asks for them."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from parity_run import QUIET
from pipelined_fit import loader
from pool import WorkerPool
from small_models import Blocks

from lightning_pp import PipelineMonitor, PipelineParallelStrategy
from lightning_pp.runtime import timing
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.schedule import Action, ActionKind

FORWARD, BACKWARD = Action(0, ActionKind.F, 0), Action(0, ActionKind.B, 0)


class Event:
    """Stands for an event of a device that works as fast as the host."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


def run_two(timer: StepTimer) -> None:
    for action, waits in ((FORWARD, False), (BACKWARD, True)):
        timer.start()
        if waits:
            timer.start_waiting()
            time.sleep(0.02)
            timer.stop_waiting()
        time.sleep(0.01)
        timer.stop(action)


def test_an_action_on_a_device_needs_one_event_and_two_more_if_it_waits() -> None:
    with patch.object(timing, "_recorded_event", Event):
        Event.made = 0
        timer = StepTimer(torch.device("cuda"))
        run_two(timer)
        assert Event.made == 1 + 2 + 3  # the origin; begin and end; wait, arrival and end
        on_device = timer.times()
    timer = StepTimer(torch.device("cpu"))
    run_two(timer)
    for times in (on_device, timer.times()):
        forward, backward = times
        assert forward.wait_ms == 0 and 10 <= forward.work_ms < backward.end_ms
        assert backward.wait_ms >= 20 and backward.work_ms >= 10


def test_a_timer_that_is_off_takes_none_and_says_so() -> None:
    with patch.object(timing, "_recorded_event", Event):
        Event.made = 0
        timer = StepTimer(torch.device("cuda"), is_on=False)
        run_two(timer)
    assert Event.made == 0
    with pytest.raises(RuntimeError, match="This step was not timed"):
        timer.times()


class Asking(pl.Callback):
    def __init__(self) -> None:
        self.has_times: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.strategy.engine.last_training_step
        try:
            self.has_times.append(len(step[1].times()) > 0)
        except RuntimeError:
            self.has_times.append(False)


def timed_steps(kind: str) -> tuple[list[bool], int]:
    """In a worker: for each training batch whether it has times; and how many runs of any kind took any."""
    asking, num_timed = Asking(), 0
    make = StepTimer.__init__

    def noted(timer: StepTimer, device: Any, *, is_on: bool = True) -> None:
        nonlocal num_timed
        num_timed += is_on
        make(timer, device, is_on=is_on)

    schedule = "auto" if kind == "auto" else "1f1b"
    trainer = pl.Trainer(
        devices=2,
        strategy=PipelineParallelStrategy(2, num_microbatches=2, schedule=schedule),
        max_epochs=1,
        callbacks=[asking, PipelineMonitor()] if kind == "monitor" else [asking],
        **QUIET,
    )
    with patch.object(StepTimer, "__init__", noted):
        trainer.fit(Blocks(), loader(80), loader(8))
    return asking.has_times, num_timed


@pytest.mark.by_day(1)
@pytest.mark.parametrize("kind", ["nobody", "monitor", "auto"])
def test_who_asks(pool: WorkerPool, kind: str) -> None:
    for has_times, num_timed in pool.run(timed_steps, kind, world_size=2):
        assert len(has_times) == 20
        assert num_timed == sum(has_times)  # neither validation nor the checks of the first batches
        if kind == "auto":  # until the schedule is chosen
            assert has_times[0] and not has_times[-1]
        else:
            assert has_times == [kind == "monitor"] * 20
