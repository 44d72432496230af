"""When to gather and free, for few gathers within a budget and no needless waits for them.

Gathered parameters are to a rank what pages are to a computer with little memory, with one advantage: the program tells
every use beforehand. So

1. what to keep is decided by *MIN* (Belady, A study of replacement algorithms for a virtual-storage computer, 1966): to
   make room, free what is used again last. No plan makes fewer gathers if all items are of one size; among items of
   different sizes it is a good heuristic (finding the optimum is NP-hard);
2. each gather then starts as early as the budget allows, in the order of need (*conservative* prefetching: Cao, Felten,
   Karlin, Li, A study of integrated prefetching and caching strategies, 1995). It never makes another gather necessary.

With the whole budget used by 1, a gather often can only start when it is needed. So the room of one item is left to 2
where that costs at most a quarter more gathers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

MOST_EXTRA_GATHERS = 1.25
"""A plan may make this many times the fewest gathers, if more of them are then hidden."""


@dataclass(frozen=True)
class GatherStep(Generic[Item]):
    """The gathers and frees between two uses.

    Attributes:
        frees: Items to free, first.
        gathers: Items to start gathering.
    """

    frees: tuple[Item, ...] = ()
    gathers: tuple[Item, ...] = ()


@dataclass(frozen=True)
class GatherPlan(Generic[Item]):
    """Gathers and frees for a sequence of uses.

    Attributes:
        uses: The items in the order of use, none twice in a row.
        steps: One more than ``uses``: ``steps[t]`` is done when use ``t - 1`` has ended, before use ``t`` begins.
    """

    uses: tuple[Item, ...]
    steps: tuple[GatherStep[Item], ...]

    @property
    def num_gathers(self) -> int:
        """How often an item is gathered."""
        return sum(len(step.gathers) for step in self.steps)


@dataclass
class _Stay:
    """An item gathered for the uses ``first`` to ``last``, from the step before use ``start`` on."""

    item: object
    first: int
    last: int
    start: int


def without_repeats(uses: Sequence[Item]) -> tuple[Item, ...]:
    """``uses`` with those that follow themselves left out."""
    return tuple(item for index, item in enumerate(uses) if index == 0 or item != uses[index - 1])


def plan_gathers(uses: Sequence[Item], num_bytes: Mapping[Item, int], budget: int) -> GatherPlan[Item]:
    """Plans gathers and frees; see the module.

    Args:
        uses: The items in the order of use; repeats in a row count as one use.
        num_bytes: The size of each item.
        budget: The most that may be gathered at any time, gathers under way included. At least the largest item.

    Raises:
        ValueError: An item is larger than the budget.
    """
    uses = without_repeats(uses)
    largest = max((num_bytes[item] for item in uses), default=0)
    if largest > budget:
        raise ValueError(f"an item of {largest} bytes does not fit a budget of {budget} bytes")
    stays = _belady(uses, num_bytes, budget)
    if budget - largest >= largest:
        roomy = _belady(uses, num_bytes, budget - largest)
        if len(roomy) <= MOST_EXTRA_GATHERS * len(stays):
            stays = roomy
    stays = _started_early(stays, num_bytes, budget, len(uses))
    frees, gathers = defaultdict(list), defaultdict(list)
    for stay in stays:
        gathers[stay.start].append(stay.item)
        frees[stay.last + 1].append(stay.item)
    steps = [GatherStep(tuple(frees[step]), tuple(gathers[step])) for step in range(len(uses) + 1)]
    return GatherPlan(uses, tuple(steps))  # type: ignore[arg-type]


def fewest_gathers(uses: Sequence[Item], num_bytes: Mapping[Item, int], budget: int) -> int:
    """How many gathers ``uses`` need at least within ``budget``: exact for items of one size, else what MIN makes."""
    return len(_belady(without_repeats(uses), num_bytes, budget))


def _belady(uses: Sequence[Item], num_bytes: Mapping[Item, int], budget: int) -> list[_Stay]:
    """The stays of MIN in the order of their first use, each as short as its uses allow."""
    never = len(uses)
    next_use = [never] * len(uses)
    seen: dict[Item, int] = {}
    for index in range(len(uses) - 1, -1, -1):
        next_use[index] = seen.get(uses[index], never)
        seen[uses[index]] = index
    stays: list[_Stay] = []
    held: dict[Item, _Stay] = {}
    free = budget
    for index, item in enumerate(uses):
        if item in held:
            held[item].last = index
        else:
            while free < num_bytes[item]:
                victim = max(held, key=lambda other: next_use[held[other].last])
                free += num_bytes[victim]
                del held[victim]
            held[item] = _Stay(item, index, index, index)
            stays.append(held[item])
            free -= num_bytes[item]
    return stays


def _started_early(stays: Sequence[_Stay], num_bytes: Mapping[Item, int], budget: int, num_uses: int) -> list[_Stay]:
    """Moves the start of each stay to where the budget has room for it, no earlier than the stay before it.

    A stay that so begins where another of its item ends becomes one with it, and needs no gather.
    """
    held = [0] * num_uses
    for stay in stays:
        for use in range(stay.first, stay.last + 1):
            held[use] += num_bytes[stay.item]  # type: ignore[index]
    latest: dict[object, _Stay] = {}
    found: list[_Stay] = []
    earliest = 0
    for stay in stays:
        size = num_bytes[stay.item]  # type: ignore[index]
        before = latest.get(stay.item)
        bound = earliest if before is None else before.last + 1
        start = stay.first
        while start > bound and held[start - 1] + size <= budget:
            start -= 1
        if before is not None and start == before.last + 1:
            before.last = stay.last
        else:
            stay.start = start = max(start, earliest)
            earliest = start
            latest[stay.item] = stay
            found.append(stay)
        for use in range(start, stay.first):
            held[use] += size
    return found
