"""Weight gradients of eight microbatches at once: one product of all their rows for each weight.

Blocks of a GPT run F and I of eight microbatches, then their W. What W does differs; the ways take turns:

``torch``      no W: the ordinary backward of each microbatch, which accumulates into ``.grad``
``chained``    as the runtime does: one microbatch after the other, products added in place where dtypes allow it
``by weight``  the same products, those of a weight next to each other, so that its gradient stays in the cache
``joined``     one product for each weight, of the rows of all microbatches, which are copied next to each other for it

CPU times of one thread, medians of many runs. Before it measures, it compares all gradients with those of ``torch``.
Then it counts how many W there are to be joined in schedules: those in a row of W of one stage.

    OMP_NUM_THREADS=1 python benchmarks/costs/joined_weights.py
    OMP_NUM_THREADS=1 python benchmarks/costs/joined_weights.py --dim 512 --precision bf16-mixed --rows 1
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.recipes.byte_gpt import Block
from lightning_pp.runtime.split_backward.deferral import weight_gradients_deferrable
from lightning_pp.runtime.split_backward.queue import WeightGradientQueue, collect_weight_gradients
from lightning_pp.schedule import ActionKind, Schedule, StageCosts, build_schedule

MICROBATCHES, LENGTH, NUM_BLOCKS = 8, 128, 4
PRECISIONS = ("32-true", "bf16-mixed")


def chained(queues: list[WeightGradientQueue]) -> None:
    """One microbatch after the other."""
    for queue in queues:
        queue.run()


def by_weight(queues: list[WeightGradientQueue]) -> None:
    """One weight after the other."""
    first = queues[0]
    first._entries = [entry for entries in zip(*(queue._entries for queue in queues), strict=True) for entry in entries]
    first.run()


def joined(queues: list[WeightGradientQueue]) -> None:
    """One product for each weight."""
    first = queues[0]
    found: list[Any] = []
    for entries in zip(*(queue._entries for queue in queues), strict=True):
        weight, left, _, gradient_of, _ = entries[0]
        if gradient_of is not None or left.dim() < 2:  # no product of two matrices
            found += entries
            continue
        sides = ([entry[side].flatten(0, -2) for entry in entries] for side in (1, 2))
        found.append((weight, *map(torch.cat, sides), None, None))
    first._entries = found
    first.run()


WAYS: dict[str, Callable[[list[WeightGradientQueue]], None] | None] = {
    "torch": None,
    "chained": chained,
    "by weight": by_weight,
    "joined": joined,
}


class Stage:
    """Blocks, and the batches that they are given."""

    def __init__(self, dim: int, rows: int, precision: str) -> None:
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[Block(dim, dim // 64) for _ in range(NUM_BLOCKS)])
        self.inputs = [torch.randn(rows, LENGTH, dim, requires_grad=True) for _ in range(MICROBATCHES)]
        self.gradient = torch.randn(rows, LENGTH, dim)
        self.is_mixed = precision == "bf16-mixed"

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D], float32."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_mixed):
            output: Tensor = self.blocks(inputs)
        return output.float()

    def step(self, run_weights: Callable[[list[WeightGradientQueue]], None] | None) -> tuple[float, float]:
        """Milliseconds of a step, and of W in it."""
        for parameter in self.blocks.parameters():
            parameter.grad = None
        begun = between = time.thread_time()
        if run_weights is None:
            for inputs in self.inputs:
                self.forward(inputs).backward(self.gradient)  # type: ignore[no-untyped-call]
            between = time.thread_time()
        else:
            queues = []
            with weight_gradients_deferrable():
                for inputs in self.inputs:
                    output = self.forward(inputs)
                    queues.append(WeightGradientQueue())
                    with collect_weight_gradients(queues[-1]):
                        output.backward(self.gradient)  # type: ignore[no-untyped-call]
            between = time.thread_time()
            run_weights(queues)
        ended = time.thread_time()
        return 1e3 * (ended - begun), 1e3 * (ended - between)

    def gradients(self) -> list[Tensor]:
        """Of all parameters."""
        return [parameter.grad for parameter in self.blocks.parameters() if parameter.grad is not None]


def check(stage: Stage) -> None:
    """Every way gives the gradients of torch, up to rounding."""
    stage.step(None)
    expected = stage.gradients()
    tolerance = 2e-2 if stage.is_mixed else 1e-4
    for name, run_weights in WAYS.items():
        stage.step(run_weights)
        for one, other in zip(stage.gradients(), expected, strict=True):
            error = float((one - other).norm() / other.norm())
            if error > tolerance:
                raise SystemExit(f"{name}: gradients differ by {error:.1e} of their norm")


def settings_of(args: argparse.Namespace) -> Iterable[tuple[str, int, int]]:
    """Precision, width and rows of each line."""
    for precision in args.precision:
        for dim in args.dim:
            for rows in args.rows:
                yield precision, dim, rows


def share_in_a_row(schedule: Schedule, least: int) -> float:
    """The part of all weight gradients that stands in a row of at least so many W of one stage."""
    total = found = 0
    for program in schedule.programs:
        for (kind, _), row in groupby(program, key=lambda action: (action.kind, action.stage)):
            number = len(list(row))
            total += number if kind in (ActionKind.W, ActionKind.B) else 0
            found += number if kind is ActionKind.W and number >= least else 0
    return found / total


def print_shares() -> None:
    """A row for each size, with the families that split backwards."""
    names = ("zb_h1", "zb_h2", "zb_v", "interleaved_zb")
    print(f"\n| ranks, microbatches: W in a row of at least 2, 4, 8 | {' | '.join(names)} |")
    print(f"|{'---|' * (len(names) + 1)}")
    for p, m in ((2, 8), (4, 12), (8, 24)):
        costs = StageCosts(10.0, 10.0, 8.0, p2p=0.2)
        schedules = [build_schedule(name, num_ranks=p, num_microbatches=m, costs=costs) for name in names]
        shares = (", ".join(f"{share_in_a_row(schedule, least):.2f}" for least in (2, 4, 8)) for schedule in schedules)
        print(f"| {p}, {m} | {' | '.join(shares)} |")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--dim", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2], help="sequences of a microbatch")
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"| precision, width, rows | {' | '.join(WAYS)} | W: {', '.join(list(WAYS)[1:])} | joined / chained: step, W |"
    )
    print(f"|{'---|' * (len(WAYS) + 3)}")
    for precision, dim, rows in settings_of(args):
        stage = Stage(dim, rows, precision)
        check(stage)
        times = [[stage.step(run_weights) for run_weights in WAYS.values()] for _ in range(args.runs)]
        steps, weights = (
            [statistics.median(run[way][part] for run in times) for way in range(len(WAYS))] for part in (0, 1)
        )
        cells = [f"{precision}, {dim}, {rows}", *(f"{ms:.0f}" for ms in steps)]
        cells.append(", ".join(f"{ms:.0f}" for ms in weights[1:]))
        cells.append(f"{steps[3] / steps[1]:.3f}, {weights[3] / weights[1]:.3f}")
        print(f"| {' | '.join(cells)} |", flush=True)
    print_shares()


if __name__ == "__main__":
    main()
