"""What F, I and W of a stage cost with units compiled, beside the same uncompiled, and beside a backward in one piece.

Compiled units keep their weight gradients for W as uncompiled ones do. One stage that has the whole of a GPT runs
forward (F), the backward to its inputs (I) and its queue of weight gradients (W), or the whole backward (B) of units
compiled by ``torch.compile`` alone. CPU times of this process, medians of many runs; the ways take turns.

    python benchmarks/costs/compile.py --dim 256
    python benchmarks/costs/compile.py --dim 512
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from split_overhead import CPU, cut, llama

from lightning_pp.planning.steps.plans import signature_of
from lightning_pp.runtime.compilation import CompiledUnits
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.runtime.split_backward.deferral import weight_gradients_deferrable
from lightning_pp.runtime.stage import StageRunner

WAYS: dict[str, tuple[dict[str, Any] | None, bool]] = {  # options of torch.compile, and whether the backward is split
    "as they are, split": (None, True),
    "as they are, whole": (None, False),
    "compiled, split": ({"dynamic": False}, True),
    "compiled, whole": ({"dynamic": False}, False),
}


class Stage:
    """One stage that runs microbatches one after the other, and notes how long each action takes.

    Args:
        options: Of ``torch.compile``; None: uncompiled.
        split: Whether the backward is I and W, or B.
        args: Sizes.
    """

    def __init__(self, options: dict[str, Any] | None, split: bool, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        module = llama(args.blocks, args.dim)
        batch = torch.randint(0, 256, (args.batch, args.length))
        cut_module = cut(module, batch, 1)
        self.module, self.split = module, split
        self.plan = cut_module.plans.plan(
            signature_of(batch), lambda dry: module.training_step(batch), with_gradients=True
        )
        if options is not None:
            CompiledUnits(cut_module.units, options).attach()
        self.runner = StageRunner(0, cut_module.units)
        self.step = partial(module.training_step, batch)
        self.times: dict[str, list[float]] = {"F": [], "I": [], "W": []}

    def run(self) -> None:
        """Runs one microbatch."""
        with weight_gradients_deferrable() if self.split else nullcontext():
            kept, loss = self.timed("F", self.forward)
            kept.loss = loss
            self.timed("I", partial(self.runner.backward, self.plan, kept, (), 1.0, split=self.split))
            kept.end_backward()
            self.timed("W", kept.run_weight_gradients if self.split else lambda: None)
        self.module.zero_grad()

    def forward(self) -> Any:
        return self.runner.forward(
            self.plan,
            self.step,
            tuple,
            StepRandomness(0, CPU),
            with_gradients=True,
            splits_backward=self.split,
        )

    def timed(self, action: str, run: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = run()
        self.times[action].append(1e3 * (time.process_time() - start))
        return result


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description="Costs of actions with compiled units")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"Llama of {args.blocks} blocks of {args.dim}, {args.batch} x {args.length} tokens, torch {torch.__version__}\n"
    )
    stages = {name: Stage(options, split, args) for name, (options, split) in WAYS.items()}
    for _ in range(args.warmup + args.runs):
        for stage in stages.values():
            stage.run()
    print("| units | F, ms | I or B, ms | W, ms | backward, ms | F + backward, ms |")
    print("|---|---|---|---|---|---|")
    for name, stage in stages.items():
        forward, inputs, weights = (statistics.median(times[args.warmup :]) for times in stage.times.values())
        print(
            f"| {name} | {forward:.1f} | {inputs:.1f} | {weights:.1f} | {inputs + weights:.1f} "
            f"| {forward + inputs + weights:.1f} |"
        )


if __name__ == "__main__":
    main()
