"""Finds the few changes that are worth reporting, from measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pp.telemetry.diagnosis.balance import balance_finding
from lightning_pp.telemetry.diagnosis.bubbles import microbatch_finding, schedule_finding
from lightning_pp.telemetry.diagnosis.evidence import Evidence
from lightning_pp.telemetry.diagnosis.finding import Finding
from lightning_pp.telemetry.diagnosis.waits import data_finding, link_finding
from lightning_pp.telemetry.diagnosis.weights import weight_finding

WORTH_TELLING = 0.03
"""Share of a step; smaller gains are within the accuracy of measurements."""
MOST_FINDINGS = 5
MOST_DIFFERENCE = 0.15
"""Between the measured step and the sum of its measured parts; above it, no finding is reported."""

# those that name a cause come before those that name a cure
_LOOK_FOR = (
    balance_finding,
    data_finding,
    link_finding,
    microbatch_finding,
    schedule_finding,
    weight_finding,
)


@dataclass(frozen=True)
class Diagnosis:
    """The result of a diagnosis of some steps.

    Attributes:
        findings: What is worth changing, the biggest gain first.
        num_steps: Steps that it is from.
        step_ms: Measured, milliseconds.
        simulated_ms: Simulated from its measured parts.
    """

    findings: Sequence[Finding]
    num_steps: int
    step_ms: float
    simulated_ms: float

    @property
    def is_explained(self) -> bool:
        """Whether the measured parts of a step add up to the measured step."""
        return abs(self.simulated_ms - self.step_ms) <= MOST_DIFFERENCE * self.step_ms

    @property
    def text(self) -> str:
        """All findings, a line each, or why there is none."""
        measured = f"{self.num_steps} measured steps of {self.step_ms:.1f} ms on average"
        if not self.is_explained:
            return (
                f"Diagnosis of {measured}: their measured parts add up to {self.simulated_ms:.1f} ms, so the simulator "
                "cannot tell what a change would save."
            )
        if not self.findings:
            return f"Diagnosis of {measured}: no simulated change saves {WORTH_TELLING:.0%}."
        lines = [f"  {number}. {finding.text}" for number, finding in enumerate(self.findings, 1)]
        return "\n".join([f"Diagnosis of {measured}; each gain is simulated for one change alone:", *lines])


def diagnose(evidence: Evidence, num_steps: int = 1) -> Diagnosis:
    """Looks for everything that may hold a step up.

    Nothing is reported if the simulator, given a step's measured parts, does not arrive at the measured step: it could
    not tell then what a change would bring. Of findings with the same override the one with a cause is reported.

    Args:
        evidence: What was measured.
        num_steps: Steps that it is from.
    """
    diagnosis = Diagnosis([], num_steps, evidence.step_ms, evidence.model.step_ms)
    if not diagnosis.is_explained:
        return diagnosis
    reported: list[Finding] = []
    for look in _LOOK_FOR:
        finding = look(evidence)
        if finding is None or finding.gain_fraction < WORTH_TELLING:
            continue
        if not finding.override or finding.override not in [other.override for other in reported]:
            reported.append(finding)
    return replace(diagnosis, findings=sorted(reported, key=lambda finding: -finding.gain_ms)[:MOST_FINDINGS])
