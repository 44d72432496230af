"""Which collectives a step makes under each mode, what is gathered at any time, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from counted_steps import ALL_REDUCE, GATHER, NUM_MICROBATCHES, SCATTER, fit, named
from pool import WorkerPool
from small_models import UNIT_BYTES, EvenModule, TiedModule

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError
from lightning_pp.runtime.split_backward import queue as deferred_queue
from lightning_pp.schedule import Sharding, build_schedule
from lightning_pp.schedule.gathering import fewest_gathers
from lightning_pp.schedule.sharding import unit_uses

TWO_BY_TWO: dict[str, Any] = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
UNITS_PER_RANK = 4
BUDGETS = (1, 2, 3, 4)


def counts_by_mode(schedule: str, split_points: list[str], budgets: tuple[int, ...]) -> dict[str, list[dict[str, int]]]:
    """In a worker: for each mode, the data-parallel collectives of two batches of one optimizer step, warmed up."""
    found = {}
    settings: list[dict[str, Any]] = [{"sharding": mode} for mode in ("replicate", "shard_grad_op")]
    settings += [{"sharding": "full_shard", "unshard_budget": budget * UNIT_BYTES} for budget in budgets]
    for arguments in settings:
        arguments |= {"schedule": schedule, "split_points": split_points, **TWO_BY_TWO}
        strategy, batches, _ = fit(EvenModule(), num_batches=4, accumulate=2, **arguments)
        budget = arguments.get("unshard_budget", 0) // UNIT_BYTES
        found[f"{arguments['sharding']} {budget}"] = named(strategy, batches)[2:]
    return found


@pytest.mark.parametrize(
    ("schedule", "budgets"),
    [
        ("zb_v", (2,)),
        pytest.param("1f1b", (1, 3), marks=pytest.mark.nightly),
        *(pytest.param(schedule, BUDGETS, marks=pytest.mark.nightly) for schedule in ("1f1b", "zb_v")),
    ],
    ids=str,
)
def test_collectives_of_a_step(pool: WorkerPool, schedule: str, budgets: tuple[int, ...]) -> None:
    """Gathers: one per unit, or near the fewest of any plan; reductions: one per unit, none while accumulating."""
    plain = build_schedule(schedule, num_ranks=2, num_microbatches=NUM_MICROBATCHES)
    stages_per_rank = plain.placement.num_stages // 2
    units = UNITS_PER_RANK // stages_per_rank
    names = tuple(tuple(f"{stage}.{unit}" for unit in range(units)) for stage in range(plain.placement.num_stages))
    sharding = Sharding("full_shard", names, {name: UNIT_BYTES for stage in names for name in stage})
    split_points = [f"units.{units * stage}" for stage in range(1, len(names))]
    for rank, counts in enumerate(pool.run(counts_by_mode, schedule, split_points, budgets, world_size=4, timeout=300)):
        assert counts.pop("replicate 0") == [{}, {ALL_REDUCE: UNITS_PER_RANK}]
        assert counts.pop("shard_grad_op 0") == [{GATHER: UNITS_PER_RANK}, {SCATTER: UNITS_PER_RANK}]
        for budget, (accumulating, last) in zip(budgets, counts.values(), strict=True):
            uses = [unit for _, used in unit_uses(plain.programs[rank // 2], sharding) for unit in used]
            fewest = fewest_gathers(uses, sharding.num_bytes, budget * UNIT_BYTES)
            assert fewest <= accumulating[GATHER] <= 1.25 * fewest
            assert accumulating == {GATHER: accumulating[GATHER]}
            assert last == {GATHER: accumulating[GATHER], SCATTER: UNITS_PER_RANK}


def counts_of_hsdp() -> list[dict[str, int]]:
    strategy, batches, _ = fit(
        EvenModule(),
        num_batches=2,
        schedule="1f1b",
        pipeline_parallel_size=1,
        data_parallel_size=4,
        data_parallel_replicate_size=2,
    )
    mesh = strategy.device_mesh
    assert mesh.mesh_dim_names == ("pipeline", "data_parallel_replicate", "data_parallel_shard")
    assert mesh["data_parallel"].size() == 4
    return named(strategy, batches)[1:]


def test_hsdp_reduces_shards_between_replicas(pool: WorkerPool) -> None:
    """All eight units are on each rank; scattered within two ranks, then summed between two."""
    for counts in pool.run(counts_of_hsdp, world_size=4, timeout=120):
        assert counts == [{GATHER: 8, SCATTER: 8, ALL_REDUCE: 8}]


# --------------------------------------------------------------------------- memory


def peaks(schedule: str, replicate: int) -> list[tuple[int, int]]:
    """In a worker: for some budgets, the budget and the most bytes gathered, in training and validation."""
    found = []
    tied = 4 * 24 * 8  # the largest unit: embedding and head are one
    for budget in (tied, tied + UNIT_BYTES, 5 * UNIT_BYTES):
        _, _, gathered = fit(
            TiedModule(),
            num_batches=2,
            accumulate=2,
            validate=True,
            schedule=schedule,
            sharding="full_shard",
            unshard_budget=budget,
            data_parallel_replicate_size=replicate,
            pipeline_parallel_size=2 // replicate,
            data_parallel_size=2 * replicate,
        )
        found.append((budget, max(gathered)))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(("schedule", "replicate"), [("zb_v", 1), ("interleaved_zb", 2)])
def test_gathered_bytes_stay_within_the_budget(pool: WorkerPool, schedule: str, replicate: int) -> None:
    for rank in pool.run(peaks, schedule, replicate, world_size=4, timeout=300):
        for budget, peak in rank:
            assert UNIT_BYTES <= peak <= budget
    # what is there is used
    assert rank[-1][1] > rank[0][0]


# --------------------------------------------------------------------------- shared parameters


def collectives_of_tied(schedule: str, tied: bool) -> tuple[int, bool]:
    """In a worker: all collectives of a warm step without replicas, and whether both ends are one parameter here."""
    module = TiedModule(tied)
    _, batches, _ = fit(module, num_batches=2, schedule=schedule, pipeline_parallel_size=2, data_parallel_size=1)
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    both = {"embedding.weight", "head.weight"} <= set(names)
    return sum(batches[1].values()), both and module.head.weight is module.embedding.weight


@pytest.mark.nightly
def test_tied_ends_on_one_rank_cost_no_communication(pool: WorkerPool) -> None:
    """In a V one rank has both; else both ranks have one each, and one collective sums their gradients."""
    counts = {
        (schedule, tied): pool.run(collectives_of_tied, schedule, tied, world_size=2, timeout=120)
        for schedule in ("zb_v", "1f1b")
        for tied in (True, False)
    }
    assert [number for number, _ in counts["zb_v", True]] == [number for number, _ in counts["zb_v", False]]
    assert counts["zb_v", True][0][1]
    assert [number for number, _ in counts["1f1b", True]] == [1 + number for number, _ in counts["1f1b", False]]


# --------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"sharding": "zero3"}, "sharding='zero3' is unknown: choose one of replicate, shard_grad_op, full_shard"),
        (
            {"unshard_budget": 100},
            "unshard_budget=100 limits the memory of gathered parameters in sharding='full_shard'",
        ),
        ({"sharding": "full_shard", "unshard_budget": 0}, "unshard_budget=0 must be a number of bytes"),
        ({"sharding": "full_shard", "unshard_budget": "6GiB"}, "unshard_budget='6GiB' must be a number of bytes"),
        ({"sharding": "replicate", "data_parallel_replicate_size": 2}, "sharding='replicate' shards nothing"),
        ({"sharding": "replicate", "cpu_offload": True}, "sharding='replicate' keeps whole parameters on every device"),
        ({"cpu_offload": "optimizer"}, "cpu_offload='optimizer' must be True or False"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error.replace("(", r"\(")):
        PipelineParallelStrategy(**arguments)


def too_small_a_budget() -> str:
    with pytest.raises(ConfigurationError) as error:
        fit(EvenModule(), num_batches=1, schedule="1f1b", sharding="full_shard", unshard_budget=100, **TWO_BY_TWO)
    return str(error.value)


def test_budget_below_one_unit(pool: WorkerPool) -> None:
    for message in pool.run(too_small_a_budget, world_size=4, timeout=60):
        assert message.startswith("unshard_budget=100 bytes is too small: unit units.0")
        assert f"takes {UNIT_BYTES} bytes when gathered" in message


# --------------------------------------------------------------------------- overlap


def order_of_events(sharding: str, schedule: str) -> list[str]:
    """In a worker: weight gradients ("w") and reductions ("r") of a warm step, in the order in which they begin."""
    events: list[str] = []
    add_all = deferred_queue._add_all
    names = ("reduce_scatter_single", "_reduce_scatter_base", "allreduce")
    names = tuple(name for name in names if name in vars(dist.ProcessGroup))
    # what getattr gives is no method any more, and would break the class when it is put back
    originals = {name: vars(dist.ProcessGroup)[name] for name in names}

    def noting(name: str) -> Callable[..., Any]:
        def call(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            events.append("r")
            return originals[name](self, *args, **kwargs)

        return call

    def noting_add(entries: list[Any]) -> None:
        events.extend("w" * len(entries))
        add_all(entries)

    deferred_queue._add_all = noting_add
    for name in names:
        setattr(dist.ProcessGroup, name, noting(name))
    try:
        fit(EvenModule(), num_batches=1, schedule=schedule, sharding=sharding, **TWO_BY_TWO)
    finally:
        deferred_queue._add_all = add_all
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)
    return events


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("sharding", "schedule"), [("shard_grad_op", "1f1b"), ("replicate", "zb_h1")])
def test_each_unit_is_reduced_after_its_own_last_weight_gradient(
    pool: WorkerPool, sharding: str, schedule: str
) -> None:
    """The last W of a stage of four units of two linear layers: two gradients, a reduction, two gradients, ..."""
    for events in pool.run(order_of_events, sharding, schedule, world_size=4, timeout=120):
        order = "".join(events)
        assert "wwr" * UNITS_PER_RANK in order
        assert order.endswith("wwr") or set(order.rsplit("wwr", 1)[1]) <= {"r"}  # later ones are of logs
