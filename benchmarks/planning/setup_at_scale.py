"""What the groups of a job cost: ``python benchmarks/planning/setup_at_scale.py [--pipeline 16] [--replicas 4]``.

As many processes as the job has ranks make the groups of this package over gloo on this host: the mesh, the groups for
small messages, and the channels of a schedule, which over NCCL carry the tensors. Printed are, for a rank, the calls of
``new_group``, the groups that it is in, the requests to the job's store, and the seconds until the slowest rank is
done. Beside them: the channels as a group for each direction of each pair of ranks of a pipeline, made by all ranks of
the world with torch's ``new_group``; and the same for 64 pipelines of 16 ranks, by a model that the counts here must
meet, with the seconds in which a store on this host answers so many requests.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore, device_mesh  # type: ignore[attr-defined] # torch exports it without saying so
from torch.multiprocessing.spawn import start_processes

from lightning_pp.distributed.control import make_control_groups
from lightning_pp.distributed.groups import agreed_groups, pair_group
from lightning_pp.distributed.meshes import make_meshes
from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.runtime.transport.channels import opening_order
from lightning_pp.schedule import Placement, build_schedule

TIMEOUT = timedelta(minutes=5)
SCALE = (16, 64)
NUM_ASKING, NUM_REQUESTS = 4, 4000


@dataclass
class Cost:
    """Of one part of the set-up, for the rank with the most of each.

    Attributes:
        made: Calls of ``new_group``, also of those that it is not in, and channels.
        requests: To the job's store.
        seconds: Until the slowest rank was done.
    """

    made: int
    requests: int
    seconds: float


class CountingStore(Store):
    """A store that counts what it is asked."""

    def __init__(self, store: TCPStore) -> None:
        super().__init__()
        self._store = store
        self.requests = 0

    def set(self, key: str, value: Any) -> None:
        self.requests += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        self.requests += 1
        return self._store.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
        self.requests += 1
        self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        self.requests += 1
        return self._store.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


def neighbours(placement: Placement) -> set[tuple[int, int]]:
    """The directed pairs of ranks that messages of a chain of stages go between."""
    ranks = placement.rank_of_stage
    pairs = {pair for pair in itertools.pairwise(ranks) if pair[0] != pair[1]}
    return pairs | {(target, source) for source, target in pairs}


def open_channels(sizes: ParallelSizes, placement: Placement) -> int:
    """As :class:`~lightning_pp.runtime.transport.channels.Transport` does it over NCCL; returns how many."""
    place, replica = divmod(dist.get_rank(), sizes.data_parallel)
    mine = [channel for channel in opening_order(neighbours(placement)) if place in channel]
    for channel in mine:
        group = pair_group(f"{replica}/{channel}", channel.index(place), "cpu", TIMEOUT)
        number = torch.zeros(1)
        (group.send([number], 1, 0) if channel[0] == place else group.recv([number], 0, 0)).wait()
    return len(mine)


def groups_of_all_pairs(sizes: ParallelSizes) -> int:
    """A group for each direction of each pair of a pipeline, made by all ranks of the world."""
    place, replica = divmod(dist.get_rank(), sizes.data_parallel)
    ranks = [other * sizes.data_parallel + replica for other in range(sizes.pipeline)]
    mine = ranks[place]
    wanted = [pair for other in ranks if other != mine for pair in ((mine, other), (other, mine))]
    agreed_groups(wanted)
    return 0


def run_rank(rank: int, sizes: ParallelSizes, port: int, schedule: str, results: Any) -> None:
    """One rank: makes all groups, part by part; rank 0 tells."""
    torch.set_num_threads(1)
    num_ranks = sizes.pipeline * sizes.data_parallel
    store = CountingStore(TCPStore("127.0.0.1", port, num_ranks, rank == 0, TIMEOUT))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    placement = build_schedule(schedule, num_ranks=sizes.pipeline, num_microbatches=sizes.pipeline).placement
    grid = torch.arange(num_ranks).reshape(sizes.pipeline, sizes.data_parallel, 1)
    parts: dict[str, Callable[[], Any]] = {
        "mesh": lambda: make_meshes("cpu", sizes),
        "groups for small messages": lambda: [make_control_groups(grid, TIMEOUT) for _ in range(2)],
        "channels": lambda: open_channels(sizes, placement),
        "all pairs by all ranks": lambda: groups_of_all_pairs(sizes),
    }
    costs, kept = {}, []
    for name, make in parts.items():
        dist.barrier()
        requests, start = store.requests, time.perf_counter()
        makes = dist.new_group  # of which torch's module for meshes has a name of its own
        with (
            patch.object(dist, "new_group", wraps=makes) as made,
            patch.object(device_mesh, "new_group", wraps=makes) as made_for_mesh,
        ):
            kept.append(make())
        mine = [
            made.call_count + made_for_mesh.call_count + (kept[-1] if isinstance(kept[-1], int) else 0),
            store.requests - requests,
            time.perf_counter() - start,
        ]
        most = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        costs[name] = Cost(int(most[0]), int(most[1]), float(most[2]))
    if rank == 0:
        results.put(costs)
    dist.barrier()
    os._exit(0)  # closing thousands of connections one by one is not what is measured


def ask(rank: int, port: int, seconds: Any) -> None:
    """One of the few that ask a store as fast as they can."""
    store: Any = TCPStore("127.0.0.1", port, NUM_ASKING, rank == 0, TIMEOUT)  # barrier() is not in torch's stubs
    store.barrier("begin", NUM_ASKING)
    start = time.perf_counter()
    for _ in range(NUM_REQUESTS):
        store.add("rate", 1)
    store.barrier("end", NUM_ASKING)
    seconds[rank] = time.perf_counter() - start
    store.barrier("told", NUM_ASKING)


def requests_per_second() -> float:
    """What a store on this host answers."""
    seconds: Any = multiprocessing.get_context("fork").Array("d", NUM_ASKING)
    start_processes(ask, (free_port(), seconds), NUM_ASKING, start_method="fork")  # type: ignore[no-untyped-call]
    slowest: float = max(seconds)
    return NUM_ASKING * NUM_REQUESTS / slowest


def free_port() -> int:
    """A port that nobody listens at."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port


