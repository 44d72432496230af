"""Steps of emulated pipelines on tensor ranks, with weight gradients beside the sums of I and without, in one run.

Run it with ``python benchmarks/steps/emulated_tensor.py`` on an idle machine. Two stages with two tensor ranks each are
four processes. A stage is some layers. Each sleeps in F and in I, has products whose weight gradients sleep, and sums
the gradient of its input over the tensor ranks by the functions that cut units call. A sum takes a given time from its
start on, as over a link, while its rank does what it likes. The sum of F is a part of F's sleep.

Both kinds take turns: the runtime as it is, and with sums that are waited for at once, with all weight gradients in W.
The simulated ratio is that of :class:`~lightning_pp.schedule.StageCosts` as ``lightning-pp-plan`` makes them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from emulated import take_turn
from emulated_ranks import print_heading, rows_of_ranks, table_row
from emulated_runs import CPU, SLEEPS, WIDTH, Kind, Ours, SleepInInput
from torch import Tensor, nn

from lightning_pp.runtime.split_backward.queue import COLLECTOR
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.schedule import Schedule, StageCosts, build_schedule
from lightning_pp.tensor import functions
from lightning_pp.tensor.aside import FLOPS_PER_BYTE

_NUM_STAGES, _NUM_TENSOR = 2, 2
_NUM_LAYERS, _NUM_PRODUCTS, _ROWS = 4, 3, 2
_all_reduce = dist.all_reduce


@dataclass
class Row:
    """What came out for one schedule and one length of sums.

    Attributes:
        schedule: Its name.
        sum_ms: A sum.
        waiting_ms: A step whose sums are waited for at once.
        beside_ms: A step with weight gradients beside them.
        ratio: Median over turns of the second by the first.
        simulated: The same of two simulations.
    """

    schedule: str
    sum_ms: float
    waiting_ms: float
    beside_ms: float
    ratio: float
    simulated: float


class _Link:
    """How long a sum over the tensor ranks takes, in seconds."""

    seconds = 0.0


class _Work:
    """A sum under way."""

    def __init__(self, work: Any) -> None:
        self._work, self._end = work, time.perf_counter() + _Link.seconds

    def wait(self) -> None:
        """Returns when the link has carried it."""
        self._work.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))


def _slow_all_reduce(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> _Work | None:
    work = _Work(_all_reduce(tensor, op, group, async_op=True))
    if async_op:
        return work
    work.wait()
    return None


class _Product(torch.autograd.Function):
    """A product whose weight gradient sleeps, at once or when its turn comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.stage = weight, stage
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (x,), (grad,) = ctx.saved_tensors, grad_outputs
        if COLLECTOR.queue is not None:
            COLLECTOR.queue.append(ctx.weight, grad, x.detach(), _weight_gradient, ctx.stage)
            return grad @ ctx.weight, None, None
        SLEEPS.sleep(ctx.stage, "W")
        return grad @ ctx.weight, grad.t() @ x, None


def _weight_gradient(weight: Tensor, left: Tensor, right: Tensor, stage: int) -> Tensor:
    SLEEPS.sleep(stage, "W")
    return left.t() @ right


class Stage(nn.Module):
    """Layers in a row; the shift is trained, so that the first one's I has to be run."""

    def __init__(self, stage: int, group: Any) -> None:
        super().__init__()
        self.stage, self.group = stage, group
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.weights = nn.ParameterList(torch.eye(WIDTH) for _ in range(_NUM_LAYERS * _NUM_PRODUCTS))

    def forward(self, x: Tensor) -> Tensor:
        """What the stage makes of ``[rows, WIDTH]``."""
        x = x + self.shift
        for layer in range(_NUM_LAYERS):
            x = functions.move(x, "keep", "sum", self.group)
            x = SleepInInput.apply(x, self.stage)  # type: ignore[no-untyped-call]
            for weight in self.weights[layer * _NUM_PRODUCTS : (layer + 1) * _NUM_PRODUCTS]:
                x = _Product.apply(x, weight, self.stage)  # type: ignore[no-untyped-call]
        return x


