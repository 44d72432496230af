"""What messages take by latency and bandwidth, against the formulas, and which ranks share a node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.hardware.links import Links, LinkSpeed, links_measured, transfer_times
from lightning_pp.planning.plan_summary import CrossingSummary
from lightning_pp.schedule import Placement, StageCosts, build_schedule

INSIDE, BETWEEN = LinkSpeed(100e9, 0.01), LinkSpeed(10e9, 0.05)
MIB = 1 << 20


def message(source: int, target: int, forward_bytes: int, gradient_bytes: int) -> CrossingSummary:
    return CrossingSummary("", source, target, 0, 0, (), "", forward_bytes, gradient_bytes)


def ms(link: LinkSpeed, num_bytes: int) -> float:
    return link.latency_ms + 1e3 * num_bytes / link.bytes_per_s


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 6])
def test_ranks_are_on_nodes_as_launchers_number_them(num_replicas: int, ranks_per_node: int) -> None:
    """Global ranks fill nodes in order, and the replicas of a pipeline rank are neighbours in that order."""
    num_ranks = 4
    links = Links(INSIDE, BETWEEN, ranks_per_node, num_replicas)
    node_of, rank = {}, 0
    for pipeline_rank in range(num_ranks):
        for replica in range(num_replicas):
            node_of[pipeline_rank, replica] = rank // ranks_per_node
            rank += 1
    for first in range(num_ranks):
        for second in range(num_ranks):
            apart = any(node_of[first, replica] != node_of[second, replica] for replica in range(num_replicas))
            assert links.cross_nodes(first, second) == apart
            assert links.of(first, second) == (BETWEEN if apart else INSIDE)


def test_each_edge_takes_its_links_latency_and_bytes() -> None:
    placement = Placement.interleaved(4)
    messages = [message(stage, stage + 1, 8 * MIB, 4 * MIB) for stage in range(3)]
    p2p, back = transfer_times(messages, placement, Links(INSIDE, BETWEEN, ranks_per_node=2))
    assert p2p == pytest.approx((ms(INSIDE, 8 * MIB), ms(BETWEEN, 8 * MIB), ms(INSIDE, 8 * MIB), 0.0))
    assert back == pytest.approx((0.0, ms(INSIDE, 4 * MIB), ms(BETWEEN, 4 * MIB), ms(INSIDE, 4 * MIB)))


def test_what_shares_a_link_shares_its_bandwidth_and_kinds_are_beside_each_other() -> None:
    placement = Placement.interleaved(4)
    messages = [message(0, 1, 8 * MIB, 0), message(0, 1, 2 * MIB, 0), message(0, 3, 3 * MIB, 3 * MIB)]
    p2p, back = transfer_times(messages, placement, Links(INSIDE, BETWEEN, ranks_per_node=2))
    assert p2p[0] == pytest.approx(max(ms(INSIDE, 10 * MIB), ms(BETWEEN, 3 * MIB)))
    assert back == pytest.approx((0.0, 0.0, 0.0, ms(BETWEEN, 3 * MIB)))
    one_node = transfer_times(messages, placement, Links(INSIDE, BETWEEN))
    assert one_node[0][0] == pytest.approx(ms(INSIDE, 13 * MIB))


def test_stages_of_one_rank_send_each_other_nothing() -> None:
    placement = Placement.v_shaped(2)
    messages = [message(stage, stage + 1, MIB, MIB) for stage in range(3)]
    p2p, back = transfer_times(messages, placement, Links(INSIDE, BETWEEN))
    assert p2p[1] == back[2] == 0.0
    assert p2p[0] == p2p[2] == back[1] == back[3] == ms(INSIDE, MIB)


def test_a_step_has_each_transfer_of_the_way_there_and_back_once() -> None:
    """One microbatch on p equal stages: p forwards and backwards, and every link in both directions."""
    placement = Placement.interleaved(4)
    messages = [message(stage, stage + 1, 8 * MIB, 4 * MIB) for stage in range(3)]
    p2p, back = transfer_times(messages, placement, Links(INSIDE, BETWEEN, ranks_per_node=2))
    schedule = build_schedule("1f1b", num_ranks=4, num_microbatches=1)
    made = schedule.simulate(StageCosts(2.0, 1.0, 1.0, p2p=p2p, p2p_back=back)).makespan
    there = 2 * ms(INSIDE, 8 * MIB) + ms(BETWEEN, 8 * MIB)
    assert made == pytest.approx(4 * (2.0 + 2.0) + there + 2 * ms(INSIDE, 4 * MIB) + ms(BETWEEN, 4 * MIB))


def report(hosts: list[str], links: list[dict[str, Any]]) -> str:
    details = [
        {"rank": rank, "host": host, "links": [link for link in links if link["pair"][0] == rank]}
        for rank, host in enumerate(hosts)
    ]
    return json.dumps({"findings": [{"check": "parity", "details": []}, {"check": "channels", "details": details}]})


def test_figures_of_the_doctor_are_medians_of_pairs_of_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    links = [
        {"pair": [0, 1], "latency_us": 10.0, "gb_per_s": 200.0},
        {"pair": [2, 3], "latency_us": 14.0, "gb_per_s": 220.0},
        {"pair": [1, 2], "latency_us": 40.0, "gb_per_s": 20.0},
        {"pair": [0, 3], "latency_us": 50.0, "gb_per_s": 30.0},
        {"pair": [0, 2], "latency_us": 60.0, "gb_per_s": 22.0},
    ]
    path.write_text(report(["a", "a", "b", "b"], links))
    assert links_measured(path) == (LinkSpeed(210e9, pytest.approx(0.012)), LinkSpeed(22e9, pytest.approx(0.05)))
    path.write_text(report(["a", "a", "a", "a"], links[:2]))
    assert links_measured(path) == (LinkSpeed(210e9, pytest.approx(0.012)), None)
    for content in ("{}", "no json", report(["a", "a"], [])):
        path.write_text(content)
        with pytest.raises(ConfigurationError, match="give the file that lightning-pp-doctor --only channels"):
            links_measured(path)
