"""A pipeline that is emulated: units that take given times, on ranks, links and loaders that may be slow.

It shares nothing with the simulator of schedules but the programs: every rank goes through its program action by
action, step after step, on a clock of its own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import Action, ActionKind, Schedule, StageCosts, build_schedule
from lightning_pp.split.cut.unit_costs import UnitCost
from lightning_pp.telemetry.diagnosis.evidence import Evidence, PlanFacts, ProductWeight, RankEvidence

NUM_ROWS = 32
_NUM_STEPS = 12
_NUM_MEASURED = 8


@dataclass(frozen=True)
class World:
    """What is run on what.

    Attributes:
        units: Every unit's F, I and W of a row, milliseconds on a rank of speed 1; FLOPs are proportional to them.
        cut: The first unit of stages 1, 2, ....
        schedule: Name of the schedule.
        num_microbatches: Of a batch of ``NUM_ROWS``.
        speeds: Of ranks.
        links: Milliseconds of messages between rank r and r + 1.
        loader_ms: What a batch takes one worker, by rank.
        num_workers: Of each loader.
        action_ms: What an action takes besides.
        optimizer_ms: Between two steps.
        deferred: The part of W that can be deferred.
        all_deferred: Whether W has all weights even so, and what is not in W is something else.
        noise: Of the times of actions, relative.
        classes: Of units; the part of a name before its first dot by default.
    """

    units: Mapping[str, tuple[float, float, float]]
    cut: Sequence[str]
    schedule: str = "1f1b"
    num_microbatches: int = 16
    speeds: Sequence[float] = (1.0, 1.0, 1.0, 1.0)
    links: Sequence[float] = (0.2, 0.2, 0.2)
    loader_ms: Sequence[float] = (0.0, 0.0, 0.0, 0.0)
    num_workers: int = 0
    action_ms: float = 0.05
    optimizer_ms: float = 2.0
    deferred: float = 1.0
    all_deferred: bool = False
    noise: float = 0.0
    classes: Mapping[str, str] = field(default_factory=dict)

    @property
    def stages(self) -> list[list[str]]:
        """The units of each stage."""
        stages: list[list[str]] = [[]]
        for unit in self.units:
            if unit in self.cut:
                stages.append([])
            stages[-1].append(unit)
        return stages

    @property
    def program(self) -> Schedule:
        """What is run."""
        rows = NUM_ROWS / self.num_microbatches
        parts = [[rows * sum(self.units[unit][part] for unit in stage) for stage in self.stages] for part in range(3)]
        return build_schedule(
            self.schedule,
            num_ranks=len(self.speeds),
            num_microbatches=self.num_microbatches,
            costs=StageCosts(*parts, p2p=max(self.links)),
            quick=True,
        )

    def run(self, seed: int = 0) -> tuple[float, list[RankEvidence]]:
        """The time of a step, and what ranks measure."""
        program = self.program
        runner = _Run(self, program, random.Random(seed))
        ends: list[list[float]] = []
        for _ in range(_NUM_STEPS):
            ends.append(runner.step())
        last = [max(each) for each in ends]
        step_ms = (last[-1] - last[-1 - _NUM_MEASURED]) / _NUM_MEASURED
        return step_ms, [
            RankEvidence(
                times=_mean_times([step[rank] for step in runner.times[-_NUM_MEASURED:]]),
                step_ms=step_ms,
                data_ms=mean(wait[rank] for wait in runner.data_waits[-_NUM_MEASURED:]),
                host=f"node{rank}",
                num_samples=NUM_ROWS,
                num_workers=self.num_workers,
                num_cores=8,
                deferred_shapes={(8, 8)} if self.all_deferred or self.deferred == 1.0 else frozenset(),
            )
            for rank in range(len(self.speeds))
        ]

    def evidence(self, seed: int = 0) -> Evidence:
        """What a diagnosis is given."""
        facts = PlanFacts(
            stages=self.stages,
            unit_costs={unit: UnitCost(*(1e9 * part for part in parts)) for unit, parts in self.units.items()},
            unit_classes=self.classes or {unit: unit.partition(".")[0] for unit in self.units},
            cut_again=best_cut,
            fixed_ms=self.action_ms,
            product_weights={unit: [ProductWeight(f"{unit}.weight", (8, 8), 1e9)] for unit in self.units},
        )
        return Evidence.of(self.program, self.run(seed)[1], facts)


def best_cut(units: Mapping[str, UnitCost], speeds: Sequence[float], program: Schedule) -> list[list[str]]:
    """Of all cuts that leave every stage a unit the one whose slowest stage is the fastest, by trying them all."""
    names, num_stages = list(units), program.placement.num_stages

    def slowest(starts: Sequence[int]) -> float:
        bounds = [0, *starts, len(names)]
        return max(
            sum(units[name].total for name in names[first:end]) / speed
            for first, end, speed in zip(bounds, bounds[1:], speeds, strict=False)
        )

    best = min(itertools.combinations(range(1, len(names)), num_stages - 1), key=slowest)
    bounds = [0, *best, len(names)]
    return [names[a:b] for a, b in itertools.pairwise(bounds)]


class _Run:
    """Steps of a world, one after the other."""

    def __init__(self, world: World, program: Schedule, noise: random.Random) -> None:
        self._world, self._program, self._noise = world, program, noise
        num_ranks = len(world.speeds)
        self._clock = [0.0] * num_ranks
        self._num_steps = 0
        self.times: list[list[list[ActionTimes]]] = []
        self.data_waits: list[list[float]] = []
        rows = NUM_ROWS / world.num_microbatches
        self._parts = [
            [rows * sum(world.units[unit][part] for unit in units) for part in range(3)] for units in world.stages
        ]

    def step(self) -> list[float]:
        """One step; when each rank has ended it."""
        world, program = self._world, self._program
        waits = [self._read(rank) for rank in range(len(world.speeds))]
        begun = list(self._clock)
        done: dict[tuple[str, int, int | None], float] = {}
        times: list[list[ActionTimes]] = [[] for _ in begun]
        left = [list(row) for row in program.programs]
        while any(left):
            progress = False
            for rank, row in enumerate(left):
                while row and (start := self._start(row[0], done)) is not None:
                    action, progress = row.pop(0), True
                    asked = self._clock[rank]
                    start = max(start, asked)
                    end = start + self._duration(action)
                    self._clock[rank] = end
                    key = "B" if action.kind in (ActionKind.I, ActionKind.B) else str(action.kind)
                    done[key, action.stage, action.microbatch] = end
                    origin = begun[rank] - 1000.0 * rank  # clocks of ranks differ
                    times[rank].append(ActionTimes(action, asked - origin, start - origin, end - origin))
            assert progress, "a deadlock"
        self._clock = [clock + world.optimizer_ms for clock in self._clock]
        self._num_steps += 1
        self.times.append(times)
        self.data_waits.append(waits)
        return list(self._clock)

    def _read(self, rank: int) -> float:
        """Waits for the loader; returns how long."""
        per_batch, workers = self._world.loader_ms[rank], self._world.num_workers
        if workers == 0:
            wait = per_batch
        else:
            ready = per_batch * (1 + self._num_steps / workers)
            wait = max(0.0, ready - self._clock[rank])
        self._clock[rank] += wait
        return wait

    def _start(self, action: Action, done: Mapping[tuple[str, int, int | None], float]) -> float | None:
        """When what it needs is there; None if nobody has begun to make it."""
        num_stages = self._program.placement.num_stages
        if action.kind is ActionKind.F:
            source, key = action.stage - 1, "F"
        elif action.kind in (ActionKind.I, ActionKind.B):
            source, key = action.stage + 1, "B"
        else:
            return 0.0
        if not 0 <= source < num_stages:
            return 0.0
        end = done.get((key, source, action.microbatch))
        rank_of_stage = self._program.placement.rank_of_stage
        here, there = rank_of_stage[action.stage], rank_of_stage[source]
        return None if end is None else end + (self._world.links[min(here, there)] if here != there else 0.0)

    def _duration(self, action: Action) -> float:
        rank = self._program.placement.rank_of_stage[action.stage]
        forward, backward_input, backward_weight = self._parts[action.stage]
        late = backward_weight * self._world.deferred
        work = {
            ActionKind.F: forward,
            ActionKind.I: backward_input + backward_weight - late,
            ActionKind.W: late,
            ActionKind.B: backward_input + backward_weight,
        }[action.kind]
        spread = 1.0 + self._noise.gauss(0.0, self._world.noise) if self._world.noise else 1.0
        return work / self._world.speeds[rank] * spread + self._world.action_ms


def _mean_times(steps: Sequence[Sequence[ActionTimes]]) -> list[ActionTimes]:
    """The mean moments of every action."""
    return [
        ActionTimes(
            same[0].action,
            mean(moment.asked_ms for moment in same),
            mean(moment.start_ms for moment in same),
            mean(moment.end_ms for moment in same),
        )
        for same in zip(*steps, strict=True)
    ]


def blocks(number: int, ms: float = 1.0) -> dict[str, tuple[float, float, float]]:
    """So many units alike, each of whose F, I and W takes so long for a row."""
    return {f"blocks.{index}": (ms, ms, ms) for index in range(number)}
