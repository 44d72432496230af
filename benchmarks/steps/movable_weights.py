"""Weight gradients that run while a rank waits: ``python benchmarks/steps/movable_weights.py``, on an idle machine.

A program says when each W runs. A rank that waits for a message while it owes weight gradients could run them at once
instead, one by one until the message is here. Each stage's W stay in order, so results are bit for bit the same.

This runs both orders in turns, with real processes over gloo and blocks that sleep (as ``emulated.py``), each F, I and
W by a random share longer or shorter, the same in both orders. A stage has several blocks, so that a W has pieces.
Gloo tells only who waits whether a message is here, so threads wait for all receives; ``watched`` is the program's
order with these threads. Beside it are the same durations simulated, and how far each W could be cut without a price.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from emulated_ranks import print_heading, rows_of_ranks, table_row
from emulated_runs import CPU, SLEEPS, DelayedBlock, Kind, Ours
from torch import Tensor

from lightning_pp.runtime import executor
from lightning_pp.runtime.split_backward.queue import DelaysWeightGradient
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.runtime.transport.route import Stop
from lightning_pp.schedule import Action, ActionKind, Schedule, build_schedule
from lightning_pp.split.record.step_record import Value

ORDERS = ("fixed", "watched", "moved")
MANY_PIECES = 100
Done = dict[tuple[ActionKind, int, int | None], float]


class Draws:
    """What each F, I and W takes, as a share of its mean; the same for the same seed.

    Args:
        seed: Of all draws.
        variation: They lie between 1 minus and 1 plus this, evenly.
    """

    def __init__(self, seed: int, variation: float) -> None:
        self._seed, self._variation = seed, variation
        self._num_drawn: Counter[tuple[int, str]] = Counter()

    def next(self, stage: int, kind: str, num_pieces: int = 1) -> float:
        """The next F, I or W of the stage, or the next of its pieces, which are alike."""
        number = self._num_drawn[stage, kind] // num_pieces
        self._num_drawn[stage, kind] += 1
        draws = random.Random(f"{self._seed} {stage} {kind} {number}")
        return draws.uniform(1 - self._variation, 1 + self._variation)

    def of_step(self, schedule: Schedule) -> dict[tuple[int, int], float]:
        """The next of each action of a step, by rank and place in its program."""
        kinds = {ActionKind.B: "IW"}
        return {
            (rank, place): sum(self.next(action.stage, kind) for kind in kinds.get(action.kind, action.kind.value))
            for rank, program in enumerate(schedule.programs)
            for place, action in enumerate(program)
        }


class _Rank:
    """What one rank has left of a step."""

    def __init__(self, program: Sequence[Action], rank: int, durations: Mapping[tuple[int, int], float]) -> None:
        self.rank, self._durations = rank, durations
        self.left = {place: (action, durations[rank, place]) for place, action in enumerate(program)}

    def next_action(self) -> tuple[int, Action] | None:
        """The next in the program."""
        return next(((place, action) for place, (action, _) in self.left.items()), None)

    def owed(self, done: Done, now: float) -> int | None:
        """The place of the first W, if its I is done."""
        for place, (action, _) in self.left.items():
            if action.kind is ActionKind.W:
                return place if done.get((ActionKind.I, action.stage, action.microbatch), now + 1) <= now else None
        return None

    def run(self, place: int, most: float) -> tuple[Action, float]:
        """Takes off what an action needs yet, or as much of it; gives the action and the time."""
        action, needed = self.left.pop(place)
        if needed - most > 1e-9:
            self.left = dict(sorted({**self.left, place: (action, needed - most)}.items()))
            needed = most
        return action, needed

    def piece(self, place: int, num_pieces: int) -> float:
        """What one of so many pieces of an action takes."""
        return self._durations[self.rank, place] / num_pieces


class Simulation:
    """Consecutive steps of one schedule, without a barrier between them.

    Args:
        schedule: The programs.
        message: What a message takes, where an F takes 1.
        num_pieces: How many pieces a W has that a rank runs one by one while it waits, those of the first W that it
            owes first; 0: it only waits.
    """

    def __init__(self, schedule: Schedule, message: float, num_pieces: int) -> None:
        self._schedule, self._message, self._num_pieces = schedule, message, num_pieces
        self._now = [0.0] * len(schedule.programs)

    def step_time(self, draws: Draws, num_steps: int) -> float:
        """The mean time of a step."""
        for _ in range(num_steps):
            self._step(draws.of_step(self._schedule))
        return max(self._now) / num_steps

    def _step(self, durations: Mapping[tuple[int, int], float]) -> None:
        done: Done = {}
        ranks = [_Rank(program, rank, durations) for rank, program in enumerate(self._schedule.programs)]
        while starts := [start for rank in ranks for start in self._start(rank, done)]:
            began, rank, place, most = min(starts)
            action, took = ranks[rank].run(place, most)
            self._now[rank] = began + took
            if place not in ranks[rank].left:
                kind = ActionKind.I if action.kind is ActionKind.B else action.kind
                done[kind, action.stage, action.microbatch] = self._now[rank]

    def _start(self, rank: _Rank, done: Done) -> Iterator[tuple[float, int, int, float]]:
        """When the rank begins what it does next as far as is known, who it is, the place, and how much it does."""
        following, now = rank.next_action(), self._now[rank.rank]
        if following is None:
            return
        place, action = following
        ready = self._ready(rank.rank, action, done)
        if self._num_pieces and (ready is None or ready > now) and (owed := rank.owed(done, now)) is not None:
            yield now, rank.rank, owed, rank.piece(owed, self._num_pieces)
        elif ready is not None:
            yield ready, rank.rank, place, float("inf")

    def _ready(self, rank: int, action: Action, done: Done) -> float | None:
        """When what the action needs is there; None: not known yet."""
        stage, placement = action.stage, self._schedule.placement
        need = None
        if action.kind is ActionKind.F:
            need = (ActionKind.F, stage - 1, action.microbatch) if stage else None
        elif action.kind is not ActionKind.W:
            is_last = stage == placement.num_stages - 1
            need = (ActionKind.F, stage, action.microbatch) if is_last else (ActionKind.I, stage + 1, action.microbatch)
        if need is None:
            return self._now[rank]
        if need not in done:
            return None
        is_here = placement.rank_of_stage[need[1]] == rank
        return max(self._now[rank], done[need] + (0.0 if is_here else self._message))


class Arrival:
    """A receive that a thread waits for."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.is_here = threading.Event()

    def wait(self) -> None:
        """Returns when the message is here."""
        self.is_here.wait()

    def wait_on_thread(self) -> None:
        """What the thread does."""
        self._work.wait()
        self.is_here.set()


