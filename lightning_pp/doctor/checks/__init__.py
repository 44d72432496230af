"""What the doctor looks at: one file for each group of checks."""

from __future__ import annotations

from lightning_pp.doctor.checks import channels, environment, failures, parity, receives
from lightning_pp.doctor.findings import Check


def all_checks() -> list[Check]:
    """In the order in which they run."""
    return [*environment.CHECKS, *channels.CHECKS, *receives.CHECKS, *parity.CHECKS, *failures.CHECKS]
