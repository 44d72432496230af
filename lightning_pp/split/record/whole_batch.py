"""The plan of each stage if the code after the last unit runs once, on the whole batch (``whole_batch_loss``).

A microbatch ends on the last stage with its last unit, and the values that the code after it needs are kept there. When
all microbatches have come, they are joined, and the user's step runs once more, on the uncut batch: every unit stands
in, those whose values the end needs with the joined ones, so that the code after the last unit (the *tail*) runs for
real. A unit on the last stage whose output has no part for each microbatch (a loss module with parameters returns one
number) runs in the tail too, on joined inputs, and so does every unit after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_pp.errors import SplitError
from lightning_pp.split.record.plan import Edge, StagePlan, StepPlan, build_plan
from lightning_pp.split.record.step_record import StepRecord, UnitCall, Value


@dataclass(frozen=True)
class Join:
    """How the microbatches' parts of a value are joined for the whole batch.

    Attributes:
        dim: The dimension along which they follow each other; None if there is only one part.
        rows_per_sample: Entries along ``dim`` for each sample.
    """

    dim: int | None
    rows_per_sample: int = 1


@dataclass
class RowOrders:
    """The order of a batch's rows, if there are several for each sample; found in the first such batch.

    Attributes:
        is_seen: Whether a batch has been inspected.
        by_sample: Rows for each sample, to whether those of one sample stand together. Otherwise the first rows of all
            samples come first, then the second ones, as in ``torch.cat([view_1, view_2])``.
    """

    is_seen: bool = False
    by_sample: dict[int, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class WholeBatchPlan:
    """The stages' plan for one batch.

    Attributes:
        parts: The plan of each microbatch, which ends on the last stage before the tail.
        tail: The plan of the run on the whole batch; only its last stage counts.
        joins: For each value that the tail gets, how its parts are joined.
        num_samples: Samples of each microbatch.
        first_late: Index of the first unit call that runs in the tail; the number of calls if none does.
        orders: The order of rows.
    """

    parts: tuple[StepPlan, ...]
    tail: StepPlan
    joins: dict[Value, Join]
    num_samples: tuple[int, ...]
    first_late: int
    orders: RowOrders = field(default_factory=RowOrders)

    @property
    def draws_early(self) -> bool:
        """Whether code before the tail draws random numbers, other ones for each microbatch than for the batch."""
        draws = self.tail.record.inter_unit_draws
        return len(self.parts) > 1 and any(index < self.first_late - 1 for index in draws.after)


def plan_whole_batch(whole: StepPlan, parts: Sequence[StepPlan], num_samples: Sequence[int]) -> WholeBatchPlan:
    """Finds what is kept of each microbatch, how it is joined, and what runs in the tail.

    ``whole`` is the plan of a step on the whole batch, ``parts`` are those of its microbatches of ``num_samples``.

    Raises:
        SplitError: The step calls other units for the whole batch than for its microbatches, the tail needs a value of
            an earlier stage that cannot be joined or random numbers that were drawn before it.
    """
    record = whole.record
    _check_same_calls(record, parts)
    stage_of_call = {index: plan.stage for plan in whole.stages for index in plan.owned_calls}
    last_stage = len(whole.stages) - 1
    first_late, joins = _first_late_call(record, parts, num_samples, stage_of_call, last_stage)
    if len(parts) > 1:
        _check_draws(record, first_late)
    keeps = frozenset(joins)
    plans: dict[int, StepPlan] = {}
    for part in parts:
        if id(part) not in plans:
            plans[id(part)] = _ending_before(part, record, first_late, keeps)
    receives = tuple(
        Edge(value, stage_of_call[value.call], last_stage, record.spec(value), record.leaf(value).requires_grad)
        for value in sorted(joins)
    )
    late = frozenset(range(first_late, len(record.calls)))
    tail = replace(
        whole, stages=(*whole.stages[:-1], StagePlan(last_stage, late, None, receives, ())), edges=whole.edges
    )
    return WholeBatchPlan(tuple(plans[id(part)] for part in parts), tail, joins, tuple(num_samples), first_late)


def find_join(parts: Sequence[tuple[int, ...]], whole: tuple[int, ...], num_samples: Sequence[int]) -> Join | None:
    """How tensors of the shapes ``parts`` become one of shape ``whole``; None if they cannot.

    Their sizes must add up along one dimension, with equally many entries for each sample, and be the same along all
    others.
    """
    if len(parts) == 1:
        return Join(None) if parts[0] == whole else None
    if any(len(part) != len(whole) for part in parts):
        return None
    for dim, size in enumerate(whole):
        rest = (*whole[:dim], *whole[dim + 1 :])
        if sum(part[dim] for part in parts) != size or any((*part[:dim], *part[dim + 1 :]) != rest for part in parts):
            continue
        rows = size // sum(num_samples)
        if rows > 0 and all(part[dim] == rows * number for part, number in zip(parts, num_samples, strict=True)):
            return Join(dim, rows)
    return None


def _first_late_call(
    record: StepRecord,
    parts: Sequence[StepPlan],
    num_samples: Sequence[int],
    stage_of_call: dict[int, int],
    last_stage: int,
) -> tuple[int, dict[Value, Join]]:
    """The first unit call of the tail, and how the values are joined that it gets from before."""
    first_late = min(record.early_reads, default=len(record.calls))
    while True:
        joins: dict[Value, Join] = {}
        unjoined: list[Value] = []
        tellable = _rows_with_known_order(record, parts, num_samples, first_late)
        for value in sorted(_needed(record, first_late)):
            shapes = [part.record.spec(value).shape for part in parts]
            join = find_join(shapes, record.spec(value).shape, num_samples)
            if join is None or (join.rows_per_sample > 1 and join.rows_per_sample not in tellable):
                unjoined.append(value)
            else:
                joins[value] = join
        if not unjoined:
            return first_late, joins
        first_late = unjoined[0].call
        for index in range(first_late, len(record.calls)):
            if stage_of_call[index] != last_stage:
                raise _cannot_join(unjoined[0], record, parts, stage_of_call[first_late], last_stage)


def _needed(record: StepRecord, first_late: int) -> set[Value]:
    """What the tail needs of calls before it."""
    values = set(record.tail.values)
    for call in record.calls[first_late:]:
        values |= call.reads.values
    return {value for value in values if value.call < first_late}


def _rows_with_known_order(
    record: StepRecord, parts: Sequence[StepPlan], num_samples: Sequence[int], first_late: int
) -> set[int]:
    """Numbers of rows for each sample for which an input of a unit, of the batch alone, can show their order."""
    found: set[int] = set()
    for call in record.calls[:first_late]:
        for place in batch_only_places(call):
            shape = call.shapes[place]
            shapes = [part.record.calls[call.index].shapes[place] for part in parts]
            if shape is not None and all(other is not None for other in shapes):
                join = find_join([other for other in shapes if other is not None], shape, num_samples)
                if join is not None:
                    found.add(join.rows_per_sample)
    return found


def batch_only_places(call: UnitCall) -> list[int]:
    """The leaves of the call's arguments that are tensors and depend on no weights."""
    return [place for place, shape in enumerate(call.shapes) if shape is not None and place not in call.activations]


