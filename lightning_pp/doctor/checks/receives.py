"""Receives that are posted before their message is sent, while the rank computes, gathers and sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_pp.doctor.checks.groups import join, neighbours, open_channels, settle
from lightning_pp.doctor.findings import Check, Finding, Rank, Status

_NUM_ROUNDS = 20
_ELEMENTS = {"cpu": 1 << 12, "cuda": 1 << 20}


def queue_two(rank: Rank) -> dict[str, Any]:
    """Each rank posts two receives from each neighbour, computes, gathers with all, and only then sends its two."""
    join(rank)
    channels = open_channels(rank, "doctor/queued", neighbours(rank.num_ranks))
    elements, wrong = _ELEMENTS[rank.device.type], 0
    matrix = torch.ones(64, 64, device=rank.device)
    _ = (matrix @ matrix)[0, :1] * 0 + rank.rank  # loading a kernel waits for posted receives
    for number in range(_NUM_ROUNDS):
        rank.note(f"two receives queued on each channel, round {number + 1} of {_NUM_ROUNDS}")
        posted = []
        for (sender, receiver), channel in channels.items():
            for place in range(2) if receiver == rank.rank else ():
                tensor = torch.zeros(elements, device=rank.device)
                posted.append((channel.recv([tensor], 0, 0), tensor, _value(number, sender, place)))
        share = (matrix @ matrix)[0, :1] * 0 + rank.rank
        whole = torch.empty(rank.num_ranks, device=rank.device)
        gathered = dist.all_gather_single(whole, share, async_op=True)
        sent = []
        for (sender, _), channel in channels.items():
            for place in range(2) if sender == rank.rank else ():
                tensor = torch.full((elements,), _value(number, sender, place), device=rank.device)
                sent.append((channel.send([tensor], 1, 0), tensor))
        gathered.wait()
        for work, tensor, expected in posted:
            work.wait()
            wrong += not bool((tensor == expected).all())
        for work, _ in sent:
            work.wait()
        wrong += whole.tolist() != list(range(rank.num_ranks))
    settle(rank.device)
    dist.barrier()  # one that left would end what another waits for, and a hang would look like an error
    return {"wrong": wrong}


def judge_queued(values: Sequence[dict[str, Any]]) -> list[Finding]:
    """Whether all came in order."""
    wrong = sum(value["wrong"] for value in values)
    if wrong:
        found = f"{wrong} messages or gathers of {_NUM_ROUNDS} rounds were not what was sent, or not in its order."
        return [Finding(Status.FAILURE, found, "Update NCCL and torch; attach the JSON to an issue.", list(values))]
    return [Finding(Status.OK, f"All messages and gathers of {_NUM_ROUNDS} rounds arrived in order.")]


def _value(number: int, sender: int, place: int) -> float:
    return float(number * 100 + sender * 2 + place)


_HANGS = (
    "Receives, gathers and sends do not progress side by side: leave CUDA_DEVICE_MAX_CONNECTIONS to the strategy, "
    "update NCCL, and attach the JSON to an issue."
)
CHECKS = [
    Check(
        "queued-receives",
        "two receives queued on each channel, while this rank gathers and then sends",
        queue_two,
        judge_queued,
        limit_s=45.0,
        advice=_HANGS,
    ),
]