def model(pipeline: int, replicas: int, num_channels: int) -> dict[str, tuple[int, int]]:
    """Of a rank with neighbours on both sides: calls of ``new_group``, or channels; and requests to the store.

    Over gloo a rank of a group of n asks 2 n + 1 times, for addresses mostly; one of a channel 5 times.
    """
    members = pipeline + replicas
    return {
        "mesh": (members, 2 * members + 2),
        "groups for small messages": (2 * members, 2 * (2 * members + 2)),
        "channels": (num_channels, 5 * num_channels),
        "all pairs by all ranks": (replicas * pipeline * (pipeline - 1), 2 * 5 * (pipeline - 1)),
    }


def main() -> None:
    """Prints a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b")
    options = parser.parse_args()
    sizes = ParallelSizes(options.pipeline, options.replicas)
    num_ranks = options.pipeline * options.replicas
    per_second = requests_per_second()
    results: Any = multiprocessing.get_context("fork").SimpleQueue()
    given = (sizes, free_port(), options.schedule, results)
    start_processes(run_rank, given, num_ranks, start_method="fork")  # type: ignore[no-untyped-call]
    costs: dict[str, Cost] = results.get()
    most = costs["channels"].made
    here, there = model(options.pipeline, options.replicas, most), model(*SCALE, most)
    print(
        f"{num_ranks} ranks, {options.replicas} pipelines of {options.pipeline}, {options.schedule}; "
        f"the store answers {per_second:,.0f} requests a second"
    )
    print("| | made | requests of a rank | seconds | made at 16 x 64 | requests of a rank | seconds of the store |")
    print("|---|---|---|---|---|---|---|")
    for name, cost in costs.items():
        if (cost.made, cost.requests) != here[name]:
            raise AssertionError(f"{name}: {cost} where the model has {here[name]}")
        made, requests = there[name]
        store_s = requests * SCALE[0] * SCALE[1] / per_second
        print(f"| {name} | {cost.made} | {cost.requests} | {cost.seconds:.2f} | {made} | {requests} | {store_s:.1f} |")


if __name__ == "__main__":
    main()
