"""Each distinct unit of a model alone: measured, or run once before a pipeline begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from lightning_pp.planning.schedules.given_costs import GivenCosts
from lightning_pp.planning.stage_model import RecordedModel
from lightning_pp.planning.unit_times.alone import UnitsAlone
from lightning_pp.planning.unit_times.distinct import Group, groups_alike
from lightning_pp.schedule import StageCosts
from lightning_pp.split.cut.unit_costs import UnitCost, estimate_unit_costs

_MOST_RUNS = 9
_TIMES = "forward", "backward_input", "backward_weight"
_log = logging.getLogger(__name__)


@dataclass
class UnitTimes:
    """Measures units, and keeps the results.

    Args:
        step: Runs the user's step on the microbatch that was recorded.
        device: Where units run.
        most_seconds: How long it may take altogether; each distinct unit runs once in any case.
        tell: Called with what is being measured.

    Attributes:
        costs: Milliseconds of F, I and W of each unit that was measured, or is like one that was.
        fewest_runs: The fewest times that one of them was measured.
        seconds: How long it took.
    """

    step: Callable[[Any], Any]
    device: torch.device
    most_seconds: float
    tell: Callable[[str], None] = lambda text: None
    costs: dict[str, UnitCost] = field(default_factory=dict)
    fewest_runs: int = _MOST_RUNS
    seconds: float = 0.0
    _known: dict[Hashable, UnitCost] = field(default_factory=dict)

    @property
    def num_measured(self) -> int:
        """Distinct units, or groups of them that have to share a stage, that ran."""
        return len(self._known)

    @property
    def about(self) -> str:
        """What was measured, for people."""
        runs = f"at least {self.fewest_runs} run{'s' if self.fewest_runs > 1 else ''} each"
        return (
            f"{self.num_measured} distinct units of {len(self.costs)}, each alone on {self.device}, {runs}, in "
            f"{self.seconds:.1f} s"
        )

    def of(self, recording: RecordedModel) -> GivenCosts:
        """The costs of the units of ``recording``, and of the same model with its head whole, as if each were a stage.

        Raises:
            SplitError: As :meth:`~lightning_pp.runtime.stage.StageRunner.forward` says.
        """
        for one in (recording, recording.whole):
            if one is not None:
                self._measure(one)
        return self.given()

    def given(self) -> GivenCosts:
        """All that was measured so far, as if each unit were a stage."""
        stages = StageCosts(*([getattr(cost, name) for cost in self.costs.values()] for name in _TIMES))
        return GivenCosts(
            stages, origin="the times of units alone", units=[[unit] for unit in self.costs], are_alone=True
        )

    def _measure(self, recording: RecordedModel) -> None:
        alike = groups_alike(recording)
        waiting = [work for work in alike if work not in self._known]
        for index, work in enumerate(waiting):
            left = max(self.most_seconds - self.seconds, 0.0)
            # not the first, before which a step may do what it does once for all of them
            group = alike[work][len(alike[work]) // 2]
            self.tell(f"measuring {group.units[0]}, {index + 1} of {len(waiting)} distinct units")
            started = time.perf_counter()
            self._known[work] = self._measure_group(recording, group, left / (len(waiting) - index))
            self.seconds += time.perf_counter() - started
        estimates = estimate_unit_costs(recording.record, recording.num_parameters)
        for work, groups in alike.items():
            for group in groups:
                shares = _shared(self._known[work], {unit: estimates[unit] for unit in group.units})
                self.costs.update({unit: cost for unit, cost in shares.items() if unit not in self.costs})

    def _measure_group(self, recording: RecordedModel, group: Group, most_seconds: float) -> UnitCost:
        """The medians of several runs, after one to warm up; that one alone where it takes all the time there is."""
        alone = UnitsAlone(recording, group, self.step, self.device)
        with alone.ready():
            ends_at = time.perf_counter() + most_seconds
            found = [alone.run()]
            while len(found) <= _MOST_RUNS and time.perf_counter() < ends_at:
                found.append(alone.run())
        measured = found[1:] or found
        self.fewest_runs = min(self.fewest_runs, len(measured))
        return UnitCost(*(median(getattr(cost, name) for cost in measured) for name in _TIMES))


def run_each_once(
    recording: RecordedModel, units: Collection[str], step: Callable[[Any], Any], device: torch.device
) -> None:
    """Runs F, I and W of each distinct one of ``units`` once, on zeros, so that kernels are loaded and tuned.

    A device waits for all of its work when it loads a kernel for the first time. In a pipeline it would then also wait
    for posted receives. A unit that cannot run on zeros is left for the pipeline, and logged as debug.
    """
    for groups in groups_alike(recording).values():
        group = next((group for group in groups if group.units[0] in units), None)
        if group is None:
            continue
        alone = UnitsAlone(recording, group, step, device, zeros=True)
        try:
            with alone.ready():
                alone.run()
        except Exception as error:
            _log.debug("%s did not run alone on zeros: %s: %s", ", ".join(group.units), type(error).__name__, error)


def _shared(cost: UnitCost, estimates: dict[str, UnitCost]) -> dict[str, UnitCost]:
    """What units of a group cost that took ``cost`` together, by the shares that are estimated for them."""
    if len(estimates) == 1:
        return dict.fromkeys(estimates, cost)
    whole = sum(estimate.total for estimate in estimates.values())
    shares = {unit: estimate.total / whole if whole else 1 / len(estimates) for unit, estimate in estimates.items()}
    return {unit: cost.scaled(share) for unit, share in shares.items()}
