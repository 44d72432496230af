"""The files of a plan: everything as JSON, a page, the program as CSV."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightning_pp.cli.plan.report import Plan
from lightning_pp.cli.plan.schedules import ModelCut, PlannedSchedule
from lightning_pp.cli.problems import UserError
from lightning_pp.planning.schedules.given_costs import ARE_ALONE
from lightning_pp.planning.unit_times.measure import UnitTimes
from lightning_pp.telemetry import html_timeline

_FORMAT = "lightning_pp.plan/1"
_OF_SCHEDULE = (
    *("stages_per_rank", "step_time", "time_in_a_row", "bubble_fraction", "rank_bubbles", "peak_microbatches"),
    *("peak_bytes", "fits"),
)


def write_files(plan: Plan, folder: Path) -> list[Path]:
    """Writes ``plan.json``, the program as CSV, its page and, if units ran alone, their times as ``costs.json``.

    Returns:
        What was written.

    Raises:
        UserError: The folder cannot be written to.
    """
    contents = {
        "plan.json": json.dumps(plan_as_json(plan), indent=2) + "\n",
        "schedule.csv": plan.shown.schedule.csv_text(),
        "schedule.html": html_timeline(plan.timeline),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content.encode())
        if plan.costs.unit_times is not None:
            name = "costs.json"
            contents[name] = name
            _write_costs(plan.costs.unit_times, folder / name)
    except OSError as error:
        raise UserError(f"out={folder} cannot be written: {error}") from error
    return [folder / name for name in contents]


def _write_costs(times: UnitTimes, path: Path) -> None:
    """The times of units, as a file that ``costs=`` and ``strategy.costs=`` take."""
    given = times.given()
    measured_on = {"stages": given.units, ARE_ALONE: True, "device": str(times.device), "torch": torch.__version__}
    given.stages.to_json(path, measured_on=measured_on)


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Everything that the plan knows; sizes in bytes, times in ``time_unit``."""
    best = plan.table.best
    cuts = list({id(planned.cut): planned.cut for planned in plan.table.usable}.values())
    return {
        "format": _FORMAT,
        "module": type(plan.cutter.module).__name__,
        "batch_size": plan.cutter.batch_size,
        "num_microbatches": plan.cutter.num_microbatches,
        "num_devices": plan.num_devices,
        "num_ranks": plan.cutter.sizes.pipeline,
        "num_tensor_ranks": plan.cutter.sizes.tensor,
        "time_unit": plan.costs.unit,
        "costs_from": plan.costs.about,
        "assumptions": list(plan.assumptions),
        "device_memory_bytes": plan.limit_bytes,
        "configured": None if plan.configured is None else plan.table.usable.index(plan.configured),
        "best": None if best is None else plan.table.usable.index(best),
        "shown": plan.table.usable.index(plan.shown),
        "shown_time_with_collectives": plan.time_with_collectives,
        "cuts": [_cut_as_json(cut) for cut in cuts],
        "schedules": [{**_schedule_as_json(planned), "cut": cuts.index(planned.cut)} for planned in plan.table.usable],
        "not_possible": [asdict(unusable) for unusable in plan.table.unusable],
    }


def _cut_as_json(cut: ModelCut) -> dict[str, Any]:
    placement = cut.split.placement
    return {
        "placement": placement.kind,
        "rank_of_stage": list(placement.rank_of_stage),
        **asdict(cut.summary),
        "sent_bytes": cut.summary.sent_bytes,
        "costs": asdict(cut.costs.per_stage(placement.num_stages)),
    }


def _schedule_as_json(planned: PlannedSchedule) -> dict[str, Any]:
    without = planned.without
    return {
        "name": planned.name,
        "found": planned.schedule.name,
        **{name: getattr(planned, name) for name in _OF_SCHEDULE},
        "memory": [asdict(rank) for rank in planned.memory],
        "whole_batch_loss": planned.schedule.whole_batch_loss,
        "without_whole_batch_loss": None if without is None else _schedule_as_json(without),
        "programs": [",".join(map(str, program)) for program in planned.schedule.programs],
    }
