"""Receives that are posted before their message is sent: what else goes on meanwhile, and what waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch exports it without saying so

from lightning_pp.doctor.checks.groups import join, neighbours, open_channels, settle
from lightning_pp.doctor.findings import Check, Finding, Rank, Status

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_NUM_ROUNDS = 20
_ELEMENTS = {"cpu": 1 << 12, "cuda": 1 << 20}
_DELAY_S = 2.0
"""How long a message is held back while something else is tried beside its receive."""
_OCCUPIES_NOTHING = "a receive over gloo occupies nothing of the device"


def queue_two(rank: Rank) -> dict[str, Any]:
    """Each rank posts two receives from each neighbour, computes, gathers with all, and only then sends its two."""
    join(rank)
    channels = open_channels(rank, "doctor/queued", neighbours(rank.num_ranks))
    elements, wrong = _ELEMENTS[rank.device.type], 0
    matrix = torch.ones(64, 64, device=rank.device)
    for number in range(_NUM_ROUNDS):
        rank.note(f"two receives queued on each channel, round {number + 1} of {_NUM_ROUNDS}")
        posted = []
        for (sender, receiver), channel in channels.items():
            for place in range(2) if receiver == rank.rank else ():
                tensor = torch.zeros(elements, device=rank.device)
                posted.append((channel.recv([tensor], 0, 0), tensor, _value(number, sender, place)))
        share = (matrix @ matrix)[0, :1] * 0 + rank.rank
        whole = torch.empty(rank.num_ranks, device=rank.device)
        gathered = dist.all_gather_into_tensor(whole, share, async_op=True)
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


def post_and_drain(rank: Rank) -> dict[str, Any] | None:
    """With a receive posted that waits, rank 0 does each thing that drains a device; rank 1 sends after a while.

    None of it may wait for more than the message, and what does wait is why receives are posted only where nobody can
    come to wait in a circle.
    """
    join(rank)
    channels = open_channels(rank, "doctor/posted", [(1, 0)])
    if rank.rank > 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    store = PrefixStore("doctor/posted", world.get_group_store())
    channel, waited = channels[1, 0], {}
    for name, drain in _drains(rank.device).items():
        rank.note(f"{name} beside a posted receive")
        if rank.rank == 1:
            store.get(name)
            time.sleep(_DELAY_S)
            channel.send([torch.ones(1024, device=rank.device)], 1, 0).wait()
        else:
            tensor = torch.zeros(1024, device=rank.device)
            work = channel.recv([tensor], 0, 0)
            store.set(name, "posted")
            started = time.monotonic()
            drain()
            waited[name] = round(time.monotonic() - started, 3)
            work.wait()
        settle(rank.device)
    return waited or None


def _drains(device: torch.device) -> dict[str, Callable[[], Any]]:
    """By name what may wait for all that a device has been given."""

    def free() -> None:
        block = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        del block
        torch.cuda.empty_cache()

    return {
        "loading a kernel": lambda: torch.erfinv(torch.zeros(16, device=device)),
        "allocating": lambda: torch.empty(512 << 20, dtype=torch.uint8, device=device),
        "freeing": free,
        "pinned memory": lambda: torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True),
        "a stream": lambda: torch.cuda.Stream(device).synchronize(),  # type: ignore[no-untyped-call]
    }


def judge_posted(values: Sequence[dict[str, float] | None]) -> list[Finding]:
    """Which waited."""
    (waited,) = [value for value in values if value]
    those = [name for name, seconds in waited.items() if seconds > 0.8 * _DELAY_S]
    found = f"Beside a receive {', '.join(name for name in waited if name not in those) or 'nothing'} went on."
    if those:
        found += f" {', '.join(those).capitalize()} waited for its message, which the order of receives allows for."
    return [Finding(Status.OK, found, details=waited)]


def _value(number: int, sender: int, place: int) -> float:
    return float(number * 100 + sender * 2 + place)


_HANGS = (
    "Receives, gathers and sends do not progress side by side: leave CUDA_DEVICE_MAX_CONNECTIONS to the strategy, "
    "update NCCL, and attach the JSON to an issue."
)
CHECKS = [
    Check(
        "posted-receives",
        "loading kernels, allocating and pinning memory beside a receive that waits",
        post_and_drain,
        judge_posted,
        limit_s=60.0,
        why_cuda_only=_OCCUPIES_NOTHING,
        advice="A posted receive holds up the device for ever: update the driver and NCCL.",
    ),
    *(
        Check(
            "queued-receives",
            "two receives queued on each channel, while this rank gathers and then sends",
            queue_two,
            judge_queued,
            way=f"{number} connection{'s'[: number != 1]}" if number else "",
            environment={_CONNECTIONS: str(number)} if number else {},
            limit_s=45.0,
            why_cuda_only=f"{_CONNECTIONS} is of CUDA" if number else "",
            advice=_HANGS,
        )
        for number in (0, 1, 8, 32)
    ),
]
