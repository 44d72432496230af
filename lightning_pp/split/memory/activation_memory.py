"""Memory of microbatches: saved tensors from F to I, tensors of deferred weight gradients to W, and messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_pp.schedule import Placement
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.split.record.step_record import StepRecord, UnitCall


@dataclass(frozen=True)
class Activations:
    """What one microbatch holds on one stage, in bytes.

    Attributes:
        after_forward: From F to I.
        after_input: From I to W.
        offloadable: Of ``after_forward``, what may wait on the host: all but what was received.
        recomputed: What the largest unit that runs again saves while it does.
    """

    after_forward: int
    after_input: int
    offloadable: int
    recomputed: int

    @classmethod
    def of(cls, plan: StepPlan, stage: int, checkpointed: Collection[str]) -> Activations:
        """On ``stage`` of ``plan``, where the units ``checkpointed`` run again in I."""
        record = plan.record
        saved: dict[int, int] = {}
        queued: dict[int, int] = {}
        gradients = recomputed = 0
        regions: set[int | None] = set()
        between_units = [record.calls[index].reads.memory for index in sorted(plan.stages[stage].owned_calls)]
        between_units += [record.tail.memory] if stage == len(plan.stages) - 1 else []
        for memory in between_units + [record.operations[number].memory for number in plan.operations_of(stage)]:
            saved.update(memory.saved)
            queued.update(memory.queued)
            gradients += memory.queued_gradients_bytes
        for index in sorted(plan.stages[stage].owned_calls):
            call = record.calls[index]
            queued.update(call.memory.queued)
            gradients += call.memory.queued_gradients_bytes
            saved.update(_kept_of(call, checkpointed, regions))
            if call.unit in checkpointed or call.region is not None:
                held = call.given.keys() | (call.memory.saved_by_policy if call.unit in checkpointed else {}).keys()
                own = (num_bytes for memory, num_bytes in call.memory.saved.items() if memory not in held)
                recomputed = max(recomputed, sum(own))
        received: dict[int, int] = {}
        for edge in plan.stages[stage].receives:
            memory_of_value = record.leaf(edge.value).memory
            if edge.has_gradient and memory_of_value is not None:
                received[memory_of_value] = edge.spec.num_bytes
        total = sum({**saved, **received}.values())
        return cls(total, sum(queued.values()) + gradients, total - sum(received.values()), recomputed)


def _kept_of(call: UnitCall, checkpointed: Collection[str], regions: set[int | None]) -> dict[int, int]:
    """The storages of a call kept from F to I: number to bytes.

    What runs again keeps what it is given, a checkpointed region what its first unit is given; it is added to
    ``regions``, those that have come.
    """
    if not call.memory.saved or (call.unit not in checkpointed and call.region is None):
        return call.memory.saved
    kept = dict(call.given) if call.region is None or call.region not in regions else {}
    regions.add(call.region)
    return {**kept, **call.memory.saved_by_policy} if call.unit in checkpointed else kept


def least_held(record: StepRecord) -> dict[str, int]:
    """Bytes that each unit keeps of one microbatch from F to I, whichever units share its stage.

    What several units keep counts for the first of them only, and what is received from another stage for none. So for
    any units on a stage, the sum is no more than what :meth:`Activations.of` says.
    """
    held: dict[str, int] = {}
    seen: set[int] = set()
    regions: set[int | None] = set()
    for call in record.calls:
        kept = {**call.reads.memory.saved, **_kept_of(call, record.recomputed_units, regions)}
        new = sum(size for memory, size in kept.items() if memory not in seen)
        held[call.unit] = held.get(call.unit, 0) + new
        seen.update(kept)
    return held


def joined_bytes(record: StepRecord) -> int:
    """A microbatch's part of the values that the code after the last unit gets joined, and of their gradients."""
    return sum(record.spec(value).num_bytes * (1 + record.leaf(value).requires_grad) for value in record.tail.values)


def sent_bytes(plan: StepPlan, placement: Placement, stage: int) -> int:
    """A microbatch's values that ``stage`` sends to other ranks. It keeps them until their gradients come back."""
    ranks = placement.rank_of_stage
    sends = (edge for edge in plan.stages[stage].sends if ranks[edge.source] != ranks[edge.target])
    return sum(edge.spec.sent_bytes(plan.record.num_tensor_ranks) for edge in sends if edge.has_gradient)


def message_bytes(plan: StepPlan, placement: Placement, stages: Sequence[int]) -> int:
    """Bytes of two microbatches' messages between ``stages`` of one rank and other ranks, values and gradients."""
    rank_of_stage = placement.rank_of_stage
    return 2 * sum(
        edge.spec.sent_bytes(plan.record.num_tensor_ranks) * (2 if edge.has_gradient else 1)
        for edge in plan.edges
        if rank_of_stage[edge.source] != rank_of_stage[edge.target] and (edge.source in stages or edge.target in stages)
    )