def _ending_before(part: StepPlan, whole: StepRecord, first_late: int, keeps: frozenset[Value]) -> StepPlan:
    """The plan of a microbatch that ends on the last stage before the tail."""
    stage_of_unit = {part.record.calls[index].unit: plan.stage for plan in part.stages for index in plan.owned_calls}
    # the end may do other things with a few samples than with all of them: what it needs is what it needs of the batch
    record = replace(
        part.record,
        tail=whole.tail,
        gradient_sources={**part.record.gradient_sources, **whole.gradient_sources},
        outputs_cross_alone=True,  # what is kept for the end is outputs of units
    )
    plan = build_plan(record, stage_of_unit, len(part.stages))
    last = plan.stages[-1]
    owned = frozenset(index for index in last.owned_calls if index < first_late)
    ending = replace(last, owned_calls=owned, last_call=max(owned, default=-1), keeps=keeps)
    return replace(plan, stages=(*plan.stages[:-1], ending))


def _check_same_calls(record: StepRecord, parts: Sequence[StepPlan]) -> None:
    calls = [(call.unit, len(call.leaves), len(call.left)) for call in record.calls]
    for part in parts:
        others = [(call.unit, len(call.leaves), len(call.left)) for call in part.record.calls]
        if calls != others:
            place = next(
                (n for n, pair in enumerate(zip(calls, others, strict=False)) if pair[0] != pair[1]),
                min(len(calls), len(others)),
            )
            now, then = (repr(found[place][0]) if place < len(found) else "the end" for found in (calls, others))
            raise SplitError(
                f"At unit call {place} the step reaches {now} for the whole batch, but {then} for one of its "
                "microbatches. With whole_batch_loss=True it must call the same units for both. Do not let the number "
                "of samples decide which units are called, or make the choice inside a unit."
            )


def _check_draws(record: StepRecord, first_late: int) -> None:
    """The tail must not use what code before it draws: that is drawn for each microbatch, and again for the batch."""
    early = [index for index in record.inter_unit_draws.after if index < first_late - 1]
    used = [line for (drawn, use), line in record.drawn_uses.items() if drawn < first_late <= use]
    if not used and not (early and record.may_branch_at_random):
        return
    if used:
        where = f"{used[0]} uses random numbers that were drawn before the last unit"
    else:
        index = min(early)
        place = "before its first unit" if index < 0 else f"after the unit {record.calls[index].unit!r}"
        where = f"The step draws random numbers {place}, and Python may read them"
    raise SplitError(
        f"{where}. With whole_batch_loss=True the code between units runs for each microbatch, and the code after the "
        "last unit once for the whole batch, so the two would see different numbers. Draw them in the dataloader "
        "(collate_fn or the dataset), inside a unit that returns them, or after the last unit."
    )


def _cannot_join(
    value: Value, record: StepRecord, parts: Sequence[StepPlan], stage: int, last_stage: int
) -> SplitError:
    call = record.calls[value.call]
    shapes = list(dict.fromkeys(part.record.spec(value).shape for part in parts))
    where = (
        f"The unit runs on stage {stage} of {last_stage + 1}"
        if stage != last_stage
        else "A later unit runs on an earlier stage"
    )
    return SplitError(
        f"The code after the last unit needs an output of the unit {call.unit!r} ({call.line}). Its shape is "
        f"{' or '.join(map(str, shapes))} for a microbatch and {record.spec(value).shape} for the whole batch. With "
        "whole_batch_loss=True outputs of microbatches are joined along the samples, but these shapes do not show "
        f"that dimension. {where}, so the unit cannot wait for the whole batch either. Return one value per sample "
        "from the unit and take the mean after the last unit, keep a dimension for the samples alone, or use "
        "split_points to put the unit on the last stage: there it runs once, on the whole batch."
    )
