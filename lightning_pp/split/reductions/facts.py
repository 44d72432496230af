"""What two dry runs of a step, on batches of two sizes, tell about the calls in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_pp.split.record.reduction import Kind, Place, Reduction, Site

Name = tuple[Any, ...]
"""A place as other processes know it."""

_ARITHMETIC = (Kind.PRODUCT, Kind.QUOTIENT, Kind.ADDITION, Kind.NUMBER)
# kinds that may reduce rows which the batch selects
_REDUCING = (Kind.SUM, Kind.CONTRACTION, Kind.MEAN, Kind.LOSS, Kind.EXTREME)
_DEGREES = (1.0, -1.0, 2.0, -2.0, 0.5, -0.5)


@dataclass(frozen=True)
class Fact:
    """How one call in a step depends on the number of samples.

    Attributes:
        call: The call, as the run on fewer samples has noted it, without its value.
        over_rows: Whether it reduces over samples: its arguments grow with the batch, and its result does not.
        is_counted: Whether it has to be counted, microbatch by microbatch, because values of the batch decide.
        degrees: Of the numbers among its arguments; None for one that grows, but not as a power.
        adds_samples: Whether it adds to a sum, sample by sample, in a loop over samples.
        alike: Shapes that it was given, and its result's, where both runs had the same although it reduces rows that
            values of the batch select; empty where they differed, or no value does.
        counts_nothing: Whether it is a count that was 0, and that Python may make numbers from.
    """

    call: Reduction
    over_rows: bool
    is_counted: bool
    degrees: tuple[float | None, ...]
    adds_samples: bool
    alike: frozenset[tuple[Any, Any]]
    counts_nothing: bool

    @property
    def grows(self) -> bool:
        """Whether it makes or meets values that grow with the batch, or may do so in a later one."""
        is_sum = self.over_rows and not self.call.is_mean
        return is_sum or self.adds_samples or bool(self.alike) or any(degree != 0 for degree in self.degrees)

    @property
    def is_unproven(self) -> bool:
        """Whether a part of the batch that selects other rows may show more."""
        return bool(self.alike) and not self.call.of_counted


class Facts:
    """What is known of the calls of one step.

    Attributes:
        by_place: Of each.
        of_loops: Of calls in loops over samples, which come as often as there are samples, and of calls after a number
            that Python has read, which may come in some microbatches only.
    """

    def __init__(self) -> None:
        self.by_place: dict[Place, Fact] = {}
        self.of_loops: dict[Site, Fact] = {}

    def find(self, place: Place) -> Fact | None:
        """What is known of a call; None: no dry run has seen it."""
        fact = self.by_place.get(place)
        return self.of_loops.get(place.site) if fact is None else fact

    def knows(self, reductions: Sequence[Reduction]) -> bool:
        """Whether all calls of a dry run are known."""
        return all(self.find(reduction.place) is not None for reduction in reductions)

    def grow(self, reductions: Sequence[Reduction]) -> bool:
        """Whether a step makes values that grow with the batch, so that microbatches need corrections."""
        return any(fact is not None and fact.grows for fact in map(self.find, (r.place for r in reductions)))

    def are_by_chance(self, reductions: Sequence[Reduction]) -> bool:
        """Whether some of these reduce selected rows, none or as many in both runs that were compared."""
        facts = map(self.find, (reduction.place for reduction in reductions))
        return any(fact is not None and (fact.counts_nothing or fact.is_unproven) for fact in facts)

    def can_learn_from(self, reductions: Sequence[Reduction]) -> bool:
        """Whether a step shows calls that are not known, or selects rows where that is not known."""
        for reduction in reductions:
            fact = self.find(reduction.place)
            if fact is None or (fact.is_unproven and not _has_no_rows(reduction)):
                return True
            if fact.counts_nothing and not _counts_nothing(reduction):
                return True
        return False

    def counts_may_depend_on_counts(self, counted: Sequence[Place]) -> bool:
        """Whether some of what is counted may depend on other counts."""
        facts = [fact for fact in map(self.find, counted) if fact is not None]
        return len(facts) > 1 and any(not fact.call.depends_on_weights for fact in facts)

    def named(self, counts: Mapping[Place, Any]) -> dict[Name, Any]:
        """``counts`` by names that other processes know."""
        return {_name_of(place): count for place, count in counts.items()}

    def placed(self, counts: Mapping[Name, Any]) -> dict[Place, Any]:
        """What :meth:`named` returned in another process, without places in code that was never reached here."""
        sites = {_name_of(place)[:-1]: place.site for place in self.by_place}
        return {Place(sites[name[:-1]], name[-1]): count for name, count in counts.items() if name[:-1] in sites}

    def counted(self, reductions: Sequence[Reduction]) -> list[Place]:
        """The calls of a step that have to be counted in each microbatch."""
        facts = [(reduction.place, self.find(reduction.place)) for reduction in reductions]
        return [place for place, fact in facts if fact is not None and fact.is_counted]

    def learn(
        self,
        small: Sequence[Reduction],
        large: Sequence[Reduction],
        ratio: float,
        *,
        has_dynamic_shapes: bool,
        keeps_integers: bool = False,
    ) -> None:
        """Compares two dry runs.

        Args:
            small: What the one on fewer samples noted.
            large: What the other noted, with the counts of the first grown by ``ratio``.
            ratio: Samples of the second over samples of the first.
            has_dynamic_shapes: Whether values of the batch decide shapes (``loss[mask]``): then numbers that grow with
                the batch have to be counted.
            keeps_integers: Whether the step uses integer sums as places or sizes, so that they stay a microbatch's.
        """
        others = {reduction.place: reduction for reduction in large}
        times_small, times_large = _times(small), _times(large)
        for reduction in small:
            site = reduction.place.site
            is_looped = times_small[site] != times_large.get(site, times_small[site])
            fact = _fact(reduction, others.get(reduction.place), ratio, has_dynamic_shapes, is_looped)
            if reduction.is_integer and (keeps_integers or reduction.kind is Kind.EXTREME):
                fact = replace(fact, is_counted=False)
            self.by_place[reduction.place] = _joined(self.by_place.get(reduction.place), fact)
            if is_looped or (reduction.place.follows_read and fact.over_rows):
                self.of_loops.setdefault(site, fact)
        for reduction in large:  # in a loop over samples there are more
            if self.find(reduction.place) is None:
                self.by_place[reduction.place] = _fact(reduction, None, ratio, has_dynamic_shapes, False)


def _joined(before: Fact | None, now: Fact) -> Fact:
    """What is known of a call that was looked at again: as many rows by chance prove nothing."""
    if before is not None and before.alike and before.call.of_counted:
        return before  # twice a microbatch has other rows up to twice the number
    if before is None or not now.alike:
        return now
    return before if before.over_rows else replace(now, alike=now.alike | before.alike)


def _name_of(place: Place) -> Name:
    code, position, function = place.site
    return code.co_filename, code.co_name, code.co_firstlineno, position, function, place.occurrence


def _times(reductions: Sequence[Reduction]) -> Mapping[Site, int]:
    return Counter(reduction.place.site for reduction in reductions)


def _fact(small: Reduction, large: Reduction | None, ratio: float, has_dynamic_shapes: bool, is_looped: bool) -> Fact:
    over_rows = large is not None and small.given != large.given and small.result == large.result
    may_be_by_chance = (
        has_dynamic_shapes
        and (small.of_selected or small.of_counted)
        and small.kind in _REDUCING
        and large is not None
        and (small.given == large.given or _has_no_rows(small))
    )
    degrees: tuple[float | None, ...] = ()
    if large is not None and len(large.numbers) == len(small.numbers):
        degrees = tuple(_degree(a, b, ratio) for a, b in zip(small.numbers, large.numbers, strict=True))
    if has_dynamic_shapes:
        degrees = tuple(None if degree == 1 and float(number).is_integer() else degree
                        for degree, number in zip(degrees, small.numbers, strict=False))  # fmt: skip
    if over_rows and small.is_mean and large is not None:
        pairs = zip(small.given, large.given, strict=False)  # what grows has as many elements for each sample
        has_dynamic_shapes |= not all(math.isclose(math.prod(b), ratio * math.prod(a)) for a, b in pairs if a != b)
    made_of_batch = over_rows and not small.depends_on_weights and small.kind not in _ARITHMETIC
    is_counted = made_of_batch or (
        over_rows and small.is_mean and small.is_countable and (small.is_counted or has_dynamic_shapes)
    )
    return Fact(
        replace(small, value=None),
        over_rows,
        is_counted or None in degrees,
        degrees,
        is_looped and small.kind is Kind.ADDITION and small.result == (),
        frozenset([(small.given, small.result)] if may_be_by_chance else ()),
        has_dynamic_shapes and _counts_nothing(small),
    )


def _has_no_rows(reduction: Reduction) -> bool:
    return any(0 in shape for shape in reduction.given)


def _counts_nothing(reduction: Reduction) -> bool:
    value = reduction.value
    return value is not None and reduction.kind in (Kind.SUM, Kind.CONTRACTION) and not bool(value.any())


def _degree(small: float, large: float, ratio: float) -> float | None:
    """The power of the number of samples by which a number has grown."""
    if small == large:
        return 0.0
    if small != 0:
        for degree in _DEGREES:
            if math.isclose(large / small, ratio**degree, rel_tol=1e-9):
                return degree
    return None if float(large).is_integer() and float(small).is_integer() else 0.0
