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
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from emulated_ranks import print_heading, rows_of_ranks, table_row, write_json
from emulated_runs import CPU, KINDS, SLEEPS, Block, DelayedBlock, Ours, has_whole_backwards
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
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


def gpt2(num_layers: int, words: int) -> nn.Module:
    """GPT-2 with so many layers and words."""
    config = hf.GPT2Config(n_layer=num_layers, vocab_size=words, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    model: nn.Module = hf.GPT2LMHeadModel(config)
    return model


def llama(num_layers: int) -> nn.Module:
    """A Llama of width 2048 with so many layers."""
    config = hf.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=num_layers, num_attention_heads=16
    )
    model: nn.Module = hf.LlamaForCausalLM(config)
    return model


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


@dataclass
class Row:
    """What came out for one plan.

    Attributes:
        plan: What was run.
        measured_ms: A step, in each turn.
    """

    plan: Plan
    measured_ms: list[float]

    @property
    def ratio(self) -> float:
        """The median step by the predicted one."""
        return statistics.median(self.measured_ms) / self.plan.predicted_ms


def run_rank(rank: int, num_ranks: int, options: argparse.Namespace, plans: Sequence[Plan]) -> list[Row]:
    """One process: runs every plan so many turns of so many steps; rank 0 prints."""
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    transport = Transport(range(num_ranks), rank, CPU)
    rows = []
    for plan in plans:
        schedule = plan.schedule
        pipeline = Ours(schedule, transport, Block if has_whole_backwards(schedule) else DelayedBlock)
        SLEEPS.of_stage.clear()
        pipeline.step()
        for stage, costs in enumerate(plan.costs):
            SLEEPS.of_stage.update({(stage, kind): cost / 1e3 for kind, cost in zip(KINDS, costs, strict=True)})
        rows.append(Row(plan, [_period_ms(pipeline, options.steps) for _ in range(options.turns)]))
        if rank == 0:
            print(line(rows[-1]), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return rows


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


COLUMNS = (
    "model", "schedule", "F of the stages, ms", "blocks cut", "step predicted, ms", "measured", "by predicted"
)  # fmt: skip


def line(row: Row) -> str:
    """A row of the table, in Markdown."""
    plan = row.plan
    stages = ", ".join(f"{forward:.0f}" for forward, _, _ in plan.costs)
    times = (f"{plan.predicted_ms:.0f}", f"{statistics.median(row.measured_ms):.0f}", f"{row.ratio:.3f}")
    return table_row((plan.model, plan.name, stages, str(plan.num_blocks), *times))


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
    print_heading(COLUMNS)
    found = rows_of_ranks(partial(run_rank, plans=plans), NUM_RANKS, options)
    rows = [Row(Plan(**row["plan"]), row["measured_ms"]) for row in found]
    if options.json:
        write_json(options.json, [{**asdict(row), "by_predicted": row.ratio} for row in rows])
    return int(options.check and any(abs(row.ratio - 1) > MOST_ERROR for row in rows))


if __name__ == "__main__":
    sys.exit(main())
