"""Whether plans keep their word: step times of GPT-2-, Llama- and T5-shaped models, predicted and on emulated devices.

Each model is cut into stages by the FLOPs of its units, as ``lightning-pp-plan`` and the strategy do, without its
weights, inside of blocks where that pays. The costs of the stages, scaled to a mean F of a given time, are what
emulated devices (processes that sleep) take for F, I and W, and the program of the plan is run on them by the runtime,
over real processes and gloo. The predicted step is the plan's, from the same costs with messages that take no time. A
measured step is the time from one step to the next in a row of them, the longest of the ranks.

    python benchmarks/steps/emulated_plans.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers as hf
from emulated_runs import CPU, SLEEPS, Block, DelayedBlock, Ours, has_whole_backwards, sleep_precisely
from torch import Tensor, nn

from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.refinement.choice import CutChoice
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.stage_model import RecordedModel, RecordingOptions, record_model
from lightning_pp.planning.tuning import LayoutRequest
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.schedule import Schedule, StageCosts

NUM_RANKS = 4
NUM_MICROBATCHES = 12
MOST_ERROR = 0.03


class Language(nn.Module):
    """A model of transformers with its training step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor) -> Tensor:
        """The model's own loss of tokens ``[B, T]``."""
        return self.model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


def gpt2(num_layers: int, words: int) -> nn.Module:
    """GPT-2 with so many layers and words."""
    config = hf.GPT2Config(n_layer=num_layers, vocab_size=words, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    return hf.GPT2LMHeadModel(config)


def llama(num_layers: int) -> nn.Module:
    """A Llama of width 2048 with so many layers."""
    config = hf.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=num_layers, num_attention_heads=16
    )
    return hf.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: gpt2(12, 50_257),
    "Llama": lambda: llama(22),
    # which four ranks cannot share out evenly by whole blocks
    "GPT-2, 15 layers, 16,384 words": lambda: gpt2(15, 16_384),
    "Llama, 20 layers": lambda: llama(20),
    "T5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, dropout_rate=0.0, decoder_start_token_id=0)
    ),
}


@dataclass
class Plan:
    """What is run.

    Attributes:
        model: Whose stages they are.
        csv: The program, in torch's notation.
        name: Of the schedule.
        costs: F, I and W of each stage, milliseconds.
        predicted_ms: One step.
        num_blocks: Blocks that a cut falls in.
    """

    model: str
    csv: str
    name: str
    costs: list[tuple[float, float, float]]
    predicted_ms: float
    num_blocks: int

    @property
    def schedule(self) -> Schedule:
        """The program."""
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(self.csv)
            file.flush()
            return Schedule.from_csv(file.name)


def make_plan(model: str, schedule: str, ms: float) -> Plan:
    """Cuts the model and scales the costs of its stages to a mean F of ``ms``."""
    with torch.device("meta"):
        module = Language(MODELS[model]())
    batch = torch.zeros(2, 256, dtype=torch.int64)
    request = LayoutRequest(
        ScheduleOptions(schedule_source(schedule)), NUM_RANKS, NUM_MICROBATCHES, CutOptions(), "cuda"
    )

    def record(refined: Collection[str] = (), num_head_parts: int = 0) -> RecordedModel:
        return record_model(
            module,
            device=CPU,
            step=lambda _: module.training_step(batch),
            with_gradients=True,
            patterns=None,
            num_stages=request.fewest_stages,
            how=RecordingOptions(refined=refined, split_head=num_head_parts or False),
        )

    recording, layout = CutChoice(record(), lambda _: request, record).layout()
    stages = layout.costs.per_stage(layout.placement.num_stages)
    factor = ms / statistics.mean(stages.forward)
    costs = [
        (factor * forward, factor * backward_input, factor * backward_weight)
        for forward, backward_input, backward_weight in zip(
            stages.forward, stages.backward_input, stages.backward_weight, strict=True
        )
    ]
    step = layout.start.simulate(StageCosts(*map(list, zip(*costs, strict=True))))
    num_blocks = 0 if recording.refinement is None else len(recording.refinement.blocks)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.csv"
        layout.start.to_csv(path)
        return Plan(model, path.read_text(), layout.start.name, costs, max(step.span_ms), num_blocks)


def run_rank(rank: int, port: int, plans: Sequence[Plan], num_steps: int, num_turns: int, path: str) -> None:
    """One process: runs every plan ``num_turns`` times ``num_steps`` steps; rank 0 writes the measured times."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    sleep_precisely()
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    transport = Transport(range(NUM_RANKS), rank, CPU)
    measured: list[list[float]] = []
    for plan in plans:
        schedule = plan.schedule
        pipeline = Ours(schedule, transport, Block if has_whole_backwards(schedule) else DelayedBlock)
        SLEEPS.of_stage.clear()
        pipeline.step()
        for stage, costs in enumerate(plan.costs):
            SLEEPS.of_stage.update({(stage, kind): cost / 1e3 for kind, cost in zip("FIW", costs, strict=True)})  # type: ignore[misc]
        measured.append([_period_ms(pipeline, num_steps) for _ in range(num_turns)])
    if rank == 0:
        Path(path).write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def _period_ms(pipeline: Ours, num_steps: int) -> float:
    """The time from one step to the next."""
    dist.barrier()
    SLEEPS.intervals.clear()
    for _ in range(num_steps):
        pipeline.step()
    pipeline.drain()
    first, last = SLEEPS.intervals[0], SLEEPS.intervals[(num_steps - 1) * pipeline.num_sleeps]
    period = torch.tensor((last[0] - first[0]) / (num_steps - 1) * 1e3, dtype=torch.float64)
    dist.all_reduce(period, dist.ReduceOp.MAX)
    return float(period)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 1 if ``--check`` is given and a prediction is off by more than 3 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ms", type=float, default=80.0, help="mean time of a stage's F")
    parser.add_argument("--steps", type=int, default=3, help="steps in a row, at least 2")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_v", "auto"])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a prediction is off by more than 3 %%")
    options = parser.parse_args(arguments)
    plans = [make_plan(model, schedule, options.ms) for model in options.models for schedule in options.schedules]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        port = random.SystemRandom().randrange(15000, 32000)
        given = (port, plans, options.steps, options.turns, str(path))
        torch.multiprocessing.spawn(run_rank, given, nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]
        measured = json.loads(path.read_text())
    print("| model | schedule | F of the stages, ms | blocks cut | step predicted, ms | measured | by predicted |")
    print(f"|{'---|' * 7}")
    rows: list[dict[str, Any]] = []
    for plan, times in zip(plans, measured, strict=True):
        step_ms = statistics.median(times)
        error = step_ms / plan.predicted_ms - 1
        rows.append({**asdict(plan), "measured_ms": times, "error": error})
        stages = ", ".join(f"{forward:.0f}" for forward, _, _ in plan.costs)
        predicted = f"{plan.num_blocks} | {plan.predicted_ms:.0f}"
        print(f"| {plan.model} | {plan.name} | {stages} | {predicted} | {step_ms:.0f} | {1 + error:.3f} |")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2) + "\n")
    return int(options.check and any(abs(row["error"]) > MOST_ERROR for row in rows))


if __name__ == "__main__":
    sys.exit(main())
