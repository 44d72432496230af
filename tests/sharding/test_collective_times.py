"""What a rank waits of gathers and reductions, and what of them is hidden, where another rank comes late."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pool import WorkerPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_pp.sharding.fsdp import ShardedUnits
from lightning_pp.sharding.replicated_units import ReplicatedUnits
from lightning_pp.sharding.units.collective_times import CollectiveClock

LATE_MS = 100.0


def times_of_a_step(kind: str, is_hidden: bool) -> dict[str, Any]:
    """A step of two units in which rank 1 is late with everything, on rank 0 by unit.

    Args:
        kind: Whether units are sharded or whole.
        is_hidden: Whether ranks have other work until a collective has ended, and wait then.
    """
    torch.manual_seed(0)
    clock = CollectiveClock(torch.device("cpu"))
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)})
    units: Any
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        units = ShardedUnits(dict(model.items()), mesh=mesh, clock=clock)
    else:
        units = ReplicatedUnits(dict(model.items()), clock=clock)

    def together(start: Callable[[], None]) -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(LATE_MS / 1e3)
        start()
        work_until = time.perf_counter() + 3 * LATE_MS / 1e3
        while is_hidden and time.perf_counter() < work_until:
            clock.look()

    step(units, model, lambda start: start())  # FSDP2 makes the gathered parameters when it gathers first
    clock.begin(is_on=True)
    step(units, model, together)
    times = clock.times()
    assert times is not None
    clock.begin(is_on=False)
    step(units, model, lambda start: start())
    assert clock.times() is None
    return times.sums_by(lambda unit: unit)


def step(units: Any, model: nn.ModuleDict, together: Callable[[Callable[[], None]], None]) -> None:
    if isinstance(units, ShardedUnits):
        units.begin_step()
        together(lambda: [units.unshard(name) for name in model] and None)
    loss = model["second"](model["first"](torch.ones(3, 8))).sum()
    loss.backward()
    for name in ("second", "first"):
        together(lambda name=name: units.reduce(name))  # type: ignore[misc]
    units.end_of_batch(reduce=True)


def both(kind: str) -> list[dict[str, Any]]:
    return [times_of_a_step(kind, is_hidden) for is_hidden in (False, True)]


def test_of_sharded_units(pool: WorkerPool) -> None:
    (exposed, hidden), _ = pool.run(both, "sharded", world_size=2, process_group=True)
    assert set(exposed) == set(hidden) == {"first", "second"}
    # rank 0 goes to wait at once, for what another rank has not begun
    first = exposed["first"]
    assert first["gather_exposed_ms"] > 0.5 * LATE_MS > first["gather_hidden_ms"]
    assert first["reduce_exposed_ms"] + first["reduce_hidden_ms"] > 0.5 * LATE_MS
    # rank 0 has other work until then
    for sums in hidden.values():
        assert sums["gather_hidden_ms"] > 0.5 * LATE_MS > sums["gather_exposed_ms"]
        assert sums["reduce_hidden_ms"] > 0.5 * LATE_MS > sums["reduce_exposed_ms"]


def test_of_whole_units(pool: WorkerPool) -> None:
    (exposed, hidden), _ = pool.run(both, "whole", world_size=2, process_group=True)
    assert sum(sums["reduce_exposed_ms"] for sums in exposed.values()) > 0.5 * LATE_MS
    for sums in hidden.values():
        assert sums["reduce_hidden_ms"] > 0.5 * LATE_MS > sums["reduce_exposed_ms"]
        assert sums["gather_hidden_ms"] == sums["gather_exposed_ms"] == 0.0
