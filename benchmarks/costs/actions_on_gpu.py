"""What F, I and W of Llama 8B's blocks cost on a GPU, beside plain autograd, beside compiled units, and what they hold.

One stage that has a few blocks of Llama 8B runs microbatches one after the other, in bfloat16. Each way does the same
work: the module's own step with ``backward()``; the step of a stage with its backward in one piece (B) or split (I and
W); both with compiled units. "Alone" are medians of single actions, with a wait for the device before and after.
"In a row" is a microbatch of many that are queued without a wait, as in a step. Held is what the device holds after F,
and after I, more than before F.

    python benchmarks/costs/actions_on_gpu.py
    python benchmarks/costs/actions_on_gpu.py --device cpu --dtype float32 --dim 128 --length 64 --runs 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import transformers as hf
from split_overhead import HFModel

from lightning_pp.planning.stage_model import SplitModel, assign_stages, record_model
from lightning_pp.planning.steps.plans import signature_of
from lightning_pp.runtime.compilation import CompiledUnits
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.runtime.split_backward.deferral import weight_gradients_deferrable
from lightning_pp.runtime.stage import StageRunner
from lightning_pp.schedule import Placement

# options of torch.compile and whether the backward is split; None: the module's own step and autograd
WAYS: dict[str, tuple[dict[str, Any] | None, bool] | None] = {
    "module alone": None,
    "stage, B": (None, False),
    "stage, I and W": (None, True),
    "stage compiled, B": ({"dynamic": False}, False),
    "stage compiled, I and W": ({"dynamic": False}, True),
}


def llama(args: argparse.Namespace) -> L.LightningModule:
    """Blocks with the proportions of Llama 8B; a small vocabulary, so that they are nearly all of it."""
    heads = max(4, args.dim // 128)
    config = hf.LlamaConfig(
        vocab_size=1024,
        hidden_size=args.dim,
        intermediate_size=7 * args.dim // 2,
        num_hidden_layers=args.blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=args.length,
    )
    return HFModel(hf.LlamaForCausalLM(config)).to(args.device, args.dtype)


class Way:
    """One way to run microbatches."""

    def __init__(self, chosen: tuple[dict[str, Any] | None, bool] | None, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        self.module = llama(args)
        self.batch = torch.randint(0, 1024, (args.batch, args.length), device=self.device)
        self.step = partial(self.module.training_step, self.batch)
        self.options, self.split = chosen or (None, False)
        self.is_plain = chosen is None
        self.times: dict[str, list[float]] = {"F": [], "I": [], "W": []}
        self.held: dict[str, int] = {}
        if not self.is_plain:
            cut = self._cut()
            self.plan = cut.plans.plan(signature_of(self.batch), lambda dry: self.step(), with_gradients=True)
            if self.options is not None:
                CompiledUnits(cut.units, self.options).attach()
            self.runner = StageRunner(0, cut.units)

    def _cut(self) -> SplitModel:
        record = record_model(
            self.module,
            device=self.device,
            step=lambda dry: self.step(),
            with_gradients=True,
            patterns=None,
            num_stages=1,
        )
        return assign_stages(record, placement=Placement.interleaved(1))

    def microbatch(self, timed: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Runs one microbatch; its gradients are added to those that are there."""
        if self.is_plain:
            loss = timed("F", self.step)
            timed("I", loss.backward)
            return
        with weight_gradients_deferrable() if self.split else nullcontext():
            kept, loss = timed("F", self._forward)
            kept.loss = loss
            timed("I", partial(self.runner.backward, self.plan, kept, (), 1.0, split=self.split))
            kept.end_backward()
            timed("W", kept.run_weight_gradients if self.split else lambda: None)

    def _forward(self) -> Any:
        return self.runner.forward(
            self.plan,
            self.step,
            tuple,
            StepRandomness(0, self.device),
            with_gradients=True,
            splits_backward=self.split,
        )

    def alone(self, action: str, run: Callable[[], Any]) -> Any:
        """Runs and times an action by itself."""
        self._wait()
        start = time.perf_counter()
        result = run()
        self._wait()
        self.times[action].append(1e3 * (time.perf_counter() - start))
        return result

    def watched(self, action: str, run: Callable[[], Any]) -> Any:
        """Runs an action and notes what the device holds after it."""
        result = run()
        self._wait()
        self.held[action] = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        return result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def in_a_row(self, number: int) -> float:
        """Milliseconds of a microbatch, of so many without a wait between them."""
        self._wait()
        start = time.perf_counter()
        for _ in range(number):
            self.microbatch(lambda _, run: run())
        self._wait()
        return 1e3 * (time.perf_counter() - start) / number

    def figures(self, args: argparse.Namespace) -> dict[str, Any]:
        """Runs everything and returns what was measured, in milliseconds and GiB; and the weights' gradients."""
        for _ in range(args.warmup):
            self.microbatch(lambda _, run: run())
        self.module.zero_grad()
        self.microbatch(lambda _, run: run())
        gradients = {name: p.grad.clone() for name, p in self.module.named_parameters() if p.grad is not None}
        self._wait()
        before = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        self.microbatch(self.watched)
        rows = []
        for _ in range(args.runs):
            self.microbatch(self.alone)
            rows.append(self.in_a_row(args.row))
        medians = {action: statistics.median(times) if times else 0.0 for action, times in self.times.items()}
        held = {action: (num_bytes - before) / 2**30 for action, num_bytes in self.held.items()}
        return {"alone": medians, "in_a_row": statistics.median(rows), "held": held, "gradients": gradients}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", type=lambda name: getattr(torch, name))
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--row", type=int, default=8, help="microbatches in a row")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{args.blocks} blocks of {args.dim}, {args.batch} x {args.length} tokens, {args.dtype}, {name}\n")
    print(
        "| way | F, ms | I or B, ms | W, ms | together | in a row | to the first "
        "| held after F, GiB | after I | gradients |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    first: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for way, chosen in WAYS.items():
        figures = Way(chosen, args).figures(args)
        gradients = figures.pop("gradients")
        first = first or {**figures, "gradients": gradients}
        apart = max(
            float((gradients[name].double() - one.double()).norm() / one.double().norm())
            for name, one in first["gradients"].items()
        )
        forward, inputs, weights = figures["alone"].values()
        print(
            f"| {way} | {forward:.2f} | {inputs:.2f} | {weights:.2f} | {forward + inputs + weights:.2f} "
            f"| {figures['in_a_row']:.2f} | {figures['in_a_row'] / first['in_a_row']:.3f} "
            f"| {figures['held']['F']:.3f} | {figures['held']['I']:.3f} | {apart:.1e} |",
            flush=True,
        )
        found[way] = {**figures, "apart": apart}
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
