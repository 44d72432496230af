"""The values sent between stages: few bytes from which every stage can compute what it needs.

A stage may receive outputs of units, or results of the code between units (``h + attention(h)``). The results are
computed by the stage that makes the last output which they depend on; it goes on with the user's step for them, to the
next unit call at the most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_pp.split.record.step_record import Reads, StepRecord, Value


@dataclass(frozen=True)
class Crossing:
    """The values that cross.

    Attributes:
        received: For each stage, what it receives.
        sources: For each value that crosses, the stage that makes it.
        gradients: ``(value, stage)`` where that stage computes a gradient for what it receives.
    """

    received: Sequence[Collection[Value]]
    sources: Mapping[Value, int]
    gradients: Collection[tuple[Value, int]]

    def num_bytes(self, record: StepRecord) -> int:
        """Bytes of what crosses, forward and back."""
        return sum(_cost(record, value) for values in self.received for value in values)


def find_crossing(record: StepRecord, stage_of_call: Sequence[int], num_stages: int) -> Crossing:
    """What crosses between the stages of a step, given the stage of each unit call."""
    of_units = _outputs_of_units(record, stage_of_call, num_stages)
    if not any(of_units.received) or not _has_operations(record):
        return of_units
    found = _LeastCrossing(record, stage_of_call, num_stages).found()
    if found is None or found.num_bytes(record) >= of_units.num_bytes(record):
        return of_units
    return found


def _has_operations(record: StepRecord) -> bool:
    """Whether results of the code between units may cross.

    Not where a stage that computes them, and another that receives them, could differ in anything else: in what they
    draw, or in what they write.
    """
    num_calls = len(record.calls)
    return (
        any(operation.can_cross and operation.place.num_calls < num_calls for operation in record.operations.values())
        and not any(index < num_calls - 1 for index in record.inter_unit_draws.after)
        and not record.updates
        and not record.edits_batch
        and record.failure is None
        and not record.outputs_cross_alone
    )


def _cost(record: StepRecord, value: Value) -> int:
    leaf = record.leaf(value)
    return record.spec(value).num_bytes * (2 if leaf.requires_grad else 1)


def _outputs_of_units(record: StepRecord, stage_of_call: Sequence[int], num_stages: int) -> Crossing:
    """What crosses if each stage gets all outputs of units that anything there depends on."""
    # code between calls runs for real on the stages of the calls that need its results; the tail on the last stage
    received: list[set[Value]] = [set() for _ in range(num_stages)]
    for reads, stage in _readers(record, stage_of_call, num_stages):
        received[stage] |= {value for value in reads.values if stage_of_call[value.call] != stage}
    sources = {value: stage_of_call[value.call] for values in received for value in values}
    gradients = _gradients(record.gradient_sources, received, lambda value: stage_of_call[value.call])
    return Crossing(received, sources, gradients)


def _readers(record: StepRecord, stage_of_call: Sequence[int], num_stages: int) -> Iterable[tuple[Reads, int]]:
    yield from ((call.reads, stage_of_call[call.index]) for call in record.calls)
    yield record.tail, num_stages - 1


class _LeastCrossing:
    """The search for a crossing of few bytes, from the last stage to the first."""

    def __init__(self, record: StepRecord, stage_of_call: Sequence[int], num_stages: int) -> None:
        self._record = record
        self._stage_of_call = stage_of_call
        self._num_stages = num_stages
        self._stages: dict[int, int] = {}  # of operations, by number
        for number, operation in record.operations.items():  # in the order in which they ran
            self._stages[number] = max(map(self._stage_of, operation.reads))
        self._last_call = [-1] * num_stages
        # parameters that a stage has for use outside of units
        self._parameters: list[set[str]] = [set() for _ in range(num_stages)]
        for call, stage in zip(record.calls, stage_of_call, strict=True):
            self._last_call[stage] = max(self._last_call[stage], call.index)
            self._parameters[stage] |= call.reads.parameters.keys()

    def found(self) -> Crossing | None:
        """The crossing; None if a gradient would have to go to another stage than the value's source."""
        needed: list[set[Value]] = [set() for _ in range(self._num_stages)]
        for reads, stage in _readers(self._record, self._stage_of_call, self._num_stages):
            needed[stage] |= reads.nearest
        received: list[set[Value]] = [set() for _ in range(self._num_stages)]
        for stage in reversed(range(self._num_stages)):
            received[stage] = self._least_for(stage, needed[stage])
            for value in received[stage]:
                if not value.made_by_unit:  # who sends it computes it
                    needed[self._stage_of(value)].add(value)
        gradients = _gradients(self._record.nearest_gradients, received, self._stage_of)
        if any(value not in received[stage] for value, stage in gradients):
            return None
        sources = {value: self._stage_of(value) for values in received for value in values}
        return Crossing(received, sources, gradients)

    def _stage_of(self, value: Value) -> int:
        """The stage that makes it: of an operation, that of the last unit output that it depends on."""
        if value.made_by_unit:
            return self._stage_of_call[value.call]
        return self._stages[value.leaf]

    def _least_for(self, stage: int, needed: Collection[Value]) -> set[Value]:
        """For each needed value: itself, or the values that it is computed from, whichever has fewer bytes."""
        operations = self._record.operations
        values: set[Value] = set()
        waiting = list(needed)
        while waiting:
            value = waiting.pop()
            if value not in values:
                values.add(value)
                waiting += () if value.made_by_unit else operations[value.leaf].reads
        least: dict[Value, set[Value]] = {}
        for value in sorted(values, key=lambda value: -1 if value.made_by_unit else value.leaf):  # as they were made
            if value.made_by_unit:
                least[value] = {value} if self._stage_of(value) != stage else set()
                continue
            parts = set().union(*(least[read] for read in operations[value.leaf].reads))
            is_less = _cost(self._record, value) < sum(_cost(self._record, part) for part in parts)
            least[value] = {value} if is_less and self._can_receive(stage, value) else parts
        return set().union(*(least[value] for value in needed))

    def _can_receive(self, stage: int, value: Value) -> bool:
        """Whether ``stage`` can receive that result of an operation between units."""
        operation, source = self._record.operations[value.leaf], self._stage_of(value)
        return (
            source < stage
            and operation.can_cross
            and operation.place.num_calls <= self._last_call[source] + 1
            and operation.place.num_calls < len(self._record.calls)
            and operation.parameters <= self._parameters[source]
        )


def _gradients(
    sources: Mapping[Value | None, Collection[Value]],
    received: Sequence[Collection[Value]],
    stage_of: Callable[[Value], int],
) -> set[tuple[Value, int]]:
    """``(value, stage)`` where that stage computes a gradient for what another stage makes.

    Args:
        sources: For each value and for the loss (``None``), the nearest values that it depends on differentiably.
        received: For each stage, what it receives.
        stage_of: The stage that makes a value.
    """
    returns: set[tuple[Value, int]] = set()
    start: tuple[Value | None, int] = (None, len(received) - 1)
    seen, waiting = {start}, [start]
    while waiting:
        consumer, stage = waiting.pop()
        for value in sources.get(consumer, ()):
            place = stage
            if value in received[stage] or (value.made_by_unit and stage_of(value) != stage):
                returns.add((value, stage))
                place = stage_of(value)
            if (value, place) not in seen:
                seen.add((value, place))
                waiting.append((value, place))
    return returns
