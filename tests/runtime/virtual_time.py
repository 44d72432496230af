"""Runs schedules through the real executor over real processes, with a clock that is a number in every message.

A unit takes no time but moves its rank's clock: in F to the later of the clock and the time in the tensor that it was
given, plus the stage's cost; so in I with the gradient; W adds its cost. What it returns holds the time at which it can
be used elsewhere. So who waits for whom, and for what, is decided by the order in which the runtime sends, receives and
runs, and comes out as numbers without noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from layouts import split_model
from torch import Tensor, nn

from lightning_pp.planning.stage_model import SplitModel, record_model
from lightning_pp.runtime.executor import PipelineExecutor, StepInputs
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.schedule import Placement, Schedule, StageCosts
from lightning_pp.schedule.simulation.costs import ResolvedCosts
from lightning_pp.split.dry_run.recording import DryRun
from lightning_pp.split.record.plan import StepPlan

CPU = torch.device("cpu")


@dataclass
class Clock:
    """This rank's time, and the start and end of every F, I, W and B on it."""

    costs: ResolvedCosts
    placement: Placement
    now: float = 0.0
    full_backwards: set[tuple[int, int | None]] = field(default_factory=set)
    microbatch: int = 0
    times: dict[str, tuple[float, float]] = field(default_factory=dict)
    queued: dict[int, list[int]] = field(default_factory=dict)
    just_ran: tuple[int, int] | None = None

    def run(self, kind: str, stage: int, microbatch: int, arrival: float, cost: float) -> float:
        """Notes an action that could start at ``arrival``; returns its end."""
        start = max(self.now, arrival)
        self.now = start + cost
        self.times[f"{stage}{kind}{microbatch}"] = (start, self.now)
        return self.now

    def latency(self, sender: int, receiver: int) -> float:
        """From the end of an action of stage ``sender`` to its use on stage ``receiver``."""
        ranks = self.placement.rank_of_stage
        outside = not 0 <= receiver < len(ranks)
        return 0.0 if outside or ranks[sender] == ranks[receiver] else self.costs.p2p[sender]


CLOCK: Clock | None = None  # None while a step is recorded


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: int) -> Tensor:
        if CLOCK is None:
            return x.clone()
        ctx.stage, ctx.microbatch = stage, CLOCK.microbatch
        end = CLOCK.run("F", stage, CLOCK.microbatch, float(x), CLOCK.costs.forward[stage])
        return torch.full_like(x, end + CLOCK.latency(stage, stage + 1))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        assert CLOCK is not None
        stage, microbatch = ctx.stage, ctx.microbatch
        cost, kind = CLOCK.costs.backward_input[stage], "I"
        if (stage, microbatch) in CLOCK.full_backwards:
            cost, kind = cost + CLOCK.costs.backward_weight[stage], "B"
            CLOCK.just_ran = (stage, microbatch)
        else:
            CLOCK.queued.setdefault(stage, []).append(microbatch)
        end = CLOCK.run(kind, stage, microbatch, float(grad_outputs[0]), cost)
        return torch.full_like(grad_outputs[0], end + CLOCK.latency(stage, stage - 1)), None, None


class TimedUnit(nn.Module):
    """One stage."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Timed.apply(x, self.weight, self.stage)  # type: ignore[no-untyped-call]
        return result

    def backward_dw(self) -> None:
        """W; of a B, whose time has gone by, nothing."""
        assert CLOCK is not None
        full, CLOCK.just_ran = CLOCK.just_ran, None
        if full is None:
            microbatch = WANTED_W[self.stage].pop(0)
            CLOCK.queued[self.stage].remove(microbatch)
            CLOCK.run("W", self.stage, microbatch, 0.0, CLOCK.costs.backward_weight[self.stage])


# the microbatches whose W a stage runs, in the order of the program: backward_dw() is not told which
WANTED_W: dict[int, list[int]] = {}


class Chain(nn.Module):
    """One unit a stage."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.units = nn.Sequential(*[TimedUnit(stage) for stage in range(num_stages)])

    def training_step(self, batch: Tensor) -> Tensor:
        """A loss whose gradient is 0, the time at which the last stage may begin its backward."""
        output: Tensor = self.units(batch)
        return output.sum()


_SPLITS: dict[int, tuple[Chain, SplitModel, StepPlan]] = {}


def split_chain(num_stages: int) -> tuple[Chain, SplitModel, StepPlan]:
    """A chain and its plan from a dry run; made once."""
    global CLOCK
    if num_stages not in _SPLITS:
        CLOCK = None
        chain = Chain(num_stages)
        batch = torch.zeros(1, dtype=torch.float64)

        def step(_: DryRun) -> Tensor:
            return chain.training_step(batch)

        split = split_model(
            record_model(
                chain, device=CPU, step=step, with_gradients=True, patterns=["units.*"], num_stages=num_stages
            ),
            num_stages,
            [f"units.{stage}" for stage in range(1, num_stages)],
        )
        _SPLITS[num_stages] = (chain, split, split.plans.plan(0, step, with_gradients=True))
    return _SPLITS[num_stages]


def run_in_virtual_time(cases: Sequence[tuple[Schedule, StageCosts]]) -> list[dict[str, tuple[float, float]]]:
    """Runs one step of each case on this rank; returns the start and end of each of its actions, by notation."""
    global CLOCK
    rank = dist.get_rank()
    transports: dict[int, Transport] = {}
    found: list[dict[str, tuple[float, float]]] = []
    for schedule, costs in cases:
        num_ranks, m = schedule.placement.num_ranks, schedule.num_microbatches
        if rank >= num_ranks:
            found.append({})
            continue
        chain, split, plan = split_chain(schedule.placement.num_stages)
        transport = transports.setdefault(num_ranks, Transport(range(num_ranks), rank, CPU))
        clock = CLOCK = Clock(costs.per_stage(schedule.placement.num_stages), schedule.placement)
        WANTED_W.clear()
        for action in schedule.programs[rank]:
            if action.kind.value == "B":
                clock.full_backwards.add((action.stage, action.microbatch))
            elif action.kind.value == "W" and action.microbatch is not None:
                WANTED_W.setdefault(action.stage, []).append(action.microbatch)

        def run_step(microbatch: int, stage: int, chain: Chain = chain, clock: Clock = clock) -> Tensor:
            clock.microbatch = microbatch
            return chain.training_step(torch.zeros(1, dtype=torch.float64))

        executor = PipelineExecutor(rank, split.units, transport, CPU)
        executor.run(schedule, StepInputs([plan] * m, run_step, lambda loss: loss, [0.0] * m, seed=0))
        executor.drain()
        assert not any(clock.queued.values())
        found.append(clock.times)
    return found
