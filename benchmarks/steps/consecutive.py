"""Many steps of a ``Trainer`` in a row on emulated devices: the bubble over all of them beside the simulated one.

Every rank is a process, the transport is gloo, and each stage is one block that sleeps a given time in each of F, I and
W, so that a machine with few cores emulates many devices. What is timed is a fit as a user runs it: Lightning's loop, a
loader, a logged loss, SGD, and a look at every gradient (``on_nonfinite="error"``).

    python benchmarks/steps/consecutive.py                                     # four ranks, 10 ms, about three minutes
    python benchmarks/steps/consecutive.py --schedules zb_h2 --check

The bubble over many steps is ``1 - work / period``: work is what a rank sleeps in a step, by the mean sleep that blocks
have measured, period the time from one update to the next, of the slowest rank.
It is simulated twice, with what an F, I and W of a block and a message take on this machine with no runtime around
them: with the programs of the steps one after the other, where a rank that is done begins its next step (back to back),
and where all ranks begin a step together (in step). The modes are the ways to update:

``plain``    without clipping
``clipped``  with clipping by norm, which no step exceeds
``early``    the same with ``post_validation``: updates do not wait for the norm
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from emulated_alone import measure_alone
from emulated_ranks import print_heading, rows_of_ranks, table_row, write_json
from emulated_runs import SLEEPS, WIDTH, Block, DelayedBlock, has_whole_backwards
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.schedule import Schedule, StageCosts, build_schedule

SIZES = {2: 8, 4: 12}
CLIP = 1e3
MODES: dict[str, tuple[float | None, bool]] = {"plain": (None, False), "clipped": (CLIP, False), "early": (CLIP, True)}
"""By name, ``gradient_clip_val`` of the trainer and ``post_validation`` of the strategy."""
MOST_EXTRA_BUBBLE = 0.01
UPDATES: list[float] = []
"""When this rank has made its updates, by ``time.perf_counter``."""
_NUM_WARM = 3
_REPEATS_ALONE = 12


@dataclass
class Row:
    """What came out for one schedule and mode.

    Attributes:
        schedule: Its name.
        num_ranks: Ranks.
        num_microbatches: Microbatches.
        mode: One of :data:`MODES`.
        ms: Length of a sleep.
        in_step: Simulated bubble, all ranks beginning a step together.
        back_to_back: Simulated bubble, no rank waiting for what it does not need.
        bubble: Measured.
        step_ms: Measured time from a step to the next.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    mode: str
    ms: float
    in_step: float
    back_to_back: float
    bubble: float
    step_ms: float


