"""The problem of a search: one placement, its costs and its limits, as flat tables of numbers.

An *order* is a program as integers: the action of kind k (F 0, I 1, W 2, B 3), stage s and microbatch j is the code
``(k * num_stages + s) * m + j``, and ``k * num_stages + s`` is its *row*, as in
:mod:`lightning_pp.schedule.program.coded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from lightning_pp.schedule.program.coded import OFFLOAD, B, CodedProgram, F, I, W
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.schedule import Schedule
from lightning_pp.schedule.simulation.costs import StageCosts
from lightning_pp.schedule.simulation.execution import CostTables
from lightning_pp.schedule.simulation.memory import held_change

Orders: TypeAlias = list[list[int]]
"""For each rank, its actions as codes."""

UNLIMITED = float("inf")


@dataclass(frozen=True)
class CodeTables:
    """Attributes of :class:`Problem` of the same names, indexed by code; rows are codes, of the same microbatch."""

    duration: list[float]
    needs: list[int]
    needs_latency: list[float]
    feeds: list[int]
    feeds_latency: list[float]
    publishes: list[int]
    held_change: list[float]


@dataclass(frozen=True)
class Problem:
    """One scheduling problem. All tuples but ``limits`` are indexed by row.

    Attributes:
        placement: Which rank holds which stages.
        num_microbatches: Number of microbatches, ``m``.
        duration: Milliseconds.
        needs: Row on another stage whose result is waited for, -1 for none.
        needs_latency: Milliseconds until that result has arrived.
        needs_own: Row on the same stage that must come before, -1 for none.
        feeds: Row on another stage that waits for this one's result, -1 for none.
        feeds_latency: Milliseconds until the result has arrived there.
        feeds_own: Row on the same stage that must come after, -1 for none.
        publishes: Row under which the result is known: that of I for I and B, else the row itself.
        held_change: What the action adds to the memory of its rank.
        limits: For each rank, the most it may hold.
        whole_batch_loss: Whether no backward starts before all forwards of the last stage have ended. Only the
            constructions look at it; all else is given orders that keep it.
    """

    placement: Placement
    num_microbatches: int
    duration: tuple[float, ...]
    needs: tuple[int, ...]
    needs_latency: tuple[float, ...]
    needs_own: tuple[int, ...]
    feeds: tuple[int, ...]
    feeds_latency: tuple[float, ...]
    feeds_own: tuple[int, ...]
    publishes: tuple[int, ...]
    held_change: tuple[float, ...]
    limits: tuple[float, ...]
    whole_batch_loss: bool = False

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_actions(self) -> int:
        """How many F, I and W all ranks have together."""
        return 3 * self.num_stages * self.num_microbatches

    @cached_property
    def by_code(self) -> CodeTables:
        """The rows' numbers again, by code: what is looked up millions of times should not be computed each time."""
        m = self.num_microbatches

        def spread(values: Sequence[float]) -> list[float]:
            found: list[float] = np.repeat(np.array(values, dtype=np.float64), m).tolist()
            return found

        def codes(rows: Sequence[int]) -> list[int]:
            row = np.array(rows, dtype=np.int64)[:, None]
            found: list[int] = np.where(row >= 0, row * m + np.arange(m), -1).ravel().tolist()
            return found

        return CodeTables(
            duration=spread(self.duration),
            needs=codes(self.needs),
            needs_latency=spread(self.needs_latency),
            feeds=codes(self.feeds),
            feeds_latency=spread(self.feeds_latency),
            publishes=codes(self.publishes),
            held_change=spread(self.held_change),
        )

    @cached_property
    def mirrored(self) -> Problem:
        """The problem with time running backwards: an action needs what it feeds, and frees what it holds."""
        return replace(
            self,
            needs=self.feeds,
            needs_latency=self.feeds_latency,
            needs_own=self.feeds_own,
            feeds=self.needs,
            feeds_latency=self.needs_latency,
            feeds_own=self.needs_own,
            held_change=tuple(-change for change in self.held_change),
        )

    @classmethod
    def build(
        cls,
        placement: Placement,
        num_microbatches: int,
        costs: StageCosts,
        limits: tuple[float, ...] | None,
        *,
        whole_batch_loss: bool = False,
    ) -> Problem:
        """The problem of scheduling ``num_microbatches`` on ``placement``."""
        tables, n = CostTables.build(placement, costs), placement.num_stages
        none, zero = (-1,) * n, (0.0,) * n
        forward_rows, input_rows, weight_rows = (tuple(range(k * n, (k + 1) * n)) for k in (F, I, W))
        needs_backward = (*input_rows[1:], -1)
        feeds_backward = (-1, *input_rows[:-1])
        latency = tuple(tables.latency.tolist()[: 4 * n])
        latency_forward, latency_backward = (*latency[1:n], 0.0), (0.0, *latency[n : 2 * n - 1])
        return cls(
            placement=placement,
            num_microbatches=num_microbatches,
            duration=tuple(tables.duration.tolist()[: 4 * n]),
            needs=(-1, *forward_rows[:-1], *needs_backward, *none, *needs_backward),
            needs_latency=latency,
            needs_own=none + forward_rows + input_rows + forward_rows,
            feeds=(*forward_rows[1:], input_rows[-1], *feeds_backward, *none, *feeds_backward),
            feeds_latency=latency_forward + latency_backward + zero + latency_backward,
            feeds_own=input_rows + weight_rows + none + none,
            publishes=forward_rows + input_rows + weight_rows + input_rows,
            held_change=tuple(held_change(costs, n).tolist()[: 4 * n]),
            limits=limits or (UNLIMITED,) * placement.num_ranks,
            whole_batch_loss=whole_batch_loss,
        )

    def orders_of(self, schedule: Schedule) -> Orders:
        """The programs as orders, with every B split into I and W where the memory of I allows it."""
        n, m = self.num_stages, self.num_microbatches
        orders = []
        for program in schedule.coded:
            order: list[int] = []
            for code in program.below(OFFLOAD).codes.tolist():
                row, microbatch = divmod(code, m)
                stage = row - B * n
                if stage >= 0 and self.held_change[I * n + stage] <= 0:
                    order += ((I * n + stage) * m + microbatch, (W * n + stage) * m + microbatch)
                else:
                    order.append(code)
            orders.append(order)
        return orders

    def sequential_orders(self) -> Orders:
        """One microbatch after the other: long, but legal within every limit within which anything is."""
        n, m = self.num_stages, self.num_microbatches
        orders: Orders = [[] for _ in range(self.placement.num_ranks)]
        for microbatch in range(m):
            for kind, stages in ((F, range(n)), (B, range(n - 1, -1, -1))):
                for stage in stages:
                    code = (kind * n + stage) * m + microbatch
                    if kind == B and self.held_change[I * n + stage] <= 0:
                        code = (I * n + stage) * m + microbatch
                        orders[self.placement.rank_of_stage[stage]] += (code, code + (W - I) * n * m)
                    else:
                        orders[self.placement.rank_of_stage[stage]].append(code)
        return orders

    def schedule_of(self, orders: Orders, name: str) -> Schedule:
        """The orders as a schedule."""
        n, m = self.num_stages, self.num_microbatches
        programs = tuple(CodedProgram(np.array(order, dtype=np.int64), n, m) for order in orders)
        return Schedule(name, self.placement, m, programs, self.whole_batch_loss)
