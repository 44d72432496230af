"""Corrects values of microbatches and replicas to those of the global batch: means, sums, counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.errors import SplitError
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.record.reduction import Kind, Place
from lightning_pp.split.record.step_record import StepRecord
from lightning_pp.split.reductions.counting import Counts, are_equal, need_no_correction, on_host, total_of
from lightning_pp.split.reductions.estimates import estimate_of
from lightning_pp.split.reductions.facts import Facts
from lightning_pp.split.reductions.recording import EarlierRun
from lightning_pp.split.reductions.scaling import Count, Scale, ScaledStep
from lightning_pp.strategy.batch.counting import BatchSteps, StepCounting
from lightning_pp.strategy.results.outputs import loss_of

PER_MICROBATCH = (
    "auxiliary_losses='per_microbatch' on the strategy trains with the auxiliary loss of each microbatch, averaged "
    "over microbatches."
)
_MOST_ROUNDS = 5
RecordAt = Callable[[Microbatch, EarlierRun | None], StepRecord]
"""A dry run of the step on a part of the batch."""


@dataclass(frozen=True)
class TwoSizes:
    """A part of a batch, and the two pieces into which it is cut.

    Attributes:
        whole: The larger.
        parts: The smaller ones.
        is_cut_by_user: Whether the user's function cuts batches; what a sample is made of may then differ in size.
    """

    whole: Microbatch
    parts: Sequence[Microbatch]
    is_cut_by_user: bool = False


@dataclass
class ScaledBatch:
    """One batch's weights and corrections; the last stage uses them, from its first loss on.

    Attributes:
        loss_weights: For each microbatch, its share in the samples of the global batch times the number of replicas,
            times what the caller asked for: the weights whose mean over replicas is the global batch's mean.
        wait_for_replica_counts: Waits for the other replicas, the first time, and sets shares and totals right.
        facts: What is known of the step's calls; None where nothing has to be corrected.
        shares: Share of each microbatch in the samples of the global batch.
        totals: What the global batch counts.
        counts: What each microbatch counts.
        grows: Whether the step makes values that grow with the batch.
        is_training: Whether a sum that nobody has seen before is an error.
        follows_estimates: Whether a loss that does not add up over microbatches is an error.
        allows_auxiliary: Unless that is an auxiliary loss.
    """

    loss_weights: list[float]
    wait_for_replica_counts: Callable[[], None]
    facts: Facts | None = None
    shares: list[float] = field(default_factory=list)
    totals: dict[Place, Count] = field(default_factory=dict)
    counts: list[Counts] = field(default_factory=list)
    grows: bool = False
    is_training: bool = False
    follows_estimates: bool = False
    allows_auxiliary: bool = False

    def step_of(self, microbatch: int) -> ScaledStep | None:
        """What the last stage's step of ``microbatch`` runs within; None for nothing."""
        if self.facts is None:
            return None
        scale = Scale(self.shares[microbatch], self.totals)
        return ScaledStep(self.facts, scale, refuses_unknown=self.is_training, follows_estimates=self.follows_estimates)

    def check_loss(self, output: Any) -> None:
        """Raises :class:`SplitError` if the loss of a step does not add up over microbatches."""
        if not self.follows_estimates:
            return
        estimate = estimate_of(loss_of(output))
        if estimate is None or estimate.bent_by is None or (self.allows_auxiliary and estimate.is_product):
            return
        raise SplitError(
            f"The loss of the step does not add up over microbatches: {estimate.line} calls `{estimate.bent_by}` on a "
            "sum or a mean over samples. "
            f"{f'If this makes an auxiliary loss: {PER_MICROBATCH} If not: ' if estimate.is_product else ''}"
            "whole_batch_loss=True on the strategy runs the code after the last unit once on the whole batch. It costs "
            "memory and bubble: lightning-pp-plan shows how much. check_first_batches=False turns this check off."
        )

    def drop_facts_without_use(self) -> None:
        """Once all is counted: has nothing done where each microbatch counts its share and nothing grows."""
        if (
            self.facts is not None
            and not self.follows_estimates
            and not self.grows
            and need_no_correction(self.counts, self.totals, self.shares, self.facts)
        ):
            self.facts = None

    def check_complete(self, microbatch: int, step: ScaledStep) -> None:
        """After that step: raises :class:`SplitError` if it did not reach all its counts."""
        if self.is_training and self.counts:
            step.check_complete(place for place in self.counts[microbatch] if self.totals.get(place) is not None)