class WatchedTransport(Transport):
    """Messages that can be asked for without waiting, while ``is_watching``."""

    is_watching = False

    def __init__(self, num_ranks: int, rank: int) -> None:
        super().__init__(range(num_ranks), rank, CPU)
        self._arrivals: dict[int, queue.SimpleQueue[Arrival]] = {}

    def _begun(self, begin: Callable[..., Any], lane: Any, tensor: Tensor) -> Any:
        work = super()._begun(begin, lane, tensor)
        if not self.is_watching or begin.__name__ != "recv":
            return work
        if lane.peer not in self._arrivals:
            arrivals = self._arrivals[lane.peer] = queue.SimpleQueue()
            threading.Thread(target=_watch, args=(arrivals,), daemon=True).start()
        arrival = Arrival(work)
        self._arrivals[lane.peer].put(arrival)
        return arrival

    def has_received(self, stop: Stop) -> bool:
        """Whether all that the action needs is here."""
        works = (self._posted[message.tag][0] for message in stop.arrivals if message.sender != self._rank)
        return all(work.is_here.is_set() for work in works)


def _watch(arrivals: queue.SimpleQueue[Arrival]) -> None:
    while True:
        arrivals.get().wait_on_thread()


class MovingStep(executor._Step):
    """A step that runs W of blocks that keep them back while it waits, if ``is_moving``."""

    is_moving = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._owed: list[tuple[int, Any]] = []

    def carry_out(self, stop: Stop) -> None:
        super().carry_out(stop)
        place = stop.action.stage, stop.action.microbatch
        if stop.action.kind is ActionKind.I:
            self._owed.append(place)
        elif stop.action.kind is ActionKind.W:
            self._owed.remove(place)

    def _receive(self, stop: Stop) -> list[tuple[Value, Tensor]]:
        if self.is_moving:
            transport = cast(WatchedTransport, self._transport)
            owed: list[DelaysWeightGradient]
            for place in self._owed:
                owed = self._in_flight[place].queue._modules
                while owed and not transport.has_received(stop):
                    owed.pop(0).backward_dw()
        return super()._receive(stop)


