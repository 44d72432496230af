"""Runs the checks one after the other."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from functools import partial

from lightning_pp.doctor.checks import all_checks
from lightning_pp.doctor.child import Options, run_check
from lightning_pp.doctor.findings import Check, Finding, Row, Status
from lightning_pp.doctor.teams import Team
from lightning_pp.rank_processes import RankJob, run_processes

_GRACE_S = 15.0
"""How long the other ranks have to end after one has failed: those of a training do so within ten seconds."""


def examine(team: Team, options: Options, tell: Callable[[str], None] = lambda title: None) -> list[Row]:
    """Runs the checks.

    Args:
        team: Who watches which ranks.
        options: What is asked.
        tell: Gets the title of each check that begins.

    Returns:
        On the leader of the team what was found, in the order of the checks; elsewhere nothing.
    """
    rows: list[Row] = []
    started = time.monotonic()
    only = frozenset(options.only)
    checks = [check for check in all_checks() if not only or {check.name, check.title} & only]
    for number, check in enumerate(checks):
        if team.num_ranks < check.fewest_ranks:
            reason = f"It needs {check.fewest_ranks} processes, and there is {team.num_ranks}."
            rows.append(Row(check.title, check.shows, Finding(Status.NOT_APPLICABLE, reason), 0.0))
            continue
        tell(check.title)
        has_time = options.longest_s - (time.monotonic() - started) > 1.0
        limit_s = min(check.limit_s, options.limit_s) if has_time else 0.0  # whole: a hang is told from a lack of time
        rows += _rows(number, check, team, options, limit_s)
    team.end()
    return rows if team.is_leader else []


def _rows(number: int, check: Check, team: Team, options: Options, limit_s: float) -> list[Row]:
    began = time.monotonic()
    of_ranks, folder, limit_s = team.begin(number, limit_s)
    if limit_s <= 1.0:
        found = f"Left out: the checks before it took {options.longest_s:.0f} s."
        finding = Finding(Status.WARNING, found, f"Run it by itself: --only {check.name}.")
        return [Row(check.title, check.shows, finding, 0.0)]
    folder.mkdir(parents=True, exist_ok=True)  # on a host that does not see the leader's
    work = pickle.dumps(partial(run_check, check.title, options, folder, team.shares_device))
    jobs = [RankJob(rank, work, folder / f"output-{rank}.txt", environment) for rank, environment in of_ranks.items()]
    grace_s = None if check.judge_ends is not None else _GRACE_S
    mine = run_processes(jobs, "lightning_pp.doctor.child", limit_s=limit_s, grace_s=grace_s)
    outcomes = team.share(number, mine, limit_s)
    if not team.is_leader:
        return []
    seconds = round(time.monotonic() - began, 1)
    return [Row(check.title, check.shows, finding, seconds, tuple(outcomes)) for finding in check.findings(outcomes)]