class BatchScaling:
    """Finds, on the last stage, how a step's values grow with the batch, and makes the counts that it needs.

    Args:
        groups: Joins the replicas.
        counting: Counts in a microbatch.
        allows_auxiliary: Whether an auxiliary loss need not add up over microbatches.
    """

    def __init__(self, groups: ControlGroups, counting: StepCounting, *, allows_auxiliary: bool = False) -> None:
        self._groups = groups
        self._allows_auxiliary = allows_auxiliary
        self._counting = counting
        self._facts: dict[str, Facts] = {}
        # whether replicas wait for each other before a step's programs; the same on all replicas
        self._waits_early: dict[str, bool] = {}

    def start_counting(
        self,
        steps: BatchSteps,
        *,
        sizes: Callable[[], TwoSizes | None],
        double: Callable[[Microbatch], Microbatch | None],
        record_at: RecordAt,
        among_replicas: bool = True,
        follows_estimates: bool = False,
    ) -> ScaledBatch:
        """Starts counting for one batch; runs the code of the step outside units where that is needed.

        Args:
            steps: The steps of the batch.
            sizes: A part of the batch at two sizes; None where it has only one sample.
            double: Has each sample of a microbatch twice; None where that cannot be made.
            record_at: Makes a dry run of the step on such a part.
            among_replicas: Whether the batch is a part of a global batch.
            follows_estimates: Whether a loss that does not add up over microbatches is an error.

        Raises:
            SplitError: The step cannot be rehearsed to count what its loss divides by.
        """
        shares = [microbatch.weight for microbatch in steps.microbatches]
        weights = [share * steps.factor for share in shares]
        num_replicas = self._groups.num_replicas if among_replicas else 1
        if not self._groups.is_last_stage or (len(shares) == 1 and num_replicas == 1):
            return ScaledBatch(weights, _nothing)
        facts, records = self._facts.setdefault(steps.name, Facts()), steps.records
        is_known = _learned(facts, steps, sizes, double, record_at)
        batch = ScaledBatch(weights, _nothing, facts, shares, allows_auxiliary=self._allows_auxiliary)
        batch.is_training = steps.is_training and is_known  # of one sample nothing is known: as under DDP
        batch.follows_estimates = follows_estimates and batch.is_training
        batch.grows = any(facts.grow(record.reductions) for record in records)

        count = partial(self._count, batch, facts, steps)
        batch.counts = count()
        batch.totals = total_of(batch.counts, facts)
        may_depend = any(facts.counts_may_depend_on_counts(facts.counted(record.reductions)) for record in records)
        if num_replicas > 1:
            self._join_replicas(batch, facts, steps, count, may_depend)
        else:
            if may_depend:
                _settle(
                    batch, count, lambda counts: [total_of(counts, facts)], lambda told: dict(told[0]), [batch.totals]
                )
            batch.drop_facts_without_use()
        return batch

    def _count(self, batch: ScaledBatch, facts: Facts, steps: BatchSteps) -> list[Counts]:
        """What each microbatch counts, given what ``batch`` counts so far."""
        return [
            self._counting.count(steps, index, facts, Scale(batch.shares[index], batch.totals, each.num_samples))
            for index, each in enumerate(steps.microbatches)
        ]

    def _join_replicas(
        self, batch: ScaledBatch, facts: Facts, steps: BatchSteps, count: Callable[[], list[Counts]], may_depend: bool
    ) -> None:
        """Starts to send to the other replicas; ``batch`` gets shares, weights and totals when they are waited for.

        Counts that may depend on each other in any replica are counted again, on all replicas in the same batch. This
        copies to the host, which must not wait within a program. So the others are waited for before it where they have
        counted again in an earlier batch, and in the first batch, of which nobody knows.
        """
        groups, num_samples = self._groups, [microbatch.num_samples for microbatch in steps.microbatches]
        mine = sum(num_samples), may_depend, on_host(facts.named(batch.totals))
        gather = groups.start_gather(mine, "the samples of a batch")

        def tell(counts: Sequence[Counts]) -> list[Mapping[Any, Count]]:
            return groups.gather(on_host(facts.named(total_of(counts, facts))), "the counts of a batch")

        def join(told: Sequence[Mapping[Any, Count]]) -> dict[Place, Count]:
            return total_of([facts.placed(counts) for counts in told], facts)

        def wait() -> None:
            batch.wait_for_replica_counts = _nothing  # the two would keep each other, and the batch
            gathered = gather()
            total = sum(samples for samples, _, _ in gathered)
            batch.shares = [samples / total for samples in num_samples]
            batch.loss_weights[:] = [share * groups.num_replicas * steps.factor for share in batch.shares]
            told = [counts for *_, counts in gathered]
            batch.totals = join(told)
            if any(may_depend for _, may_depend, _ in gathered):
                self._waits_early[steps.name] = True
                _settle(batch, count, tell, join, told)
            batch.drop_facts_without_use()

        batch.wait_for_replica_counts = wait
        waits_early = self._waits_early.get(steps.name, True)
        self._waits_early.setdefault(steps.name, False)
        if waits_early:
            wait()


