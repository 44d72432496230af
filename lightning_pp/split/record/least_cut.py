"""The cheapest set of nodes that separates the sources of a graph of computations from its needed results."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def least_cut(
    inputs: Mapping[Node, Collection[Node]],
    costs: Mapping[Node, int | None],
    sources: Collection[Node],
    needed: Collection[Node],
) -> set[Node]:
    """Chooses nodes from which, without ``sources``, all that is needed can be computed, at the least total cost.

    A maximum flow by shortest paths (Edmonds and Karp); of several choices the one nearest to the sources.

    Args:
        inputs: For each node the nodes that it is computed from. What has none, and is no source, is there anyway.
        costs: The cost of choosing a node; None for one that cannot be chosen. Sources have a cost.
        sources: Nodes that are not there unless they, or what is computed from them, are chosen.
        needed: Nodes that must be computed, or chosen themselves.
    """
    index = {node: number for number, node in enumerate(inputs)}
    start, end = 2 * len(index), 2 * len(index) + 1
    unlimited = 1 + sum(cost for cost in costs.values() if cost is not None)
    flows = _Flows(end + 1)
    for node, number in index.items():  # a node is an edge from what enters it to what leaves it
        cost = costs[node]
        flows.connect(2 * number, 2 * number + 1, unlimited if cost is None else cost)
        for other in inputs[node]:
            flows.connect(2 * index[other] + 1, 2 * number, unlimited)
    for node in sources:
        flows.connect(start, 2 * index[node], unlimited)
    for node in needed:
        flows.connect(2 * index[node] + 1, end, unlimited)
    reached = flows.saturate(start, end)
    return {node for node, number in index.items() if 2 * number in reached and 2 * number + 1 not in reached}


class _Flows:
    """The remaining capacities of the edges of a graph."""

    def __init__(self, num_nodes: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(num_nodes)]
        # an edge and its reverse follow each other
        self._targets: list[int] = []
        self._left: list[int] = []

    def connect(self, source: int, target: int, capacity: int) -> None:
        """Adds an edge."""
        for begin, finish, amount in ((source, target, capacity), (target, source, 0)):
            self._edges[begin].append(len(self._targets))
            self._targets.append(finish)
            self._left.append(amount)

    def saturate(self, start: int, end: int) -> set[int]:
        """Lets flow as much as can from ``start`` to ``end``; returns what can still be reached from ``start``."""
        while True:
            reached_by = self._search(start, end)
            if end not in reached_by:
                return set(reached_by)
            path = []
            node = end
            while node != start:
                path.append(reached_by[node])
                node = self._targets[reached_by[node] ^ 1]
            amount = min(self._left[edge] for edge in path)
            for edge in path:
                self._left[edge] -= amount
                self._left[edge ^ 1] += amount

    def _search(self, start: int, end: int) -> dict[int, int]:
        """The nodes that can be reached, with the edge by which each is, up to ``end``."""
        reached_by = {start: -1}
        waiting = deque([start])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges[node]:
                target = self._targets[edge]
                if self._left[edge] and target not in reached_by:
                    reached_by[target] = edge
                    if target == end:
                        return reached_by
                    waiting.append(target)
        return reached_by
