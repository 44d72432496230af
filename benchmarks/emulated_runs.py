"""Pipelines whose blocks sleep, run by lightning_pp's runtime and by torch's, for ``emulated.py``.

A block is a small linear layer with a sleep in each of F, I and W: real autograd, real deferral of a real weight
gradient, and a device time that is known. It notes when it slept, so what a runtime loses is what lies between sleeps.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from lightning_pp.runtime.executor import PipelineExecutor, StepInputs
from lightning_pp.runtime.route import plan_route
from lightning_pp.runtime.transport import Transport
from lightning_pp.schedule import Schedule
from lightning_pp.strategy.assembly import split_model
from lightning_pp.strategy.plans import signature_of

CPU = torch.device("cpu")
WIDTH = 8
_PR_SET_TIMERSLACK = 29


class Sleeps:
    """How long a block sleeps in each of F, I and W, and when it did.

    Attributes:
        seconds: The length of one sleep.
        intervals: Start and end of every sleep of this process, by ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.intervals: list[tuple[float, float]] = []

    def sleep(self) -> None:
        """One sleep, noted."""
        start = time.perf_counter()
        if self.seconds:
            time.sleep(self.seconds)
        self.intervals.append((start, time.perf_counter()))


SLEEPS = Sleeps()


def sleep_precisely() -> None:
    """Lets this process's threads wake when their sleep ends; Linux would wake them up to 50 us later."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class _SleepInInput(torch.autograd.Function):
    """The identity; sleeps in F and in I."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        SLEEPS.sleep()
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        SLEEPS.sleep()
        return grad_outputs[0]


class _SleepInWeight(torch.autograd.Function):
    """The identity on a parameter; sleeps when the parameter's gradient is computed."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        SLEEPS.sleep()
        return grad_outputs[0]


class Block(nn.Module):
    """F, I and W each sleep; the sleep of W hangs on a bias, so that torch's split finds it on the weights' side.

    The shift is trained as well, so that the first block's I, which returns no gradient to anybody, has to be run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(_SleepInInput.apply(x + self.shift))  # type: ignore[no-untyped-call]
        return y + _SleepInWeight.apply(self.bias)  # type: ignore[no-untyped-call]


class DelayedBlock(Block):
    """The same block with W by ``backward_dw()``, as modules that keep back their own weight gradients have it."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(_SleepInInput.apply(x + self.shift))  # type: ignore[no-untyped-call]
        return y + self.bias

    def backward_dw(self) -> None:
        """The W of the oldest microbatch that owes one."""
        SLEEPS.sleep()


class Model(nn.Module):
    """A chain of blocks with a training step, as a LightningModule has it."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[DelayedBlock() for _ in range(num_blocks)])

    def training_step(self, batch: Tensor) -> Tensor:
        """The loss of a batch ``[B, WIDTH]``."""
        output: Tensor = self.blocks(batch)
        return output.square().mean()


class Pipeline(Protocol):
    """One rank of a pipeline, ready to run steps.

    Attributes:
        num_sleeps: Sleeps of this rank in a step.
        num_actions: F, I, W and B of this rank in a step.
    """

    num_sleeps: int
    num_actions: int

    def step(self) -> None:
        """Runs one step."""
        ...

    def drain(self) -> None:
        """Waits for what is under way."""
        ...


