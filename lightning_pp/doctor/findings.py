"""Plain data of the doctor: checks and findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from lightning_pp.rank_processes import Outcome


class Status(str, Enum):
    """The status of a finding; the worst comes last."""

    NOT_APPLICABLE = "not applicable"
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Attributes:
        status: How it stands.
        found: What was found, with its numbers.
        advice: What to do; empty where there is nothing to do.
        details: More of it, for the JSON file.
    """

    status: Status
    found: str
    advice: str = ""
    details: Any = None


@dataclass(frozen=True)
class Rank:
    """The arguments of a check on each rank.

    Attributes:
        rank: Global rank.
        num_ranks: Of the check.
        num_ranks_here: Of them, those on this node.
        device: Where this rank computes.
        is_quick: Whether less is asked for.
        folder: An empty folder that all ranks of the check see.
        note: Tells what is done now, so that a hang can be placed.
    """

    rank: int
    num_ranks: int
    num_ranks_here: int
    device: torch.device
    is_quick: bool
    folder: Path
    note: Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """Something that the doctor looks at, in one process for each rank.

    Attributes:
        name: What ``--only`` takes; several checks may share it, as ways of one.
        way: Which of them this is; empty if there is one.
        shows: What it shows, as a sentence.
        run: Runs on each rank, with ``arguments`` besides; what it returns can be written as JSON.
        judge: Makes findings of what all ranks returned. It is called when every rank has returned, and otherwise the
            ranks that did not are the finding.
        arguments: Of ``run``.
        limit_s: Seconds until its processes are ended.
        fewest_ranks: It is left out with fewer.
        judge_ends: Makes findings of how all processes ended, not ``judge``, where ranks are to fail.
        advice: What to do where ranks raise, die or hang.
    """

    name: str
    shows: str
    run: Callable[..., Any]
    judge: Callable[[Sequence[Any]], list[Finding]] | None = None
    way: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 60.0
    fewest_ranks: int = 2
    judge_ends: Callable[[Sequence[Outcome]], list[Finding]] | None = None
    advice: str = ""

    @property
    def title(self) -> str:
        """Its name, and which way of it."""
        return f"{self.name} ({self.way})" if self.way else self.name

    def findings(self, outcomes: Sequence[Outcome]) -> list[Finding]:
        """What the ends of its processes mean."""
        if self.judge_ends is not None:
            return self.judge_ends(outcomes)
        missing = [outcome for outcome in outcomes if not outcome.has_returned]
        if not missing:
            assert self.judge is not None
            return self.judge([outcome.value for outcome in outcomes])
        # an error of one rank ends the others, so it comes first
        missing.sort(key=lambda outcome: (not outcome.error, outcome.exit_code is None, outcome.seconds))
        found = "; ".join(_shortened(str(outcome)) for outcome in missing[:2])
        if len(missing) > 2:
            found += f"; and {len(missing) - 2} more ranks"
        return [Finding(Status.FAILURE, f"{found[0].upper()}{found[1:].rstrip('.')}.", self.advice)]


@dataclass(frozen=True)
class Row:
    """A finding with its check.

    Attributes:
        check: Title of the check.
        shows: What it shows.
        finding: The finding.
        seconds: That the check took.
        outcomes: How its processes ended.
    """

    check: str
    shows: str
    finding: Finding
    seconds: float
    outcomes: tuple[Outcome, ...] = ()


def _shortened(text: str, most: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]} ..."