class Emulated(pl.LightningModule):
    """A chain of blocks that sleep."""

    def __init__(self, num_blocks: int, block: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[block(stage) for stage in range(num_blocks)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of a batch ``[B, WIDTH]``."""
        loss: Tensor = self.blocks(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """SGD, with a scheduler that notes the time."""
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, note_update)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def note_update(step: int) -> float:
    """Of the scheduler: another update is made."""
    UPDATES.append(time.perf_counter())
    return 1.0


class Beginning(pl.Callback):
    """Lets blocks sleep once the first batch is about to be run; measures them alone before."""

    def __init__(self, ms: float) -> None:
        self.ms = ms
        self.costs = StageCosts(0.0, 0.0, 0.0)
        self.sleep_ms = 0.0

    def on_train_start(self, *_: Any) -> None:
        """Of Trainer."""
        alone = measure_alone(self.ms, _REPEATS_ALONE)
        self.costs = StageCosts(alone.forward, alone.backward_input, alone.backward_weight, p2p=alone.message)
        self.sleep_ms = alone.sleep
        SLEEPS.intervals.clear()
        UPDATES.clear()
        SLEEPS.seconds = self.ms / 1e3

    def on_train_end(self, *_: Any) -> None:
        """Of Trainer."""
        SLEEPS.seconds = 0.0


def run_fit(schedule: Schedule, mode: str, ms: float, num_steps: int) -> Row:
    """One fit on all ranks."""
    p, m = len(schedule.programs), schedule.num_microbatches
    replicas = int(os.environ["WORLD_SIZE"]) // p
    block = Block if has_whole_backwards(schedule) else DelayedBlock
    beginning, (clip, early) = Beginning(ms), MODES[mode]
    options: dict[str, Any] = {"num_microbatches": m, "schedule": schedule.name, "check_first_batches": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=p * replicas,
        strategy=PipelineParallelStrategy(p, replicas, post_validation=early, **options),
        max_steps=_NUM_WARM + num_steps + 1,
        callbacks=[beginning],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=clip,
    )
    torch.manual_seed(0)
    data = torch.randn((_NUM_WARM + num_steps + 2) * replicas, 2 * m, WIDTH)
    loader: DataLoader[Any] = DataLoader(data.flatten(0, 1), batch_size=2 * m)  # type: ignore[arg-type]
    trainer.fit(Emulated(schedule.placement.num_stages, block), loader)
    num_sleeps = 3 * m * schedule.placement.num_stages // p
    work = num_sleeps * statistics.mean(end - start for start, end in SLEEPS.intervals)
    period = (UPDATES[_NUM_WARM + num_steps] - UPDATES[_NUM_WARM]) / num_steps
    told = torch.tensor([[work, period]], dtype=torch.float64).mul(1e3)
    ranks = torch.zeros(p * replicas, 2, dtype=torch.float64)
    dist.all_gather_into_tensor(ranks, told)
    step_ms = float(ranks[:, 1].max())
    sleeps_ms = num_sleeps * beginning.sleep_ms
    return Row(
        schedule=schedule.name,
        num_ranks=p,
        num_microbatches=m,
        mode=mode,
        ms=ms,
        in_step=1 - sleeps_ms / schedule.simulate(beginning.costs).makespan,
        back_to_back=1 - sleeps_ms / schedule.time_in_a_row(beginning.costs),
        bubble=1 - float(ranks[:, 0].mean()) / step_ms,
        step_ms=step_ms,
    )


def run_rank(rank: int, num_ranks: int, options: argparse.Namespace) -> list[Row]:
    """One process: all fits, in turns."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_utilities.core.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows: list[Row] = []
    for name in options.schedules:
        p = num_ranks // options.replicas
        schedule = build_schedule(name, num_ranks=p, num_microbatches=SIZES[p])
        turns = [
            [run_fit(schedule, mode, options.ms, options.steps) for mode in options.modes] for _ in range(options.turns)
        ]
        for of_mode in zip(*turns, strict=True):
            numbers = ("in_step", "back_to_back", "bubble", "step_ms")
            medians = {key: statistics.median(getattr(row, key) for row in of_mode) for key in numbers}
            rows.append(replace(of_mode[0], **medians))
            if rank == 0:
                print(line(rows[-1]), flush=True)
    return rows


COLUMNS = ("schedule", "p, m", "mode", "in step", "back to back", "measured", "step ms")


def line(row: Row) -> str:
    """A row of the table, in Markdown."""
    bubbles = (f"{bubble:.3f}" for bubble in (row.in_step, row.back_to_back, row.bubble))
    cells = (row.schedule, f"{row.num_ranks}, {row.num_microbatches}", row.mode, *bubbles, f"{row.step_ms:.1f}")
    return table_row(cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 1 if ``--check`` is given and a bubble is too much beyond the simulated one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], choices=list(SIZES), help="of a pipeline")
    parser.add_argument("--replicas", type=int, default=1, help="pipelines, whose stages are sharded over them")
    parser.add_argument("--ms", type=float, default=10.0, help="length of a sleep")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1", "zb_h2", "zb_v"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--steps", type=int, default=24, help=f"steps that are measured, after {_NUM_WARM}")
    parser.add_argument("--turns", type=int, default=1, help="fits of each kind, in turns; medians are printed")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bubble is too far beyond the simulated")
    options = parser.parse_args(arguments)
    print_heading(COLUMNS)
    rows: list[Row] = []
    for num_ranks in options.ranks:
        rows += [Row(**row) for row in rows_of_ranks(run_rank, num_ranks * options.replicas, options)]
    if options.json:
        write_json(options.json, [asdict(row) for row in rows])
    judged = [row for row in rows if row.mode != "clipped"]
    missed = [row for row in judged if row.bubble > row.back_to_back + MOST_EXTRA_BUBBLE]
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