class Ours:
    """A rank of lightning_pp: a plan from a dry run, the executor, the transport."""

    def __init__(self, schedule: Schedule, transport: Transport) -> None:
        rank, m = dist.get_rank(), schedule.num_microbatches
        self.num_actions = len(schedule.programs[rank])
        self.num_sleeps = 3 * m * len(schedule.placement.stages_of_rank(rank))
        torch.manual_seed(0)
        batches = torch.randn(m, 2, WIDTH).unbind()
        module = Model(schedule.placement.num_stages)
        split = split_model(
            module,
            device=CPU,
            placement=schedule.placement,
            step=lambda _: module.training_step(batches[0]),
            with_gradients=True,
            patterns=["blocks.*"],
            split_points=[f"blocks.{index}" for index in range(1, schedule.placement.num_stages)],
            agree=lambda item: item,
        )
        split.placeholders.release(split.owned_by(rank))
        plan = split.plans.plan(
            signature_of(batches[0]), lambda _: module.training_step(batches[0]), with_gradients=True
        )
        route = plan_route(schedule, [plan] * m, rank)
        messages = [message for stop in route.stops for message in (*stop.arrivals, *stop.departures)]
        self.num_messages = sum(message.sender != message.receiver for message in messages)
        self.executor = PipelineExecutor(rank, split.units, transport, CPU)
        self.schedule = schedule
        self.inputs = StepInputs(
            [plan] * m,
            lambda microbatch, stage: module.training_step(batches[microbatch]),
            _loss_of,
            [1 / m] * m,
            seed=0,
        )

    def step(self) -> None:
        """Runs one step."""
        self.executor.run(self.schedule, self.inputs)

    def drain(self) -> None:
        """Waits for what is under way."""
        self.executor.drain()


def _loss_of(output: Tensor) -> Tensor:
    return output


TORCHS: dict[str, type[Any]] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zb": pipelining.ScheduleInterleavedZeroBubble,
    "zb_v": pipelining.ScheduleZBVZeroBubble,
    "dualpipe_v": pipelining.schedules.ScheduleDualPipeV,
}


class Torchs:
    """A rank of torch.distributed.pipelining."""

    def __init__(self, schedule: Schedule) -> None:
        rank, m, placement = dist.get_rank(), schedule.num_microbatches, schedule.placement
        owned = placement.stages_of_rank(rank)
        self.num_sleeps = 3 * m * len(owned)
        torch.manual_seed(0)
        batch = torch.randn(2 * m, WIDTH)
        stages = [pipelining.PipelineStage(Block(), stage, placement.num_stages, CPU) for stage in owned]
        self.arguments = (batch,) if 0 in owned else ()
        self.options: dict[str, Any] = {}
        if placement.num_stages - 1 in owned:
            self.options = {"target": torch.zeros(2 * m, WIDTH), "losses": []}
        kind = TORCHS[schedule.name]
        single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
        self.schedule = kind(stages[0] if single else stages, m, loss_fn=_torchs_loss)
        order = self.schedule.pipeline_order
        cells = [] if order is None else [cell for cell in order[rank] if cell is not None]
        self.num_actions = sum(len(cell.sub_actions or (cell,)) for cell in cells) or 2 * m

    def step(self) -> None:
        """Runs one step."""
        self.schedule.step(*self.arguments, return_outputs=False, **self.options)

    def drain(self) -> None:
        """Torch's step has waited for all that it sent."""


def _torchs_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def block_us() -> float:
    """CPU time of one block's forward and backward by plain autograd, in microseconds, with sleeps of no length."""
    block, x, gradient = Block(), torch.randn(2, WIDTH, requires_grad=True), torch.randn(2, WIDTH)

    def once() -> None:
        torch.autograd.backward([block(x)], [gradient])

    return _median_us(once)


def message_us() -> float:
    """CPU time of sending or receiving one tensor by torch.distributed alone, in microseconds; called on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = torch.zeros(2, WIDTH), torch.zeros(2, WIDTH)

    def once() -> None:
        receive = dist.irecv(received, (rank - 1) % size)
        send = dist.isend(sent, (rank + 1) % size)
        for work in (receive, send):
            if work is not None:
                work.wait()

    return _median_us(once) / 2


def _median_us(function: Callable[[], None], num_repeats: int = 200) -> float:
    times = []
    for _ in range(num_repeats):
        start = time.thread_time_ns()
        function()
        times.append((time.thread_time_ns() - start) / 1e3)
    return statistics.median(times)
