"""What an emulated step costs whoever runs it: blocks and messages alone, and calls that are not a runtime's Python."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from emulated_runs import SLEEPS, WIDTH, Block, DelayedBlock

from lightning_pp.runtime import _torch_private
from lightning_pp.runtime.split_backward.deferral import (
    WeightGradientQueue,
    collect_weight_gradients,
    weight_gradients_deferrable,
)


@dataclass(frozen=True)
class Alone:
    """What blocks and messages take with no runtime around them, in milliseconds; medians.

    Attributes:
        sleep: One sleep.
        forward: F of a block by plain autograd, its sleep included.
        backward_input: I.
        backward_weight: W.
        message: From a send to the end of the receive on another rank that waits for it.
    """

    sleep: float
    forward: float
    backward_input: float
    backward_weight: float
    message: float


def measure_alone(ms: float, num_repeats: int) -> Alone:
    """Runs blocks that sleep ``ms`` on all ranks at once, as in a pipeline, with a message after each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    block, gradient = DelayedBlock(), torch.randn(2, WIDTH)
    queue = WeightGradientQueue()
    times: dict[str, list[float]] = {name: [] for name in ("forward", "backward_input", "backward_weight", "message")}
    SLEEPS.seconds = ms / 1e3
    SLEEPS.intervals.clear()
    with weight_gradients_deferrable():
        for repeat in range(num_repeats):
            x = torch.randn(2, WIDTH, requires_grad=True)
            start = time.perf_counter()
            y = block(x)
            end_of_forward = time.perf_counter()
            with collect_weight_gradients(queue):
                torch.autograd.backward([y], [gradient])
            queue.defer_module(block)
            end_of_input = time.perf_counter()
            queue.run()
            end = time.perf_counter()
            times["forward"].append(end_of_forward - start)
            times["backward_input"].append(end_of_input - end_of_forward)
            times["backward_weight"].append(end - end_of_input)
            stamp = torch.zeros(1, dtype=torch.float64)
            if (rank + repeat) % 2:  # in pairs; the receiver waits already
                time.sleep(ms / 1e3)
                dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), (rank + 1) % size)
            else:
                dist.recv(stamp, (rank - 1) % size)
                times["message"].append(time.perf_counter() - float(stamp))  # one clock for all processes
    sleeps = [end - start for start, end in SLEEPS.intervals]
    SLEEPS.seconds = 0.0
    found = torch.tensor([statistics.median(values) * 1e3 for values in (sleeps, *times.values())])
    dist.all_reduce(found)
    return Alone(*(found / size).tolist())


class Aside:
    """CPU time of this thread in calls of certain functions, while it is entered."""

    def __init__(self) -> None:
        self.ns = 0

    @contextmanager
    def counting(self, functions: Sequence[tuple[Any, str]]) -> Iterator[None]:
        """Counts calls of ``(owner, name)``; none of them may call another."""
        with ExitStack() as stack:
            for owner, name in functions:
                stack.enter_context(patch.object(owner, name, self._counted(getattr(owner, name))))
            yield

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.ns += time.thread_time_ns() - start

        return counted


NOT_PYTHON: Sequence[tuple[Any, str]] = (
    (Block, "forward"),
    (DelayedBlock, "forward"),
    (torch.autograd, "_engine_run_backward"),  # behind torch.autograd.backward and grad
    (_torch_private, "_run_engine"),  # the same, where lightning_pp calls it
    (dist.ProcessGroup, "send"),
    (dist.ProcessGroup, "recv"),
    (torch._C._distributed_c10d.Work, "wait"),
)
"""What a step needs whoever runs it: the blocks' forward, the autograd engine, sends, receives and waits."""