def _settle(
    batch: ScaledBatch,
    count: Callable[[], list[Counts]],
    tell: Callable[[Sequence[Counts]], Sequence[Mapping[Any, Count]]],
    join: Callable[[Sequence[Mapping[Any, Count]]], dict[Place, Count]],
    before: Sequence[Mapping[Any, Count]],
) -> None:
    """Counts again with the new counts until they no longer change, since counts may depend on others.

    Args:
        batch: Gets counts and totals.
        count: Counts again.
        tell: Gives the totals of each replica; what is compared, so that all replicas end in the same round.
        join: Adds them up.
        before: What ``tell`` gave for the first counts.
    """
    for _ in range(_MOST_ROUNDS):
        batch.counts = count()
        told = tell(batch.counts)
        batch.totals = join(told)
        if all(map(are_equal, before, told)):
            return
        before = told
    raise SplitError(
        f"A count of the step depends on a chain of more than {_MOST_ROUNDS} other counts. Set whole_batch_loss=True "
        "on the strategy."
    )


def _learned(
    facts: Facts,
    steps: BatchSteps,
    sizes: Callable[[], TwoSizes | None],
    double: Callable[[Microbatch], Microbatch | None],
    record_at: RecordAt,
) -> bool:
    """Compares dry runs of the step on parts of two sizes, where something is not known; whether there are two.

    As many selected rows in both are no proof, and a part may take another branch. So a microbatch that selects rows,
    or calls what is not known, is compared with itself twice, which has twice as many of everything.
    """
    records = [plan.record for plan in steps.plans]
    num_in_batch = sum(each.num_samples for each in steps.microbatches)
    for record, microbatch in zip(records, steps.microbatches, strict=True):
        _check_first_rows(record, microbatch.num_samples, num_in_batch)

    def are_known() -> bool:
        return all(facts.knows(record.reductions) and not facts.are_by_chance(record.reductions) for record in records)

    if are_known():
        return True
    found = sizes()
    if found is None:
        return all(facts.knows(record.reductions) for record in records)
    small = record_at(found.parts[0], None)
    _check_first_rows(small, found.parts[0].num_samples, num_in_batch)
    _learn(facts, small, found.parts[0], found.whole, found.is_cut_by_user, record_at)
    for microbatch in steps.microbatches:
        is_one = microbatch.num_samples == 1  # of which len(x) and max(count, 1) say the same
        twice = None if is_one or are_known() else double(microbatch)
        if twice is None:
            break
        part = replace(microbatch, weight=1.0)
        small = record_at(part, None)
        if facts.can_learn_from(small.reductions):
            _learn(facts, small, part, twice, False, record_at)
    return True


def _check_first_rows(record: StepRecord, num_samples: int, num_in_batch: int) -> None:
    """Raises if the step reduces the first samples, more than the part of a batch has that ``record`` is of."""
    for reduction in record.reductions:
        stop, length = reduction.of_first or (0, 0)
        is_number = reduction.result == () and reduction.kind in (Kind.SUM, Kind.MEAN, Kind.LOSS)
        if is_number and length == num_samples < stop < num_in_batch:
            raise SplitError(
                f"{reduction.line} reduces the first {stop} samples. On one device these are {stop} of the batch's "
                f"{num_in_batch}, in a pipeline the first {stop} of each microbatch. Set whole_batch_loss=True on the "
                "strategy, which runs the code after the last unit once on the whole batch."
            )


def _learn(
    facts: Facts, small: StepRecord, part: Microbatch, whole: Microbatch, is_cut_by_user: bool, record_at: RecordAt
) -> None:
    """Compares ``small``, a dry run of the step on a part of a batch, with one on a larger part."""
    ratio, keeps_integers = whole.num_samples / part.num_samples, False
    try:
        large = record_at(whole, EarlierRun(small.reductions, ratio))
    except Exception:  # a sum of integers that is a size or a place, and not a count
        large = record_at(whole, EarlierRun(small.reductions, ratio, shows_integers=False))
        keeps_integers = True
    facts.learn(
        small.reductions,
        large.reductions,
        ratio,
        has_dynamic_shapes=is_cut_by_user or small.has_dynamic_shapes or large.has_dynamic_shapes,
        keeps_integers=keeps_integers,
    )


def _nothing() -> None:
    pass
