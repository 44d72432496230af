"""Channels between the ranks: whether messages arrive, how fast, and how much memory a channel takes."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from lightning_pp.distributed.groups import free_bytes
from lightning_pp.doctor.checks.groups import join, neighbours, open_channels, settle
from lightning_pp.doctor.findings import Check, Finding, Rank, Status
from lightning_pp.runtime.transport.link_speed import Link, measure_links

_SMALL_BYTES = 8
_LARGE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_MOST_PAIRS_EACH_WITH_ALL = 8
_SLOW = 0.4
"""A pair is slow that has less than this share of the median bandwidth."""
_LONG_OPENING_S = 10.0


def look(rank: Rank) -> dict[str, Any]:
    """Opens a channel in each direction of each pair, checks what arrives, and measures."""
    join(rank)
    pairs = _pairs(rank.num_ranks)
    free_before = free_bytes(rank.device)
    started = time.monotonic()
    channels = open_channels(rank, "doctor/channels", pairs)
    opened_s = time.monotonic() - started
    taken = free_before - free_bytes(rank.device)
    wrong = [pair for pair, channel in channels.items() if not _arrives(rank, pair, channel)]
    for channel in channels.values():
        channel.shutdown()
    rank.note("measuring latency and bandwidth")
    large = _LARGE_BYTES[rank.device.type]
    links = [Link(*pair, size) for pair in pairs if pair[0] < pair[1] for size in (_SMALL_BYTES, large)]
    times = measure_links(links, rank.rank, "doctor/links", rank.device)
    measured = []
    for first, second in {(link.first, link.second) for link in times}:
        latency_ms, large_ms = (times[Link(first, second, size)] for size in (_SMALL_BYTES, large))
        measured.append(
            {"pair": [first, second], "latency_us": latency_ms * 1e3, "gb_per_s": large / max(large_ms, 1e-6) / 1e6}
        )
    return {
        "wrong": wrong,
        "num_channels": len(channels),
        "opened_s": opened_s,
        "taken_bytes": taken,
        "rank": rank.rank,
        "host": platform.node(),
        "links": measured,
    }


def judge(values: Sequence[dict[str, Any]]) -> list[Finding]:
    """What did not arrive as it was sent, what took long, which pairs are slower than others."""
    wrong = sorted({tuple(pair) for value in values for pair in value["wrong"]})
    if wrong:
        text = ", ".join(f"{first} to {second}" for first, second in wrong)
        advice = "The link or its driver is broken: look at dmesg and nvidia-smi, and try NCCL_P2P_DISABLE=1."
        return [Finding(Status.FAILURE, f"Other bytes arrived than were sent: rank {text}.", advice, list(values))]
    links = sorted((link for value in values for link in value["links"]), key=lambda link: link["pair"])
    speeds = [link["gb_per_s"] for link in links]
    opened_s = max(value["opened_s"] for value in values)
    num_channels = max(value["num_channels"] for value in values)
    taken = max(value["taken_bytes"] for value in values)
    memory = f", {taken / max(1, num_channels) / 2**20:.0f} MiB of the device each" if taken > 0 else ""
    range_text = f"{min(speeds):.1f}" + (f" to {max(speeds):.1f}" if len(speeds) > 1 else "")
    found = (
        f"{len(links)} pair{'s'[: len(links) != 1]} of ranks: {median(link['latency_us'] for link in links):.0f} µs, "
        f"{range_text} GB/s{_by_hosts(values)}; {num_channels} channels of a rank opened in {opened_s:.1f} s{memory}."
    )
    findings = [Finding(Status.OK, found, details=list(values))]
    slow = [link for link in links if link["gb_per_s"] < _SLOW * median(speeds)]
    if slow and len(links) > 1:
        text = ", ".join(f"{link['pair'][0]} and {link['pair'][1]} ({link['gb_per_s']:.1f} GB/s)" for link in slow)
        advice = "Keep neighbours of a pipeline on one host or one switch; nvidia-smi topo -m shows their connections."
        findings.append(Finding(Status.WARNING, f"Slower than the others: ranks {text}.", advice))
    if opened_s > _LONG_OPENING_S:
        advice = "Look at the name service of the hosts, and at NCCL_SOCKET_IFNAME and NCCL_DEBUG=INFO."
        findings.append(Finding(Status.WARNING, f"Opening channels took {opened_s:.0f} s.", advice))
    return findings


def _by_hosts(values: Sequence[dict[str, Any]]) -> str:
    """The medians of the pairs on one host and of the others, where there are both."""
    hosts = {value["rank"]: value["host"] for value in values}
    texts = []
    for where, is_one in (("on one host", True), ("between hosts", False)):
        links = [
            link
            for value in values
            for link in value["links"]
            if (hosts[link["pair"][0]] == hosts[link["pair"][1]]) is is_one
        ]
        if links:
            latency, speed = (median(link[key] for link in links) for key in ("latency_us", "gb_per_s"))
            texts.append(f"{latency:.0f} µs and {speed:.1f} GB/s {where}")
    return f" ({', '.join(texts)})" if len(texts) == 2 else ""


def _pairs(num_ranks: int) -> list[tuple[int, int]]:
    """All pairs of few ranks, those of neighbours of many."""
    if num_ranks > _MOST_PAIRS_EACH_WITH_ALL:
        return neighbours(num_ranks)
    return [(first, second) for first in range(num_ranks) for second in range(num_ranks) if first != second]


def _arrives(rank: Rank, pair: tuple[int, int], channel: Any) -> bool:
    """Whether what goes over a channel is what was sent; True for the sender."""
    rank.note(f"a message from rank {pair[0]} to rank {pair[1]}")
    sent = torch.arange(1 << 16, device=rank.device).add_(1000 * pair[0] + pair[1])
    if rank.rank == pair[0]:
        channel.send([sent], 1, 0).wait()
        settle(rank.device)
        return True
    received = torch.empty_like(sent)
    channel.recv([received], 0, 0).wait()
    return bool(torch.equal(received, sent))


CHECKS = [
    Check(
        "channels",
        "messages between ranks arrive, how long they take, and what a channel takes of the device",
        look,
        judge,
        limit_s=60.0,
        advice="Look at firewalls, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO shows how ranks connect.",
    )
]
