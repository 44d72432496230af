"""Weight gradients that run while a rank waits: ``python benchmarks/planning/movable_weights.py``.

A program says when each W runs. A rank that waits for a message while it owes weight gradients could run the next W at
once instead. Both are simulated with the same durations: F, I and W take 1 each, plus or minus a random share, and a
message takes a given time. With ``--patience`` a rank waits so long before it takes a W. Each stage's W stay in order,
so results are bit for bit the same. Printed is the time of a step over that of the fixed order, the mean of the seeds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from statistics import mean

from lightning_pp.schedule import Action, ActionKind, Schedule, build_schedule

CASES = [
    ("zb_h1", 4, 12),
    ("zb_h2", 4, 12),
    ("zb_v", 4, 12),
    ("interleaved_zb", 4, 12),
    ("zb_h1", 8, 24),
    ("zb_v", 8, 24),
]
VARIATIONS = [(0.0, 0.0), (0.2, 0.0), (0.2, 0.2), (0.4, 0.1)]
NUM_STEPS = 6
Done = dict[tuple[ActionKind, int, int | None], float]
Durations = list[Mapping[tuple[int, int], float]]


def needs(action: Action, num_stages: int) -> tuple[ActionKind, int, int | None] | None:
    """What an F, I or B waits for: the F before it, the I behind it, or on the last stage its own F."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.F:
        return (ActionKind.F, stage - 1, microbatch) if stage else None
    if action.kind is ActionKind.W:
        return None
    is_last = stage == num_stages - 1
    return (ActionKind.F, stage, microbatch) if is_last else (ActionKind.I, stage + 1, microbatch)


class Simulation:
    """Consecutive steps of one schedule, without a barrier between them."""

    def __init__(self, schedule: Schedule, message: float, patience: float | None) -> None:
        self.schedule, self.message, self.patience = schedule, message, patience
        self.now = [0.0] * len(schedule.programs)

    def step_time(self, durations: Durations) -> float:
        """The mean time of a step; ``durations`` has for each step that of each action by rank and number."""
        for of_step in durations:
            self._step(of_step)
        return max(self.now) / len(durations)

    def _step(self, durations: Mapping[tuple[int, int], float]) -> None:
        done: Done = {}
        left = [list(enumerate(program)) for program in self.schedule.programs]
        while any(left):
            starts = [start for rank in range(len(left)) if (start := self._next(rank, left[rank], done)) is not None]
            began, rank, place = min(starts)
            number, action = left[rank].pop(place)
            self.now[rank] = began + durations[rank, number]
            kind = ActionKind.I if action.kind is ActionKind.B else action.kind
            done[kind, action.stage, action.microbatch] = self.now[rank]

    def _next(self, rank: int, left: list[tuple[int, Action]], done: Done) -> tuple[float, int, int] | None:
        """When this rank begins its next action as far as is known, and its place among those that are left."""
        if not left:
            return None
        ready = self._ready(rank, left[0][1], done)
        if self.patience is not None and (ready is None or ready > self.now[rank] + self.patience):
            taken_at = self.now[rank] + self.patience
            for place, (_, action) in enumerate(left):
                if action.kind is ActionKind.W:
                    input_done = done.get((ActionKind.I, action.stage, action.microbatch))
                    if input_done is not None and input_done <= taken_at:
                        return taken_at, rank, place
                    break
        return None if ready is None else (ready, rank, 0)

    def _ready(self, rank: int, action: Action, done: Done) -> float | None:
        need = needs(action, self.schedule.placement.num_stages)
        if need is None:
            return self.now[rank]
        if need not in done:
            return None
        is_here = self.schedule.placement.rank_of_stage[need[1]] == rank
        return max(self.now[rank], done[need] + (0.0 if is_here else self.message))


def durations_of(schedule: Schedule, variation: float, seed: int) -> Durations:
    """Random durations of all actions of all steps."""
    draws = random.Random(seed)
    actions = [(r, n, a) for r, program in enumerate(schedule.programs) for n, a in enumerate(program)]
    return [
        {(r, n): (1 + (a.kind is ActionKind.B)) * draws.uniform(1 - variation, 1 + variation) for r, n, a in actions}
        for _ in range(NUM_STEPS)
    ]


def main() -> None:
    """Prints a row for each schedule, size and variation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patience", type=float, nargs="+", default=[0.0, 0.5, 1.2], help="waits before a W is taken")
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    print(
        "schedule        ranks  microbatches  variation  message  "
        + "".join(f"after {p:<5g}" for p in options.patience)
    )
    for name, num_ranks, num_microbatches in CASES:
        schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        for variation, message in VARIATIONS:
            found: list[list[float]] = []
            for seed in range(options.seeds):
                durations = durations_of(schedule, variation, seed)
                times = [
                    Simulation(schedule, message, patience).step_time(durations)
                    for patience in (None, *options.patience)
                ]
                found.append([time / times[0] for time in times[1:]])
            ratios = "".join(f"{mean(column):<11.3f}" for column in zip(*found, strict=True))
            print(
                f"{name:<15} {num_ranks:<6} {num_microbatches:<13} {variation:<10g} {message:<8g} {ratios}", flush=True
            )


if __name__ == "__main__":
    main()
