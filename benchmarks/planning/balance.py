"""How even stages are with cuts between blocks, and inside of them: ``python benchmarks/planning/balance.py``.

For each model, without memory: the work of the slowest rank over that of the mean one (F, I and W by FLOPs), and a step
in a row of steps by estimated costs, as ``lightning-pp-plan`` estimates them for a GPU. With ``--equal`` the step that
``lightning-pp-plan recipe=llama`` plans on eight ranks of H100, over that of eight equal stages with the same work, in
each schedule. Nothing runs but dry runs.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from hydra import compose, initialize_config_module
from rich.console import Console
from torch import Tensor, nn

from lightning_pp.cli.plan.run import make_plan
from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.hardware.devices import PlannedDevice
from lightning_pp.planning.model_cutter import ModelCutter, StepToCut
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.stage_costs import assumed_speed, estimated_costs
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.schedule import Placement, StageCosts, build_schedule
from lightning_pp.split.data.microbatch import split_batch
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.split.fakes.without_memory import parameters_without_memory
from lightning_pp.split.unit_calls.units import discover_units

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


SCHEDULES = ["1f1b", "zb_h1", "zb_h2", "interleaved_1f1b", "interleaved_zb", "zb_v", "v_half", "dualpipe_v", "auto"]


def cut(module: nn.Module, batch: dict[str, Tensor], num_ranks: int, schedule: str, *, blocks: bool) -> Cut:
    """Cuts a model with its head whole, inside of ``blocks`` or not."""
    options = CutOptions(units=None if blocks else list(discover_units(module)))
    placement = build_schedule(schedule, num_ranks=num_ranks, num_microbatches=1).placement
    begun = time.perf_counter()
    split = cut_as_on_gpus(module, batch, lambda _: module(**batch).loss, placement, schedule, options)
    seconds = time.perf_counter() - begun
    num_blocks = 0 if split.refinement is None else len(split.refinement.blocks)
    return Cut(unevenness(split), step_ms(split, schedule, 4 * num_ranks), num_blocks, seconds)


def cut_as_on_gpus(
    module: nn.Module,
    batch: Any,
    step: Callable[[DryRun], Any],
    placement: Placement,
    schedule: str,
    cut: CutOptions,
) -> SplitModel:
    """Cuts a model as a training on GPUs would, with four microbatches of the size of ``batch`` for each rank."""
    cutter = ModelCutter(
        module,
        PipelineOptions(ScheduleOptions(schedule_source(schedule)), cut=cut),
        ParallelSizes(placement.num_ranks, 1),
        StepToCut(batch, split_batch(batch, 1) * 4 * placement.num_ranks, step),
        PlannedDevice("cuda"),
    )
    return cutter.split(placement).split


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


def against_equal(schedule: str, *, blocks: bool) -> tuple[float, float, int]:
    """The planned step of the 1B Llama on eight ranks, that of equal stages in the same schedule, and blocks cut."""
    layers = [f"model.model.layers.{number}" for number in range(16)]
    units = ["model.model.embed_tokens", *layers, "model.model.norm", "model.lm_head"]
    overrides = ["recipe=llama", "trainer.devices=64", "strategy.pipeline_parallel_size=8", "device='h100 sxm'"]
    overrides += [f"strategy.schedule={schedule}", f"schedules=[{schedule}]"]
    overrides += [] if blocks else [f"strategy.units=[{','.join(units)}]"]
    with initialize_config_module("lightning_pp.conf", version_base="1.3"):
        config = compose("plan", overrides=overrides)
    plan = make_plan(config, Console(file=io.StringIO(), width=200))
    assert plan is not None
    program, source, found = plan.shown.schedule, plan.shown.source, plan.shown.cut
    number = program.placement.num_stages
    costs = found.costs.per_stage(number)
    equal = StageCosts(
        sum(costs.forward) / number,
        sum(costs.backward_input) / number,
        sum(costs.backward_weight) / number,
        p2p=sum(costs.p2p) / number,
    )
    of_equal = source.program(program.placement, program.num_microbatches, equal, None).simulate(equal)
    refinement = found.summary.refinement
    return plan.shown.step_time, of_equal.makespan, 0 if refinement is None else len(refinement.blocks)


def print_against_equal(schedules: Sequence[str]) -> None:
    """Prints a row for each schedule."""
    print("| schedule | step, ms | equal stages | ratio | with cuts inside | equal stages | ratio | blocks cut |")
    print(f"|{'---|' * 8}")
    for schedule in schedules:
        cells = []
        for blocks in (False, True):
            step, equal, number = against_equal(schedule, blocks=blocks)
            cells.append(f"{step:.1f} | {equal:.1f} | {step / equal:.3f}")
        print(f"| `{schedule}` | {' | '.join(cells)} | {number} |", flush=True)


def print_balance(models: Sequence[str], sizes: Sequence[int], schedule: str) -> None:
    """Prints a row for each model and number of ranks."""
    print("| model | ranks | slowest / mean | with cuts inside | blocks cut | step, ms | with cuts inside | found in |")
    print(f"|{'---|' * 8}")
    for name in models:
        with parameters_without_memory():
            module, batch = MODELS[name]()
        for ranks in sizes:
            before, after = (cut(module, batch, ranks, schedule, blocks=blocks) for blocks in (False, True))
            print(
                f"| {name} | {ranks} | {before.unevenness:.3f} | {after.unevenness:.3f} | {after.blocks} "
                f"| {before.step_ms:.1f} | {after.step_ms:.1f} | {before.seconds:.1f} s, {after.seconds:.1f} s |",
                flush=True,
            )


def main() -> None:
    """Prints one table or the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--equal", nargs="*", metavar="SCHEDULE", help="compare with equal stages, in these schedules")
    arguments = parser.parse_args()
    if arguments.equal is None:
        print_balance(arguments.models, arguments.ranks, arguments.schedule)
    else:
        print_against_equal(arguments.equal or SCHEDULES)


if __name__ == "__main__":
    main()
