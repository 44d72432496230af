"""Cuts that send much more than the unit before them returns, because of how the model is written."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pp.split.record.plan import Edge, StepPlan
from lightning_pp.split.record.step_record import Value

WIDE = 2.0
"""How many times the bytes of the unit before it a cut may send without being called wide."""

_MOST_LINES = 3


@dataclass(frozen=True)
class WideCut:
    """A cut that sends much more than one activation.

    Attributes:
        unit: The unit after the cut, the first of its stage.
        before: The unit before it.
        crossing_bytes: Bytes of all tensors that are made before the cut and read behind it, forward, for one
            microbatch.
        output_bytes: Bytes of what ``before`` returns.
        num_tensors: How many tensors cross.
        lines: User's lines that read them behind the cut, the first few.
    """

    unit: str
    before: str
    crossing_bytes: int
    output_bytes: int
    num_tensors: int
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"the cut between {self.before!r} and {self.unit!r} sends {self.num_tensors} tensors for each microbatch, "
            f"{self.crossing_bytes / 1024:,.0f} KiB in all and {self.crossing_bytes / self.output_bytes:.1f} times "
            f"what {self.before!r} returns (read at {', '.join(self.lines)})"
        )


ADVICE = (
    "A cut sends outputs of units, or a smaller result that the code between units computes from them, such as a sum. "
    "It sends the outputs themselves if that code draws random numbers (dropout), writes in place or puts hooks on "
    "gradients, or if they are used again much later. With units= name a module that holds such code, or cut elsewhere "
    "with split_points=."
)


def wide_cuts(plan: StepPlan) -> list[WideCut]:
    """The cuts of ``plan`` that send more than :data:`WIDE` times what the unit before them returns, in order."""
    record = plan.record
    stage_of_call = {call: stage.stage for stage in plan.stages for call in stage.owned_calls}
    found = []
    for cut in range(1, len(plan.stages)):
        behind = [call for call in record.calls if stage_of_call[call.index] >= cut]
        ahead = [call for call in record.calls if stage_of_call[call.index] < cut]
        if not behind or not ahead:
            continue
        edges: dict[Value, Edge] = {edge.value: edge for edge in plan.edges if edge.source < cut <= edge.target}
        crossing_bytes = sum(edge.spec.num_bytes for edge in edges.values())
        output_bytes = sum(
            leaf.spec.num_bytes for leaf in ahead[-1].leaves if leaf.spec is not None and leaf.requires_grad
        )
        if not output_bytes or crossing_bytes <= WIDE * output_bytes:
            continue
        made_of = {
            origin
            for value in edges
            for origin in ((value,) if value.made_by_unit else record.operations[value.leaf].origins)
        }
        lines = dict.fromkeys(call.line for call in behind if not made_of.isdisjoint(call.reads.values))
        sizes = crossing_bytes, output_bytes, len(edges)
        shown_lines = tuple(lines)[:_MOST_LINES] or ("the end of the step",)
        found.append(WideCut(behind[0].unit, ahead[-1].unit, *sizes, shown_lines))
    return found
