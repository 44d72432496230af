"""Pipelines whose blocks sleep, run by lightning_pp's runtime and by torch's, for ``emulated.py``.

A block is a small linear layer with a sleep in each of F, I and W: real autograd, real deferral of a real weight
gradient, and a device time that is known. It notes when it slept, so what a runtime loses is what lies between sleeps.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from lightning_pp.planning.stage_model import SplitModel, assign_stages, record_model
from lightning_pp.planning.steps.plans import signature_of
from lightning_pp.runtime.executor import PipelineExecutor, StepInputs
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.schedule import ActionKind, Placement, Schedule
from lightning_pp.split.cut.partition import partition_units

CPU = torch.device("cpu")
WIDTH = 8
_PR_SET_TIMERSLACK = 29

Kind = Literal["F", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "I", "W")


class Sleeps:
    """How long blocks sleep in F, I and W, and when they did.

    Attributes:
        seconds: The length of one sleep.
        of_stage: Lengths for single stages and kinds, instead.
        intervals: Start and end of every sleep of this process, by ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.of_stage: dict[tuple[int, Kind], float] = {}
        self.intervals: list[tuple[float, float]] = []

    def sleep(self, stage: int, kind: Kind) -> None:
        """One sleep, noted."""
        start = time.perf_counter()
        if seconds := self.of_stage.get((stage, kind), self.seconds):
            time.sleep(seconds)
        self.intervals.append((start, time.perf_counter()))


SLEEPS = Sleeps()


def sleep_precisely() -> None:
    """Lets this process's threads wake when their sleep ends; Linux would wake them up to 50 us later."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class SleepInInput(torch.autograd.Function):
    """The identity; sleeps in F and in I."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stage: int) -> Tensor:
        ctx.stage = stage
        SLEEPS.sleep(stage, "F")
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        SLEEPS.sleep(ctx.stage, "I")
        return grad_outputs[0], None


class _SleepInWeight(torch.autograd.Function):
    """The identity on a parameter; sleeps when the parameter's gradient is computed."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, stage: int) -> Tensor:
        ctx.stage = stage
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        SLEEPS.sleep(ctx.stage, "W")
        return grad_outputs[0], None


class Block(nn.Module):
    """F, I and W each sleep; the sleep of W hangs on a bias, so that torch's split finds it on the weights' side.

    The shift is trained as well, so that the first block's I, which returns no gradient to anybody, has to be run.
    """

    def __init__(self, stage: int = 0) -> None:
        super().__init__()
        self.stage = stage
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(SleepInInput.apply(x + self.shift, self.stage))  # type: ignore[no-untyped-call]
        bias: Tensor = _SleepInWeight.apply(self.bias, self.stage)  # type: ignore[no-untyped-call]
        return y + bias


class DelayedBlock(Block):
    """The same block with W by ``backward_dw()``, as modules that keep back their own weight gradients have it."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(SleepInInput.apply(x + self.shift, self.stage))  # type: ignore[no-untyped-call]
        return y + self.bias

    def backward_dw(self) -> None:
        """The W of the oldest microbatch that owes one."""
        SLEEPS.sleep(self.stage, "W")


class Model(nn.Module):
    """A chain of blocks with a training step, as a LightningModule has it."""

    def __init__(self, num_blocks: int, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[block(stage) for stage in range(num_blocks)])

    def training_step(self, batch: Tensor) -> Tensor:
        """The loss of a batch ``[B, WIDTH]``."""
        output: Tensor = self.blocks(batch)
        return output.square().mean()


