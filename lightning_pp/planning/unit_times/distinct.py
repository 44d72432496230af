"""Groups of units that do the same work, so that one group is measured for all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from lightning_pp.planning.alike_units import kind_of
from lightning_pp.planning.stage_model import RecordedModel
from lightning_pp.split.cut.partition import inseparable_groups
from lightning_pp.split.record.step_record import Reads, UnitCall


@dataclass(frozen=True)
class Group:
    """Units that must share a stage, often a single one.

    Attributes:
        units: Their names, in call order.
        index: The place of the group in the order of the step.
        is_last: Whether the end of the step follows.
    """

    units: tuple[str, ...]
    index: int
    is_last: bool


def groups_alike(recording: RecordedModel) -> dict[Hashable, list[Group]]:
    """The groups of units, those that do the same work together, by what tells them from others.

    They do if their units are of the same classes, with parameters of the same shapes and dtypes, and if the dry run
    saw the same operations on tensors of the same shapes and dtypes in them and in the code before them. What is no
    operation on tensors (sleep, files) is not seen.
    """
    found = inseparable_groups(recording.record)
    alike: dict[Hashable, list[Group]] = {}
    for index, units in enumerate(found):
        group = Group(tuple(units), index, index == len(found) - 1)
        alike.setdefault(_work_of(recording, group), []).append(group)
    return alike


def calls_of(recording: RecordedModel, units: Sequence[str]) -> list[UnitCall]:
    """The calls of some units."""
    return [call for call in recording.record.calls if call.unit in units]


def _work_of(recording: RecordedModel, group: Group) -> Hashable:
    record, fakes = recording.record, recording.fake_parameters
    calls = tuple(
        (
            kind_of(call, recording.units[call.unit], fakes.names),
            _work_of_code(call.reads),
            len(call.reads.nearest),
            call.unit in record.recomputed_units,
        )
        for call in calls_of(recording, group.units)
    )
    return calls, fakes.compute_dtype, _work_of_code(record.tail) if group.is_last else None


def _work_of_code(reads: Reads) -> Hashable:
    return frozenset(reads.work.items())
