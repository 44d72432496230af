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
from typing import Any

import torch
from cut_models import LoneStage, llama

WAYS: dict[str, tuple[dict[str, Any] | None, bool]] = {  # options of torch.compile, and whether the backward is split
    "as they are, split": (None, True),
    "as they are, whole": (None, False),
    "compiled, split": ({"dynamic": False}, True),
    "compiled, whole": ({"dynamic": False}, False),
}


class Timed:
    """A stage that notes how long each of its actions takes.

    Args:
        options: Of ``torch.compile``; None: uncompiled.
        splits: Whether the backward is I and W, or B.
        args: Sizes.
    """

    def __init__(self, options: dict[str, Any] | None, splits: bool, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.module = llama(args.blocks, args.dim)
        batch = torch.randint(0, 256, (args.batch, args.length))
        self.stage = LoneStage(self.module, batch, splits=splits, options=options)
        self.times: dict[str, list[float]] = {"F": [], "I": [], "W": []}

    def run(self) -> None:
        """Runs one microbatch."""
        self.stage.microbatch(self.timed)
        self.module.zero_grad()

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
    stages = {name: Timed(options, splits, args) for name, (options, splits) in WAYS.items()}
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
