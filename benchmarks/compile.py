"""What F, I and W of a stage cost with units compiled, beside the same uncompiled.

Weight gradients of compiled code are part of its backward: I computes them, and W keeps what is not compiled. So
compiled units shorten F and I + W, and lengthen I, which is on the way of every microbatch. One stage that has the
whole of a GPT runs forward (F), the backward to its inputs (I) and its queue of weight gradients (W). CPU times of this
process, medians of many runs.

    python benchmarks/compile.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from split_overhead import CPU, cut, llama

from lightning_pp.planning.step_plans import signature_of
from lightning_pp.runtime.compilation import CompiledUnits
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.runtime.stage import StageRunner

ACTIONS = ("F", "I", "W")


def times_of_actions(options: dict[str, Any] | None, args: argparse.Namespace) -> list[float]:
    """Milliseconds of F, I and W.

    Args:
        options: Of ``torch.compile``; None: uncompiled.
        args: Sizes and the number of runs.
    """
    torch.manual_seed(0)
    module = llama(args.blocks, args.dim)
    batch = torch.randint(0, 256, (args.batch, args.length))
    split = cut(module, batch, 1)
    plan = split.plans.plan(signature_of(batch), lambda dry: module.training_step(batch), with_gradients=True)
    if options is not None:
        CompiledUnits(split.units, options).attach()
    runner = StageRunner(0, split.units)

    def forward() -> Any:
        return runner.forward(
            plan,
            partial(module.training_step, batch),
            tuple,
            StepRandomness(0, CPU),
            with_gradients=True,
            splits_backward=True,
        )

    times: dict[str, list[float]] = {action: [] for action in ACTIONS}

    def timed(action: str, run: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = run()
        times[action].append(1e3 * (time.process_time() - start))
        return result

    for _ in range(args.warmup + args.runs):
        kept, loss = timed("F", forward)
        kept.loss = loss
        timed("I", partial(runner.backward, plan, kept, (), 1.0, split=True))
        kept.end_backward()
        timed("W", kept.run_weight_gradients)
        module.zero_grad()
    return [statistics.median(times[action][args.warmup :]) for action in ACTIONS]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description="Costs of actions with compiled units")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"Llama of {args.blocks} blocks of {args.dim}, {args.batch} x {args.length} tokens, torch {torch.__version__}\n"
    )
    print("| units | F, ms | I, ms | W, ms | I + W, ms |")
    print("|---|---|---|---|---|")
    for name, options in (("as they are", None), ("compiled", {"dynamic": False})):
        forward, inputs, weights = times_of_actions(options, args)
        print(f"| {name} | {forward:.1f} | {inputs:.1f} | {weights:.1f} | {inputs + weights:.1f} |", flush=True)


if __name__ == "__main__":
    main()
