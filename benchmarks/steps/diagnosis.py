"""Whether a diagnosis is true: emulated pipelines with something wrong, what is found, and what its override brings.

Every rank is a process, the transport is gloo, and each block sleeps a given time in each of F, I and W, so that a
machine with few cores emulates many devices: ranks that are slow sleep longer, what comes over a slow link is not
looked at before a given time after it was sent, and a loader sleeps for every batch. Steps follow each other without a
barrier. Times are those of the runtime's own timers, gathered as in a training.

    python benchmarks/steps/diagnosis.py            # all cases, about two minutes on an idle machine
    python benchmarks/steps/diagnosis.py --cases "slow link" "slow data"

Each row is a pipeline: the finding of the expected cause, what it promises, and what came of a run with its override.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from emulated_ranks import print_heading, rows_of_ranks, table_row
from emulated_runs import CPU, KINDS, SLEEPS, WIDTH, Block, DelayedBlock, Model, cut_before
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.source import schedule_source
from lightning_pp.planning.steps.plans import signature_of
from lightning_pp.runtime.executor import PipelineExecutor, StepInputs
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.runtime.transport.route import Stop
from lightning_pp.schedule import Schedule, StageCosts, build_schedule
from lightning_pp.sharding.units.collective_times import CollectiveTimes
from lightning_pp.strategy.autotune.plan_facts import plan_facts
from lightning_pp.telemetry.diagnosis.collection import NUM_STEPS, StepWindow
from lightning_pp.telemetry.diagnosis.diagnose import Diagnosis
from lightning_pp.telemetry.diagnosis.evidence import PlanFacts
from lightning_pp.telemetry.reading import StepPrediction

NUM_RANKS = 4
NUM_ROWS = 16384
MIN_REACHED = 0.8
_CLOCK_TURNS_S = 1000.0  # what of a clock goes into a float32 with a precision of 0.1 ms


@dataclass(frozen=True)
class Setting:
    """A pipeline that is emulated.

    Attributes:
        num_blocks: Its blocks.
        cut: The first block of stages 1, 2 and 3.
        schedule: Its name.
        num_microbatches: Of a batch.
        block_ms: F of a block for a sixteenth of a batch on a rank of speed 1; I and W take as long.
        speeds: Of ranks.
        links_ms: Of messages between rank r and r + 1, besides what gloo takes.
        loader_ms: What a batch takes a loader.
        num_workers: Of each loader.
    """

    num_blocks: int = 8
    cut: tuple[int, ...] = (2, 4, 6)
    schedule: str = "zb_h1"
    num_microbatches: int = 16
    block_ms: float = 4.0
    speeds: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    links_ms: tuple[float, ...] = (0.0, 0.0, 0.0)
    loader_ms: float = 0.0
    num_workers: int = 0

    def under(self, override: str) -> Setting:
        """With an override of the command line."""
        name, _, value = override.partition("=")
        if name == "strategy.split_points":
            return replace(self, cut=tuple(int(unit.rpartition(".")[2]) for unit in value.strip("'[]").split(",")))
        if name == "strategy.num_microbatches":
            return replace(self, num_microbatches=int(value))
        if name == "data.num_workers":
            return replace(self, num_workers=int(value))
        return replace(self, schedule=value)

    @property
    def program(self) -> Schedule:
        """What is run; a search goes by the times of the stages."""
        ends = (*self.cut, self.num_blocks)
        sizes = [last - first for first, last in zip((0, *self.cut), ends, strict=True)]
        stage_ms = [16 / self.num_microbatches * self.block_ms * n / v for n, v in zip(sizes, self.speeds, strict=True)]
        costs = StageCosts(stage_ms, stage_ms, stage_ms, p2p=max(self.links_ms))
        return build_schedule(
            self.schedule, num_ranks=NUM_RANKS, num_microbatches=self.num_microbatches, costs=costs, quick=True
        )


#: Name to what is wrong, and the cause that has to be found.
CASES = {
    "slow stage": (Setting(num_blocks=12, cut=(2, 7, 9), block_ms=3.0), "cuts"),
    "slow rank": (Setting(num_blocks=16, cut=(4, 8, 12), block_ms=2.0, speeds=(1.0, 1.0, 0.5, 1.0)), "slow_rank"),
    "slow link": (Setting(links_ms=(0.0, 20.0, 0.0)), "slow_link"),
    "slow data": (Setting(loader_ms=150.0), "data"),
    "too few microbatches": (Setting(schedule="1f1b", num_microbatches=4), "microbatches"),
    "another schedule": (Setting(schedule="1f1b"), "schedule"),
    "nothing": (Setting(schedule="zb_h2", num_microbatches=32), ""),
}


class SlowTransport(Transport):
    """What was sent over a slow link is there a given time later; a message's first number is when it was sent."""

    links_ms: Sequence[float] = (0.0,) * (NUM_RANKS - 1)

    def send(self, stop: Stop, tensors: Any) -> None:
        """Sends copies with the time in them."""
        stamped = {}
        for message in stop.departures:
            tensor = tensors[message.value].detach().clone()
            tensor.view(-1)[0] = time.perf_counter() % _CLOCK_TURNS_S
            stamped[message.value] = tensor
        super().send(stop, stamped)

    def receive(self, stop: Stop) -> Any:
        """Waits until the link would have brought it."""
        received = super().receive(stop)
        for message, (_, tensor) in zip(stop.arrivals, received, strict=True):
            first = min(message.sender, self._rank)
            due = float(tensor.view(-1)[0]) + self.links_ms[first] / 1e3
            tensor.view(-1)[0] = 0.0
            early = due - time.perf_counter() % _CLOCK_TURNS_S
            if 0 < early < _CLOCK_TURNS_S / 2:
                time.sleep(early)
        return received