class RandomSleeps:
    """Sleeps of random length, the same in each turn of one number."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self.draws = options, Draws(0, options.variation)
        self.ms = 0.0

    def sleep(self, stage: int, kind: Kind) -> None:
        """One of a block, which stands for a stage here."""
        pieces = self._options.pieces
        share = self.draws.next(stage // pieces, kind, pieces)
        time.sleep(self.ms / 1e3 / pieces * share)


@dataclass
class Row:
    """What came out for one schedule: seconds of a step in each turn, by order, and simulated."""

    schedule: str
    measured: dict[str, list[float]]
    simulated: dict[str, list[float]]


def run_rank(rank: int, num_ranks: int, options: argparse.Namespace) -> list[Row]:
    """One process: all schedules, in each the orders in turns."""
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    executor._Step = MovingStep  # type: ignore[misc, assignment]
    transport, sleeps = WatchedTransport(num_ranks, rank), RandomSleeps(options)
    SLEEPS.sleep = sleeps.sleep  # type: ignore[method-assign]
    rows = []
    for name in options.schedules:
        schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=3 * num_ranks)
        pipeline = Ours(schedule, transport, DelayedBlock, rank, blocks_per_stage=options.pieces)
        sleeps.ms = 0.0
        _step_seconds(pipeline, transport, "moved", 3)
        sleeps.ms = options.ms
        measured: dict[str, list[float]] = {order: [] for order in ORDERS}
        for turn in range(options.turns):
            for order in ORDERS:
                sleeps.draws = Draws(turn, options.variation)
                measured[order].append(_step_seconds(pipeline, transport, order, options.steps))
        simulated: dict[str, list[float]] = {}
        for pieces in (0, 1, options.pieces, MANY_PIECES) if rank == 0 else ():
            simulated[str(pieces)] = [
                Simulation(schedule, options.message, pieces).step_time(Draws(turn, options.variation), options.steps)
                for turn in range(options.turns)
            ]
        rows.append(Row(name, measured, simulated))
        if rank == 0:
            print(line(rows[-1]), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return rows


def _step_seconds(pipeline: Ours, transport: WatchedTransport, order: str, num_steps: int) -> float:
    transport.is_watching, MovingStep.is_moving = order != "fixed", order == "moved"
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        pipeline.step()
    pipeline.drain()
    dist.barrier()
    return (time.perf_counter() - start) / num_steps


def line(row: Row) -> str:
    """A row of the table: milliseconds of a step as the program orders it, and over them the others, as medians."""

    def ratio(times: list[float], base: list[float]) -> str:
        return f"{statistics.median(a / b for a, b in zip(times, base, strict=True)):.3f}"

    fixed, waits = row.measured["fixed"], row.simulated["0"]
    cells = [row.schedule, f"{1e3 * statistics.median(fixed):.0f}"]
    cells += [ratio(row.measured[order], fixed) for order in ORDERS[1:]]
    cells += [ratio(times, waits) for pieces, times in row.simulated.items() if pieces != "0"]
    return table_row(cells)


def main() -> int:
    """Prints a row for each schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=["zb_h1", "zb_h2", "zb_v", "interleaved_zb"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ms", type=float, default=20.0, help="of an F, an I and a W")
    parser.add_argument("--variation", type=float, default=0.2)
    parser.add_argument("--message", type=float, default=0.02, help="of an F, in the simulation")
    parser.add_argument("--pieces", type=int, default=8, help="of a W")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    simulated = [f"simulated, {pieces} pieces" for pieces in (1, options.pieces, MANY_PIECES)]
    print_heading(["schedule", "ms", "watched", "moved", *simulated])
    rows_of_ranks(run_rank, options.ranks, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
