"""What it costs to run the user's own step on every stage, beside the blocks that a stage owns; how long a cut takes.

A stage runs the user's step with fakes for the units of other stages. Here a model of 48 blocks is cut into 8
stages, and the forward action of every stage is timed beside plain calls of its blocks on the same inputs: the
difference is the Python of fakes and bookkeeping. Times are CPU times of this process, medians of many runs, so
that other work on the machine counts little.

    python benchmarks/costs/split_overhead.py
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
import transformers as hf
from cut_models import CPU, HFModel, cut, gpt2, llama, median_ms
from torch import Tensor, nn

from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.planning.steps.plans import signature_of
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.runtime.stage import StageRunner
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.split.unit_calls.interception import UnitCalls


class PlainGPT(L.LightningModule):
    """A hand-written decoder of ``num_blocks`` torch encoder layers."""

    def __init__(self, num_blocks: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.position = nn.Parameter(torch.zeros(64, dim))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 2, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(dim, 256)

    def training_step(self, batch: Tensor) -> Tensor:
        """Next-byte loss."""
        mask = nn.Transformer.generate_square_subsequent_mask(batch.shape[1])
        x = self.embedding(batch) + self.position[: batch.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def overhead_of_stages(make: Callable[[int, int], L.LightningModule], args: argparse.Namespace) -> list[float]:
    """For each stage, the CPU time of its forward action less that of its own blocks, in milliseconds."""
    module = make(args.blocks, args.dim)
    batch = torch.randint(0, 256, (args.batch, 32))
    calls: dict[str, tuple[Any, Any]] = {}
    split = cut(module, batch, args.stages)
    hooks = [
        unit.register_forward_pre_hook(
            lambda _, given, named, name=name: calls.update({name: (given, named)}),
            with_kwargs=True,
        )
        for name, unit in split.units.items()
    ]
    module.training_step(batch)
    for hook in hooks:
        hook.remove()
    plan = split.plans.plan(signature_of(batch), lambda dry: module.training_step(batch), with_gradients=True)
    overheads = []
    wires: dict[Any, Tensor] = {}
    for stage in range(args.stages):
        part = part_of(split, make(args.blocks, args.dim), stage)
        units = {name: part.get_submodule(name) for name in split.units}
        unit_calls = UnitCalls(units)
        runner = StageRunner(stage, units, unit_calls)
        received = {edge.value: wires[edge.value] for edge in plan.stages[stage].receives}

        def forward(runner: StageRunner = runner, part: Any = part, received: dict[Any, Tensor] = received) -> Any:
            return runner.forward(
                plan,
                partial(part.training_step, batch),
                lambda: [(value, tensor.clone()) for value, tensor in received.items()],
                StepRandomness(0, CPU),
                with_gradients=True,
                splits_backward=False,
            )

        with unit_calls.installed():  # as the executor does it, once for all microbatches of a step
            kept, _ = forward()
            whole = median_ms(forward, args.runs)
        wires.update({value: tensor.detach() for value, tensor in kept.outputs.items()})
        own_units = [name for name in split.partition.units_of_stage(stage) if name in calls]

        def blocks(own_units: list[str] = own_units) -> None:
            for name in own_units:
                given, named = calls[name]
                split.units[name](*given, **named)

        overheads.append(whole - median_ms(blocks, args.runs))
    return overheads


class _StepEndedError(Exception):
    """Ends a step."""


def own_code(make: Callable[[int, int], L.LightningModule], args: argparse.Namespace) -> float:
    """What the model's own code up to its last unit takes on one device, units left out, in milliseconds."""
    module = make(args.blocks, args.dim)
    batch = torch.randint(0, 256, (args.batch, 32))
    split = cut(module, batch, args.stages)
    module = make(args.blocks, args.dim)
    units = {name: module.get_submodule(name) for name in split.units}
    outputs: dict[str, Any] = {}
    hooks = [
        unit.register_forward_hook(lambda _, given, output, name=name: outputs.update({name: output}))
        for name, unit in units.items()
    ]
    module.training_step(batch)
    for hook in hooks:
        hook.remove()
    last = list(outputs)[-1]
    for name, output in outputs.items():
        vars(units[name])["_compiled_call_impl"] = lambda *_, output=output, **__: output

    def end_step(*_: Any, **__: Any) -> None:
        raise _StepEndedError

    vars(units[last])["_compiled_call_impl"] = end_step

    def forward() -> None:
        with suppress(_StepEndedError):
            module.training_step(batch)

    return median_ms(forward, args.runs)


def part_of(split: SplitModel, module: L.LightningModule, stage: int) -> L.LightningModule:
    """``module`` as the rank of ``stage`` has it: the parameters of other stages are fakes."""
    fake_parameters = FakeParameters(module, CPU)
    fake_parameters.mode = split.fake_parameters.mode
    fake_parameters.release(split.owned_by(stage))
    return module


def seven_billion() -> tuple[float, int]:
    """Seconds that the cut of Llama 7B into 8 stages takes on the meta device, and its parameters."""
    config = hf.LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
    )
    with torch.device("meta"):
        module = HFModel(hf.LlamaForCausalLM(config))
    batch = torch.randint(0, 32000, (1, 2048))
    gc.collect()  # what the models before have left
    start = time.perf_counter()
    cut(module, batch, 8)
    return time.perf_counter() - start, sum(p.numel() for p in module.parameters())


def main() -> None:
    """Prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--runs", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.blocks} blocks, {args.stages} stages, torch {torch.__version__}\n")
    print(
        "| model | CPU time of a forward action beyond its own blocks, ms: median over stages | worst stage "
        "| of it the model's own code between blocks, as on one device |"
    )
    print("|---|---|---|---|")
    for name, make in (("hand-written GPT", PlainGPT), ("GPT-2 (transformers)", gpt2), ("Llama (transformers)", llama)):
        overheads = overhead_of_stages(make, args)
        own = own_code(make, args)
        print(f"| {name} | {statistics.median(overheads):.2f} | {max(overheads):.2f} | {own:.2f} |", flush=True)
    seconds, num_parameters = seven_billion()
    print(f"\nLlama, {num_parameters / 1e9:.2f} billion parameters on meta: recorded and cut in {seconds:.1f} s")


if __name__ == "__main__":
    main()
