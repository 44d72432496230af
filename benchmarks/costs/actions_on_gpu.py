"""What F, I and W of Llama 8B's blocks cost on a GPU, beside plain autograd, beside compiled units, and what they hold.

One stage that has a few blocks of Llama 8B runs microbatches one after the other, in bfloat16. Each way does the same
work: the module's own step with ``backward()``; the step of a stage with its backward in one piece (B) or split (I and
W); all again with compiled blocks, and with torchao's float8 linears in these, scaled by tensor. "Alone" are medians of
single actions, with a wait for the device before and after.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
import transformers as hf
from cut_models import HFModel, LoneStage
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

COMPILE = {"dynamic": False}


class Chosen(NamedTuple):
    """How microbatches run: as a stage or by the module's own step, and with what."""

    is_stage: bool = True
    splits: bool = False
    compiles: bool = False
    float8: bool = False


WAYS = {
    "module": Chosen(is_stage=False),
    "stage, B": Chosen(),
    "stage, I and W": Chosen(splits=True),
    "module, compiled": Chosen(is_stage=False, compiles=True),
    "stage, compiled, B": Chosen(compiles=True),
    "stage, compiled, I and W": Chosen(splits=True, compiles=True),
    "module, float8": Chosen(is_stage=False, compiles=True, float8=True),
    "stage, float8, B": Chosen(compiles=True, float8=True),
    "stage, float8, I and W": Chosen(splits=True, compiles=True, float8=True),
}


def llama(args: argparse.Namespace, float8: bool) -> L.LightningModule:
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
        use_cache=False,
    )
    with torch.device(args.device):
        model = hf.LlamaForCausalLM(config).to(args.dtype)
    if float8:
        recipe = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(model.model, config=replace(recipe, emulate=args.device == "cpu"))
    return HFModel(model)


class Way:
    """One way to run microbatches."""

    def __init__(self, chosen: Chosen, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        self.chosen = chosen
        self.module = llama(args, chosen.float8)
        self.batch = torch.randint(0, 1024, (args.batch, args.length), device=self.device)
        self.step = partial(self.module.training_step, self.batch)
        self.times: dict[str, list[float]] = {"F": [], "I": [], "W": []}
        self.held: dict[str, int] = {}
        if not chosen.is_stage and chosen.compiles:
            for block in self.module.get_submodule("model.model.layers").children():
                block.compile(**COMPILE)
        if chosen.is_stage:
            options = COMPILE if chosen.compiles else None
            self.stage = LoneStage(self.module, self.batch, splits=chosen.splits, options=options)

    def microbatch(self, timed: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Runs one microbatch; its gradients are added to those that are there."""
        if not self.chosen.is_stage:
            loss = timed("F", self.step)
            timed("I", loss.backward)
            return
        self.stage.microbatch(timed)

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
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY")
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
    for way in args.ways:
        figures = Way(WAYS[way], args).figures(args)
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
