"""The time of a message between two ranks: by latency and bandwidth, inside a node and between nodes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import Placement

if TYPE_CHECKING:
    from lightning_pp.planning.plan_summary import CrossingSummary

# Bytes per second from a device to its neighbours in a node and at the same time back, in 10⁹, by the makers' data
# sheets, which give the sum of both directions; names as Lightning has them. All others go over PCIe.
_NODE_GB_PER_S = {"h200 sxm1": 450, "h100 sxm": 450, "v100 sxm": 150}
_SHARE_OF_BANDWIDTH = 0.8


@dataclass(frozen=True)
class LinkSpeed:
    """A kind of link.

    Attributes:
        bytes_per_s: In one direction.
        latency_ms: Of a message without content.
    """

    bytes_per_s: float
    latency_ms: float

    def ms(self, num_bytes: float, number: int = 1) -> float:
        """Milliseconds from the end of an action to the moment its result is there; nothing for nothing.

        Args:
            num_bytes: Of all messages.
            number: Messages, one after the other.
        """
        return number * self.latency_ms + 1e3 * num_bytes / self.bytes_per_s if num_bytes else 0.0


@dataclass(frozen=True)
class Links:
    """How the ranks of pipelines are joined.

    Ranks are numbered as in training: those of one pipeline rank follow each other, replica by replica.

    Attributes:
        inside: Between two ranks of a node.
        between: Between two nodes.
        ranks_per_node: Ranks of each node; None: all ranks are on one.
        num_replicas: Pipelines beside each other, each with as many of them as ranks that share matrices.
    """

    inside: LinkSpeed
    between: LinkSpeed
    ranks_per_node: int | None = None
    num_replicas: int = 1

    def cross_nodes(self, first: int, second: int) -> bool:
        """Whether two ranks of a pipeline are on different nodes, in any of the pipelines: a step waits for all."""
        if self.ranks_per_node is None:
            return False
        return any(
            (first * self.num_replicas + replica) // self.ranks_per_node
            != (second * self.num_replicas + replica) // self.ranks_per_node
            for replica in range(self.num_replicas)
        )

    def of(self, first: int, second: int) -> LinkSpeed:
        """The link between two pipeline ranks."""
        return self.between if self.cross_nodes(first, second) else self.inside

    def between_neighbours(self, number: int) -> LinkSpeed:
        """The slowest link of groups that lie within runs of so many ranks."""
        return self.inside if self.ranks_per_node is None or self.ranks_per_node % number == 0 else self.between


def transfer_times(
    messages: Iterable[CrossingSummary], placement: Placement, links: Links
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """``p2p`` and ``p2p_back`` of :class:`~lightning_pp.schedule.StageCosts`, by stage, in milliseconds.

    Messages of one stage over the same kind of link share its bandwidth and have one latency, since they are under way
    together; the two kinds work beside each other. Ranks compute meanwhile. Between stages of one rank nothing is sent.
    """
    forward: dict[tuple[int, LinkSpeed], int] = defaultdict(int)
    back: dict[tuple[int, LinkSpeed], int] = defaultdict(int)
    for message in messages:
        ranks = placement.rank_of_stage[message.source], placement.rank_of_stage[message.target]
        if ranks[0] != ranks[1]:
            link = links.of(*ranks)
            forward[message.source, link] += message.forward_bytes
            back[message.target, link] += message.gradient_bytes

    def longest(sent: dict[tuple[int, LinkSpeed], int]) -> tuple[float, ...]:
        times = [0.0] * placement.num_stages
        for (stage, link), num_bytes in sent.items():
            times[stage] = max(times[stage], link.ms(num_bytes))
        return tuple(times)

    return longest(forward), longest(back)


def named_node_bandwidth(name: str) -> float | None:
    """Bytes per second that a device reaches to another one of its node, by its name; None if that is not known."""
    found = _NODE_GB_PER_S.get(name)
    return None if found is None else _SHARE_OF_BANDWIDTH * 1e9 * found


def links_measured(path: str | PathLike[str]) -> tuple[LinkSpeed | None, LinkSpeed | None]:
    """The medians of the pairs inside a node and between nodes, from a file that ``lightning-pp-doctor`` wrote.

    Raises:
        ConfigurationError: It is not such a file, or has no pairs.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content.get("shares_device"):
            raise ValueError("its ranks shared a device (--share-device), so it says nothing of links between devices")
        found = [finding for finding in content["findings"] if finding["check"] == "channels"]
        values: Sequence[Any] = found[0]["details"]
        hosts = {value["rank"]: value["host"] for value in values}
        pairs = [pair for value in values for pair in value["links"]]
        kinds: dict[bool, list[Any]] = {True: [], False: []}
        for pair in pairs:
            first, second = pair["pair"]
            kinds[hosts[first] == hosts[second]].append((float(pair["gb_per_s"]), float(pair["latency_us"])))
        if not pairs:
            raise ValueError("no pair of ranks was measured")
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigurationError(
            f"{path} has no latency and bandwidth between ranks ({type(error).__name__}: {error}): give the file that "
            "lightning-pp-doctor --only channels has written."
        ) from error

    def of(kind: list[Any]) -> LinkSpeed | None:
        if not kind:
            return None
        return LinkSpeed(1e9 * median(speed for speed, _ in kind), 1e-3 * median(latency for _, latency in kind))

    return of(kinds[True]), of(kinds[False])
