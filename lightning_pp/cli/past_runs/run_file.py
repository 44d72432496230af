"""The file that a run writes into its folder for ``lightning-pp-report``: plain JSON.

::

    {
      "format": "lightning_pp.RunReport/1",
      "folder": "/home/me/outputs/...",   # where the run was
      "config": {...},                    # as it was composed, secrets hidden
      "metrics": {"val_loss": 2.5},       # Lightning's callback_metrics at the end
      "pipeline": {"schedule": "1f1b", "num_microbatches": 4, "rank_of_stage": [0, 1], "step_ms": 52.7, ...,
                   "stages": [{"stage": 0, "units": [...], "forward_ms": 3.1, ...}, ...]},
      "diagnosis": {"num_steps": 8, "step_ms": 52.7, "simulated_ms": 51.9, "findings": [...]},
      "timeline": [[["0F0", asked, start, end, early], ...], ...]    # by rank, milliseconds
    }
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_pp.cli.problems import UserError
from lightning_pp.runtime.timing import ActionTimes
from lightning_pp.schedule import Action, Placement, Schedule
from lightning_pp.telemetry.diagnosis.diagnose import Diagnosis
from lightning_pp.telemetry.diagnosis.finding import Finding
from lightning_pp.telemetry.report import PipelineReport, StageReport
from lightning_pp.telemetry.timeline.step import Timeline

FILE_NAME = "pipeline_report.json"
_FORMAT = "lightning_pp.RunReport/1"
_NUMBERS = ("step_ms", "bubble_fraction", "tokens_per_s", "samples_per_s", "first_loss", "last_loss")


@dataclass(frozen=True)
class RunFile:
    """The content of the file.

    Attributes:
        folder: Where it lies.
        content: As JSON has it.
    """

    folder: Path
    content: Mapping[str, Any] = field(repr=False)

    @property
    def pipeline(self) -> Mapping[str, Any]:
        """What was measured of the whole pipeline, and ``stages``."""
        pipeline: Mapping[str, Any] = self.content["pipeline"]
        return pipeline

    @property
    def stages(self) -> list[StageReport]:
        """What was measured of each stage."""
        return [StageReport(**stage) for stage in self.pipeline["stages"]]

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """What would have made its steps shorter."""
        if (stored := self.content.get("diagnosis")) is None:
            return None
        findings = [Finding(**{name: one[name] for name in one if name != "text"}) for one in stored["findings"]]
        return Diagnosis(findings, stored["num_steps"], stored["step_ms"], stored["simulated_ms"])

    @cached_property
    def timeline(self) -> Timeline:
        """Its last step."""
        ranks = tuple(
            tuple(ActionTimes(Action.parse(name), *moments) for name, *moments in of_rank)
            for of_rank in self.content["timeline"]
        )
        pipeline = self.pipeline
        schedule = Schedule(
            pipeline["schedule"],
            Placement(len(ranks), tuple(pipeline["rank_of_stage"])),
            pipeline["num_microbatches"],
            tuple(tuple(moment.action for moment in of_rank) for of_rank in ranks),
        )
        return Timeline(schedule, ranks)


def write_run_file(
    folder: Path, report: PipelineReport, metrics: Mapping[str, float], config: Mapping[str, Any]
) -> Path:
    """Writes the file of a run, whole or not at all; returns where it lies.

    Args:
        folder: Of the run.
        report: What was measured.
        metrics: Lightning's ``callback_metrics`` at the end.
        config: As it was composed, without secrets.
    """
    timeline, diagnosis = report.timeline, report.diagnosis
    content = {
        "format": _FORMAT,
        "folder": str(folder.absolute()),
        "config": config,
        "metrics": dict(metrics),
        "pipeline": {
            "schedule": timeline.schedule.name,
            "num_microbatches": timeline.schedule.num_microbatches,
            "rank_of_stage": list(timeline.schedule.placement.rank_of_stage),
            **{name: getattr(report, name) for name in _NUMBERS},
            "stages": [vars(stage) for stage in report.stages],
        },
        "diagnosis": None
        if diagnosis is None
        else {
            "num_steps": diagnosis.num_steps,
            "step_ms": diagnosis.step_ms,
            "simulated_ms": diagnosis.simulated_ms,
            "findings": [finding.to_dict() for finding in diagnosis.findings],
        },
        "timeline": [
            [
                [
                    str(moment.action),
                    *(round(ms, 4) for ms in (moment.asked_ms, moment.start_ms, moment.end_ms, moment.early_ms)),
                ]
                for moment in of_rank
            ]
            for of_rank in timeline.ranks
        ],
    }
    target = folder / FILE_NAME
    partial = target.with_name(f"{FILE_NAME}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(content, default=str) + "\n", encoding="utf-8")
    partial.replace(target)
    return target


def read_run_file(path: str | os.PathLike[str]) -> RunFile:
    """Reads the file of a run.

    Args:
        path: The folder of the run, or the file.

    Raises:
        UserError: There is none, or it is another one; the message says where there are some.
    """
    given = Path(path)
    file = given / FILE_NAME if given.is_dir() else given
    if not given.exists():
        raise UserError(f"{path} does not exist (looked from {Path.cwd()}). Name the output folder of a run.")
    if not file.is_file():
        raise UserError(f"{path} has no {FILE_NAME}, which a training writes when it ends.{_others_below(given)}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        is_ours = content["format"] == _FORMAT
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
        is_ours = False
    if not is_ours:
        raise UserError(f"{file} is not the report of a run: its format is not {_FORMAT!r}.")
    return RunFile(file.parent, content)


def _others_below(folder: Path) -> str:
    found = sorted(file.parent for file in folder.rglob(FILE_NAME))
    if not found:
        return " The callback PipelineMonitor measures what the file holds. It is one of callbacks=default."
    return f" These folders below it have one: {', '.join(map(str, found[-5:]))}."