class SlowData(IterableDataset[Tensor]):
    """Batches that take their time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            time.sleep(self._seconds)
            yield torch.zeros(1)


class EmulatedPipeline:
    """One rank of a setting; what :class:`StepWindow` asks a pipeline's engine is here."""

    def __init__(self, setting: Setting, transport: SlowTransport) -> None:
        self.setting, self.schedule = setting, setting.program
        self.rank, self.replica, self.is_settled = dist.get_rank(), 0, True
        self.device, self.placement = CPU, self.schedule.placement
        self.groups = ControlGroups(pipeline=dist.group.WORLD, last_stage_rank=NUM_RANKS - 1)
        self.last_training_step: tuple[Schedule, StepTimer] | None = None
        self.last_collectives: CollectiveTimes | None = None
        self.label: Callable[[str], AbstractContextManager[Any]] | None = None
        self.last_num_samples, self.last_model_flops = NUM_ROWS, 0.0
        self.is_timed = True
        m = setting.num_microbatches
        batch = torch.zeros(NUM_ROWS // m, WIDTH)
        block = DelayedBlock if self.schedule.splits_backward else Block
        module = Model(setting.num_blocks, block)
        self.split = cut_before(module, batch, self.placement, setting.cut)
        self._facts = self._plan_facts()
        self.split.fake_parameters.release(self.split.owned_by(self.rank))
        plan = self.split.plans.plan(signature_of(batch), lambda _: module.training_step(batch), with_gradients=True)
        transport.links_ms = setting.links_ms
        self._executor = PipelineExecutor(self.rank, self.split.units, transport, CPU)
        self._inputs = StepInputs(
            [plan] * m, lambda microbatch, stage: module.training_step(batch), _loss_of, [1 / m] * m, seed=0
        )
        seconds = setting.block_ms / 1e3 * 16 / m / setting.speeds[self.rank]
        for number in range(setting.num_blocks):
            SLEEPS.of_stage.update({(number, kind): seconds for kind in KINDS})

    def plan_facts(self) -> PlanFacts:
        """As the engine tells them."""
        return self._facts

    def prediction_of(self, schedule: Schedule) -> StepPrediction:
        """No diagnosis asks for it."""
        raise NotImplementedError

    def gradient_squares(self) -> list[float]:
        """No diagnosis asks for them."""
        raise NotImplementedError

    def _plan_facts(self) -> PlanFacts:
        options = PipelineOptions(ScheduleOptions(schedule_source(self.setting.schedule)))
        return plan_facts(self.split, options, None, "cpu")

    def run(self) -> Diagnosis | None:
        """A training of so many steps as a diagnosis needs; the diagnosis on rank 0."""
        setting, window = self.setting, StepWindow(self)
        loader = DataLoader(SlowData(setting.loader_ms / 1e3), batch_size=None, num_workers=setting.num_workers)
        batches = iter(loader) if setting.loader_ms else None
        for number in range(NUM_STEPS + 3):
            begun = time.perf_counter()
            if batches is not None:
                next(batches)
            data_ms = 1e3 * (time.perf_counter() - begun)
            _, timer = self._executor.run(self.schedule, self._inputs)
            self.last_training_step = (self.schedule, timer)
            window.batch_ended(1e3 * (time.perf_counter() - begun) if number else None, data_ms)
        self._executor.drain()
        found = window.diagnose(setting.num_workers)
        dist.barrier()
        return found


def _loss_of(output: Tensor) -> Tensor:
    return output


@dataclass
class Row:
    """What came of one case.

    Attributes:
        case: Its name.
        step_ms: With what is wrong.
        promised_ms: What the finding of the expected cause promises; None without an override.
        reached_ms: What its override brings.
        text: The finding, or the diagnosis.
        is_right: Whether the cause is named first, and enough of the promise reached.
    """

    case: str
    step_ms: float
    promised_ms: float | None
    reached_ms: float | None
    text: str
    is_right: bool


def run_case(name: str, transport: SlowTransport) -> Row | None:
    """One case on all ranks; the row on rank 0."""
    setting, cause = CASES[name]
    diagnosis = EmulatedPipeline(setting, transport).run()
    finding = None
    if diagnosis is not None:
        finding = next((each for each in diagnosis.findings if each.cause == cause), None)
    told: list[Any] = [finding]
    dist.broadcast_object_list(told, src=0)
    after = None
    if told[0] is not None and told[0].override:
        after = EmulatedPipeline(setting.under(told[0].override), transport).run()
    if diagnosis is None:
        return None
    if finding is None or after is None:
        is_right = cause == "" and not diagnosis.findings
        return Row(name, diagnosis.step_ms, None, None, diagnosis.text, is_right)
    reached = diagnosis.step_ms - after.step_ms
    is_right = reached >= MIN_REACHED * finding.gain_ms and diagnosis.findings[0].cause == cause
    return Row(name, diagnosis.step_ms, finding.gain_ms, reached, finding.text, is_right)


def run_rank(rank: int, num_ranks: int, options: argparse.Namespace) -> list[Row]:
    """One process: all cases, one after the other; rank 0 prints."""
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    transport = SlowTransport(range(num_ranks), rank, CPU)
    rows = []
    for name in options.cases:
        row = run_case(name, transport)
        if row is not None:
            rows.append(row)
            print(line(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return rows


COLUMNS = ("what is wrong", "step, ms", "named", "promised, ms", "reached, ms", "of the promise")


def line(row: Row) -> str:
    """A row of the table, in Markdown."""
    reached = ("", "", "")
    if row.promised_ms is not None and row.reached_ms is not None:
        reached = (f"{row.promised_ms:.1f}", f"{row.reached_ms:.1f}", f"{row.reached_ms / row.promised_ms:.2f}")
    return table_row((row.case, f"{row.step_ms:.1f}", row.text, *reached))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 with ``--check`` if a cause is not named or a promise not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--check", action="store_true", help="exit with 1 if a cause or a promise is wrong")
    options = parser.parse_args(arguments)
    print_heading(COLUMNS)
    rows = [Row(**row) for row in rows_of_ranks(run_rank, NUM_RANKS, options)]
    num_wrong = sum(not row.is_right for row in rows)
    print(f"\n{len(rows)} cases, {num_wrong} wrong")
    return int(options.check and num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
