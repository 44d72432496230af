"""How even stages are with cuts between blocks, and with cuts inside of them: ``python benchmarks/balance.py``.

For each model, without memory: the work of the slowest rank over that of the mean one (F, I and W by FLOPs), and a step
in a row of steps by estimated costs, as ``lightning-pp-plan`` estimates them for a GPU. Nothing runs but dry runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.model_cutter import ModelCutter
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.stage_costs import assumed_speed, estimated_costs
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.schedule import Placement, build_schedule
from lightning_pp.split import discover_units
from lightning_pp.split.data.microbatch import split_batch
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.fakes.without_memory import parameters_without_memory

Make = Callable[[], tuple[nn.Module, dict[str, Tensor]]]


@dataclass(frozen=True)
class Cut:
    """What a cut comes to.

    Attributes:
        unevenness: Work of the slowest rank over that of the mean one.
        step_ms: A step in a row of steps.
        blocks: Blocks that are cut inside.
        seconds: What it took to find.
    """

    unevenness: float
    step_ms: float
    blocks: int
    seconds: float


def tokens(words: int, length: int, rows: int = 2) -> dict[str, Tensor]:
    """A batch of token ids [rows, length] and their labels."""
    ids = torch.randint(words, (rows, length))
    return {"input_ids": ids, "labels": ids}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT-2 XL: 48 layers, 1.6 G parameters, 50,257 words."""
    config = hf.GPT2Config(n_embd=1600, n_layer=48, n_head=25, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return hf.GPT2LMHeadModel(config), tokens(config.vocab_size, 1024)


def llama(words: int) -> Make:
    """The shape of Llama 7B with so many words."""

    def make() -> tuple[nn.Module, dict[str, Tensor]]:
        config = hf.LlamaConfig(vocab_size=words, use_cache=False)
        return hf.LlamaForCausalLM(config), tokens(words, 2048)

    return make


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    """T5 large: 24 + 24 layers, 32,128 words."""
    config = hf.T5Config(
        d_model=1024, d_ff=4096, num_layers=24, num_heads=16, d_kv=64, dropout_rate=0, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config), tokens(config.vocab_size, 512)


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    """ViT large: 24 layers, images of 224 x 224."""
    config = hf.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    )
    return hf.ViTForImageClassification(config), {
        "pixel_values": torch.zeros(8, 3, 224, 224),
        "labels": torch.zeros(8, dtype=torch.long),
    }


MODELS: dict[str, Make] = {
    "GPT-2 XL": gpt2,
    "Llama 7B, 32,000 words": llama(32_000),
    "Llama 7B, 128,000 words": llama(128_000),
    "T5 large": t5,
    "ViT large": vit,
}


def cut(module: nn.Module, batch: dict[str, Tensor], num_ranks: int, schedule: str, *, whole: bool) -> Cut:
    """Cuts a model, with blocks whole or not."""
    units = list(discover_units(module)) if whole else None
    options = PipelineOptions(ScheduleOptions(schedule_source(schedule)), cut=CutOptions(units=units))

    def step(_: DryRun) -> Any:
        return module(**batch).loss

    microbatch = split_batch(batch, 1)
    number = 4 * num_ranks
    cutter = ModelCutter(
        module,
        options,
        ParallelSizes(num_ranks, 1),
        batch=batch,
        microbatches=microbatch * number,
        step=step,
        device_type="cuda",
    )
    begun = time.perf_counter()
    split = cutter.split(build_schedule(schedule, num_ranks=num_ranks, num_microbatches=1).placement).split
    seconds = time.perf_counter() - begun
    blocks = 0 if split.refinement is None else len(split.refinement.blocks)
    return Cut(unevenness(split), step_ms(split, schedule, number), blocks, seconds)


def unevenness(split: SplitModel) -> float:
    """Work of the slowest rank over that of the mean one."""
    work = [0.0] * split.placement.num_ranks
    for unit, cost in split.partition.unit_costs.items():
        work[split.placement.rank_of_stage[split.partition.stage_of_unit[unit]]] += cost.total
    return max(work) * len(work) / sum(work)


def step_ms(split: SplitModel, schedule: str, num_microbatches: int) -> float:
    """A step in a row of steps, estimated."""
    placement: Placement = split.placement
    costs = estimated_costs(split.record, split.partition, placement, assumed_speed("cuda"))
    program = build_schedule(schedule, num_ranks=placement.num_ranks, num_microbatches=num_microbatches)
    return max(program.simulate(costs).span_ms)


def main() -> None:
    """Prints a row for each model and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    print("| model | ranks | slowest / mean | with cuts inside | blocks cut | step, ms | with cuts inside | found in |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.models:
        with parameters_without_memory():
            module, batch = MODELS[name]()
        for ranks in arguments.ranks:
            before, after = (cut(module, batch, ranks, arguments.schedule, whole=whole) for whole in (True, False))
            print(
                f"| {name} | {ranks} | {before.unevenness:.3f} | {after.unevenness:.3f} | {after.blocks} "
                f"| {before.step_ms:.1f} | {after.step_ms:.1f} | {before.seconds:.1f} s, {after.seconds:.1f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
