"""Runs a schedule with a thread per rank and a queue per message: blocking is real, the clocks are numbers.

Written from what the notation means, without the package's own tables: a rank runs its row from left to right; F of a
stage needs F of the stage before, I and B need I or B of the stage after, W needs I; what comes from another rank
arrives ``p2p`` of the sending stage after its end.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from lightning_pp.schedule import Schedule, StageCosts

_PATIENCE_S = 60.0


@dataclass
class Emulation:
    """Start and end of every cell, and the most that each rank held, by rank."""

    start_ms: list[list[float]]
    end_ms: list[list[float]]
    peak_memory: list[float]


class DeadlockError(Exception):
    """A rank waited for a message that nobody sends."""


def emulate(schedule: Schedule, costs: StageCosts) -> Emulation:
    """One step of ``schedule``.

    Raises:
        DeadlockError: A rank waited for ever.
    """
    rank_of_stage = schedule.placement.rank_of_stage
    num_stages, num_ranks = len(rank_of_stage), len(schedule.programs)
    cost = costs.per_stage(num_stages)
    mail: dict[tuple[str, int, int], queue.Queue[float]] = {
        (what, stage, microbatch): queue.Queue()
        for what in ("F", "I", "own I")
        for stage in range(num_stages)
        for microbatch in range(schedule.num_microbatches)
    }
    result = Emulation([[] for _ in range(num_ranks)], [[] for _ in range(num_ranks)], [0.0] * num_ranks)
    failures: list[str] = []

    def run(rank: int) -> None:
        now, held = 0.0, 0.0
        for cell in schedule.programs[rank]:
            kind, stage, microbatch = cell.kind.value, cell.stage, cell.microbatch
            assert microbatch is not None
            needed = stage - 1 if kind == "F" else stage + 1 if kind in "IB" else -1
            if 0 <= needed < num_stages:
                try:
                    arrival = mail["F" if kind == "F" else "I", needed, microbatch].get(timeout=_PATIENCE_S)
                except queue.Empty:
                    failures.append(f"rank {rank} before {cell}")
                    return
                now = max(now, arrival + (cost.p2p[needed] if rank_of_stage[needed] != rank else 0.0))
            if kind == "W":
                assert mail["own I", stage, microbatch].get_nowait() <= now
            result.start_ms[rank].append(now)
            if kind == "F":
                held += cost.held_after_forward[stage]
                result.peak_memory[rank] = max(result.peak_memory[rank], held)
                now += cost.forward[stage]
                mail["F", stage, microbatch].put(now)
            if kind in "IB":
                now += cost.backward_input[stage]
                held += cost.held_after_input[stage] - cost.held_after_forward[stage]
            if kind == "I":
                result.peak_memory[rank] = max(result.peak_memory[rank], held)
                mail["own I", stage, microbatch].put(now)
            if kind in "WB":
                now += cost.backward_weight[stage]
                held -= cost.held_after_input[stage]
            if kind in "IB":
                mail["I", stage, microbatch].put(now)
            result.end_ms[rank].append(now)

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise DeadlockError("; ".join(failures))
    return result
