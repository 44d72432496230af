"""OFFLOAD and RELOAD in any program: tensors that wait long for their backward wait on the host.

From its F to its I or B, a microbatch holds what autograd has saved. Where this time is long enough for a copy to the
host and one back, beside the computation, memory of the device is free in between and no rank waits: PipeOffload (Wan
et al., 2025, arXiv:2503.01328). The longest of these times are used first. Copies of one direction are made one after
the other. A microbatch whose copy would wait for longer than it takes stays on the device.

Times are the latest ones at which no rank ends later than without copies, so a program with them takes as long. Of each
microbatch a rank moves that share of bytes with which it holds the least: a slow link cannot take everything in time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import replace

import numpy as np

from lightning_pp.schedule.program.coded import OFFLOAD, RELOAD, B, CodedProgram, F, I
from lightning_pp.schedule.schedule import Schedule
from lightning_pp.schedule.simulation.costs import ResolvedCosts, StageCosts
from lightning_pp.schedule.simulation.execution import CostTables, Times
from lightning_pp.schedule.simulation.memory import exceeds, peak_memory

_SHARES = (0.25, 0.5, 0.75, 1.0)
_ROUNDING = 1e-9


def with_offloading(schedule: Schedule, costs: StageCosts) -> Schedule:
    """``schedule`` with OFFLOAD and RELOAD of what can wait on the host, where a rank holds less by it.

    OFFLOAD stands where its copy has ended, so the order of actions says what a rank holds. RELOAD stands where its
    copy has to begin. A schedule that has OFFLOAD already, or no backward, is returned as it is.

    Args:
        schedule: Legal programs.
        costs: With ``offload`` and ``held_on_host``.
    """
    resolved = costs.per_stage(schedule.placement.num_stages)
    if schedule.forward_only or schedule.offloads or not any(resolved.held_on_host):
        return schedule
    execution = schedule.execution
    starts, ends = execution.latest(execution.run(CostTables.build(schedule.placement, costs)))
    programs, shares = [], []
    for program, slots in zip(schedule.coded, execution.slots, strict=True):
        least = peak_memory(program, costs, program.num_stages), 0.0, program
        for share in _SHARES:
            partly = costs.with_share(share)
            found = _with_copies(program, starts[slots], ends[slots], partly.per_stage(program.num_stages))
            peak = peak_memory(found, partly, program.num_stages)
            if exceeds(least[0], peak):
                least = peak, share, found
        programs.append(least[2])
        shares.append(least[1])
    return replace(schedule, programs=tuple(programs), offload_shares=tuple(shares))


def _with_copies(program: CodedProgram, start_ms: Times, end_ms: Times, costs: ResolvedCosts) -> CodedProgram:
    """The program of one rank, whose actions start and end at these times."""
    kinds, stages, microbatches = program.parts()
    cells = np.flatnonzero(kinds < OFFLOAD)
    starts, ends = start_ms[cells].tolist(), end_ms[cells].tolist()
    ended: dict[tuple[int, int], float] = {}  # each F
    waits = []
    for place, cell in enumerate(cells.tolist()):
        whose = int(stages[cell]), int(microbatches[cell])
        if kinds[cell] == F:
            ended[whose] = ends[place]
        elif kinds[cell] in (I, B) and costs.held_on_host[whose[0]]:
            waits.append((ended[whose] - starts[place], ended[whose], starts[place], whose))
    slack = _ROUNDING * max(ends, default=0.0)
    out, back = _Link(slack), _Link(slack)
    found: list[tuple[int, float, int, int]] = []  # before which action, when, kind, whose
    for _, forward_ms, backward_ms, (stage, microbatch) in sorted(waits):
        copy_ms = costs.offload[stage]
        leaves, returns = out.earliest(forward_ms, copy_ms), back.earliest(-backward_ms, copy_ms)
        if leaves is None or returns is None:
            continue
        is_gone, comes = leaves + copy_ms, -returns - copy_ms
        gone, needed = bisect_left(starts, is_gone - slack), bisect_right(ends, comes + slack)
        if gone < needed:  # there is an action between
            out.take(leaves, copy_ms)
            back.take(returns, copy_ms)
            code = stage * program.num_microbatches + microbatch
            found += [(gone, is_gone, OFFLOAD, code), (needed, comes, RELOAD, code)]
    found.sort()
    size = program.num_stages * program.num_microbatches
    codes = [kind * size + code for *_, kind, code in found]
    return program.with_codes(np.insert(program.codes, cells[[place for place, *_ in found]], codes))


class _Link:
    """The times of copies in one direction. For copies back to the device, time runs from the end of the step."""

    def __init__(self, slack: float) -> None:
        self._taken: list[tuple[float, float]] = []
        self._slack = slack

    def earliest(self, asked: float, length: float) -> float | None:
        """When a copy can begin that is asked for then; None if it would wait for longer than it takes."""
        begin = asked
        for place in range(max(0, bisect_left(self._taken, (asked,)) - 1), len(self._taken)):
            first, end = self._taken[place]
            if begin + length <= first + self._slack:
                break
            begin = max(begin, end)
            if begin > asked + length + self._slack:
                return None
        return begin

    def take(self, begin: float, length: float) -> None:
        """A copy is made then."""
        insort(self._taken, (begin, begin + length))