def run_rank(rank: int, num_ranks: int, options: argparse.Namespace) -> list[Row]:
    """One process: all schedules, both kinds of each in turns."""
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    place, tensor = divmod(rank, _NUM_TENSOR)
    groups = [dist.new_group([stage * _NUM_TENSOR + t for t in range(_NUM_TENSOR)]) for stage in range(_NUM_STAGES)]
    pipeline = [stage * _NUM_TENSOR + tensor for stage in range(_NUM_STAGES)]
    transport = Transport(pipeline, place, CPU)
    rows = []
    with patch.object(dist, "all_reduce", _slow_all_reduce):
        for name in options.schedules:
            schedule = build_schedule(name, num_ranks=_NUM_STAGES, num_microbatches=options.microbatches)
            make = partial(Stage, group=groups[place])
            kinds = {beside: Ours(schedule, transport, make, place, beside) for beside in (False, True)}
            for sum_ms in options.sums:
                rows.append(measure(schedule, kinds, sum_ms, groups[place], options))
                if rank == 0:
                    print(line(rows[-1]), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return rows


def measure(
    schedule: Schedule, kinds: Mapping[bool, Ours], sum_ms: float, group: dist.ProcessGroup, options: argparse.Namespace
) -> Row:
    """The turns of one schedule with sums of one length; ``kinds`` are by whether weight gradients are beside sums."""
    num_stages = schedule.placement.num_stages
    f, i, w = options.ms + sum_ms, options.ms, options.ms / _NUM_PRODUCTS
    of_kind: dict[Kind, float] = {"F": 1e-3 * f, "I": 1e-3 * i, "W": 1e-3 * w}
    lengths = {(stage, kind): seconds for stage in range(num_stages) for kind, seconds in of_kind.items()}
    flops, num_bytes = 2 * _ROWS * WIDTH**2, 2 * 4 * _ROWS * WIDTH
    FLOPS_PER_BYTE[group] = flops / w * sum_ms / num_bytes
    turns: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(options.turns):
        for beside, ours in kinds.items():
            ours.num_sleeps = _NUM_LAYERS * (2 + _NUM_PRODUCTS) * options.microbatches * num_stages // _NUM_STAGES
            SLEEPS.of_stage, _Link.seconds = lengths, sum_ms / 1e3
            with nullcontext() if beside else patch.object(functions, "aside", _at_once):
                turns[beside].append(take_turn(ours, 0.0, options.steps).step_ms)
            SLEEPS.of_stage, _Link.seconds = {}, 0.0
    n = _NUM_LAYERS
    waiting = StageCosts(n * f, n * (i + sum_ms), n * options.ms)
    beside_sums = StageCosts(n * f, n * (i + sum_ms), n * max(0.0, options.ms - sum_ms))
    return Row(
        schedule=schedule.name,
        sum_ms=sum_ms,
        waiting_ms=statistics.median(turns[False]),
        beside_ms=statistics.median(turns[True]),
        ratio=statistics.median(b / a for a, b in zip(turns[False], turns[True], strict=True)),
        simulated=schedule.simulate(beside_sums).makespan / schedule.simulate(waiting).makespan,
    )


def _at_once(collective: Any) -> Any:
    return collective


COLUMNS = ("schedule", "sum, ms", "step that waits, ms", "beside, ms", "beside by waiting", "simulated")


def line(row: Row) -> str:
    """A row of the table, in Markdown."""
    times = (f"{row.waiting_ms:.1f}", f"{row.beside_ms:.1f}", f"{row.ratio:.3f}", f"{row.simulated:.3f}")
    return table_row((row.schedule, f"{row.sum_ms:g}", *times))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1", "zb_v"])
    parser.add_argument("--ms", type=float, default=6.0, help="of a layer in each of F, I and W")
    parser.add_argument("--sums", type=float, nargs="+", default=[1.5, 3.0, 6.0], help="milliseconds of a layer's sum")
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args(arguments)
    print_heading(COLUMNS)
    rows_of_ranks(run_rank, _NUM_STAGES * _NUM_TENSOR, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