def cut_before(module: Model, batch: Tensor, placement: Placement, blocks: Sequence[int]) -> SplitModel:
    """The model cut into stages by a dry run of its step; ``blocks`` start stages 1, 2, ..."""
    recording = record_model(
        module,
        device=CPU,
        step=lambda _: module.training_step(batch),
        with_gradients=True,
        patterns=["blocks.*"],
        num_stages=placement.num_stages,
    )
    partition = partition_units(
        recording.record,
        placement=placement,
        num_parameters=recording.num_parameters,
        split_points=[f"blocks.{block}" for block in blocks],
    )
    return assign_stages(recording, placement=placement, partition=partition)


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
    """A rank of lightning_pp: a plan from a dry run, the executor, the transport.

    Args:
        schedule: The programs.
        transport: Of all pipelines of this rank.
        block: Makes the stages; a program with W needs :class:`DelayedBlock`, or weight gradients that wait.
        rank: Its place in the pipeline; None: as among all processes.
        has_tensor_ranks: As of the executor.
        blocks_per_stage: How many blocks a stage has.
    """

    def __init__(
        self,
        schedule: Schedule,
        transport: Transport,
        block: Callable[[int], nn.Module] = DelayedBlock,
        rank: int | None = None,
        has_tensor_ranks: bool = False,
        blocks_per_stage: int = 1,
    ) -> None:
        rank, m = dist.get_rank() if rank is None else rank, schedule.num_microbatches
        self.num_actions = len(schedule.programs[rank])
        self.num_sleeps = 3 * m * blocks_per_stage * len(schedule.placement.stages_of_rank(rank))
        torch.manual_seed(0)
        batches = torch.randn(m, 2, WIDTH).unbind()
        num_blocks = blocks_per_stage * schedule.placement.num_stages
        module = Model(num_blocks, block)
        split = cut_before(
            module, batches[0], schedule.placement, range(blocks_per_stage, num_blocks, blocks_per_stage)
        )
        split.fake_parameters.release(split.owned_by(rank))
        plan = split.plans.plan(
            signature_of(batches[0]), lambda _: module.training_step(batches[0]), with_gradients=True
        )
        self.executor = PipelineExecutor(rank, split.units, transport, CPU, has_tensor_ranks=has_tensor_ranks)
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


def has_whole_backwards(schedule: Schedule) -> bool:
    """Whether no microbatch has a W of its own."""
    return not any(action.kind is ActionKind.W for program in schedule.programs for action in program)


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
    """A rank of torch.distributed.pipelining: its class for the schedule or, where it has none, its runtime for any.

    Args:
        schedule: The programs. Torch's classes make their own, of the same name; its runtime reads these.
        prefers_runtime: Whether the runtime is taken although there is a class.

    Attributes:
        runs: What it is, ``class`` or ``runtime``.
    """

    def __init__(self, schedule: Schedule, prefers_runtime: bool = False) -> None:
        rank, m, placement = dist.get_rank(), schedule.num_microbatches, schedule.placement
        owned = placement.stages_of_rank(rank)
        self.num_sleeps = 3 * m * len(owned)
        torch.manual_seed(0)
        batch = torch.randn(2 * m, WIDTH)
        stages = [pipelining.PipelineStage(Block(stage), stage, placement.num_stages, CPU) for stage in owned]
        self.arguments = (batch,) if 0 in owned else ()
        self.options: dict[str, Any] = {}
        if placement.num_stages - 1 in owned:
            self.options = {"target": torch.zeros(2 * m, WIDTH), "losses": []}
        kind = None if prefers_runtime else TORCHS.get(schedule.name)
        self.schedule: Any
        self.runs = "runtime" if kind is None else "class"
        if kind is None:
            self.schedule = pipelining.schedules._PipelineScheduleRuntime(stages, m, loss_fn=_torchs_loss)  # type: ignore[no-untyped-call]
            with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
                file.write(schedule.csv_text())
                file.flush()
                self.schedule._load_csv(file.name)
        elif issubclass(kind, pipelining.schedules.PipelineScheduleSingle):
            self.schedule = kind(stages[0], m, loss_fn=_torchs_loss)
        else:
            self.schedule = kind(stages, m, loss_fn=_torchs_loss)
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
