"""Every message has one sender and one receiver who agree on its order, and arrives with what was sent."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.runtime.transport.route import Message, plan_route
from lightning_pp.schedule import Action, ActionKind, Schedule, build_forward_only, build_schedule
from lightning_pp.split.record.plan import StepPlan, build_plan
from lightning_pp.split.record.step_record import OutputLeaf, Reads, StepRecord, TensorSpec, UnitCall, Value


def chain_plan(num_stages: int, skip: bool = True, length: int = 3) -> StepPlan:
    """A plan for one unit a stage, each reading the one before; ``skip``: the last reads the first as well."""
    record = StepRecord()
    spec = TensorSpec((2, length), torch.float64)
    for index in range(num_stages):
        reads = Reads(values={Value(index - 1, 0)} if index else set())
        if skip and index == num_stages - 1 and index > 1:
            reads.values.add(Value(0, 0))
        leaf = OutputLeaf(spec, None, requires_grad=True)
        record.calls.append(UnitCall(index, f"unit{index}", reads, leaves=[leaf]))
        record.gradient_sources[Value(index, 0)] = frozenset(reads.values)
    record.tail.values.add(Value(num_stages - 1, 0))
    record.gradient_sources[None] = frozenset({Value(num_stages - 1, 0)})
    return build_plan(record, {f"unit{index}": index for index in range(num_stages)}, num_stages)


def schedules() -> list[Schedule]:
    found = []
    for name in ("gpipe", "1f1b", "zb_h1", "zb_h2", "interleaved_1f1b", "zb_v"):
        for num_ranks in (2, 3, 4):
            for num_microbatches in (1, 5):
                found.append(build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches))
    found += [build_forward_only(schedule.placement, 3) for schedule in found[-2:]]
    return found


@pytest.mark.parametrize(
    "schedule", schedules(), ids=lambda s: f"{s.name}-{s.placement.num_ranks}-{s.num_microbatches}"
)
def test_senders_and_receivers_agree(schedule: Schedule) -> None:
    plans = [chain_plan(schedule.placement.num_stages, length=2 + i % 2) for i in range(schedule.num_microbatches)]
    ranks = range(schedule.placement.num_ranks)
    routes = [plan_route(schedule, plans, rank) for rank in ranks]
    sent = [message for route in routes for stop in route.stops for message in stop.departures]
    needed = [message for route in routes for stop in route.stops for message in stop.arrivals]
    assert Counter(sent) == Counter(needed)
    assert len({message.tag for message in sent}) == len(sent)
    passes = 1 if schedule.forward_only else 2
    assert len(sent) == passes * sum(len(plan.edges) for plan in plans)
    for receiver in ranks:
        for sender in ranks:
            leaving = [
                message
                for stop in routes[sender].stops
                for message in stop.departures
                if message.receiver == receiver != sender
            ]
            assert list(routes[receiver].incoming.get(sender, ())) == leaving
        posted: list[Message] = []
        for stop in routes[receiver].stops:
            posted += stop.posts
            assert {message for message in stop.arrivals if message.sender != receiver} <= set(posted)
        for sender, messages in routes[receiver].incoming.items():
            assert [message for message in posted if message.sender == sender] == list(messages)


def run_step(step_twice: bool) -> list[float]:
    """Two ranks hand values forward and gradients back; the sums tell what arrived."""
    rank = dist.get_rank()
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=4)
    plans = [chain_plan(2, length=1 + i) for i in range(4)]
    transport = Transport([0, 1], rank, torch.device("cpu"))
    arrived: list[float] = []
    for step in range(2 if step_twice else 1):
        route = plan_route(schedule, plans, rank)
        transport.begin(route)
        for stop in route.stops:
            transport.post(stop)
            arrived += [float(tensor.sum()) for _, tensor in transport.receive(stop)]
            transport.send(stop, {Value(0, 0): made(stop.action, step)})
        transport.finish()
    transport.drain()
    return arrived


def made(action: Action, step: int) -> torch.Tensor:
    assert action.microbatch is not None
    value = 100.0 * step + 10.0 * action.stage + action.microbatch
    return torch.full((2, 1 + action.microbatch), value, dtype=torch.float64)


@pytest.mark.parametrize("step_twice", [False, True])
def test_what_is_sent_arrives(pool: WorkerPool, step_twice: bool) -> None:
    first, second = pool.run(run_step, step_twice, world_size=2, process_group=True)
    steps = (0, 1) if step_twice else (0,)
    sums = [
        [float(made(Action(stage, ActionKind.F, i), step).sum()) for step in steps for i in range(4)]
        for stage in (0, 1)
    ]
    assert second == sums[0]  # values of stage 0
    assert first == sums[1]  # gradients from stage 1


def abandon_a_step() -> list[float]:
    """Rank 0 gives up a step after sending; the next one must not take its messages."""
    rank = dist.get_rank()
    schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=2)
    plans = [chain_plan(2, length=1 + i) for i in range(2)]
    transport = Transport([0, 1], rank, torch.device("cpu"))
    route = plan_route(schedule, plans, rank)
    transport.begin(route)
    if rank == 0:
        assert route.stops[0].action == Action(0, ActionKind.F, 0)
        transport.send(route.stops[0], {Value(0, 0): made(Action(9, ActionKind.F, 0), 9)})
    transport.abandon()
    dist.barrier()
    arrived: list[float] = []
    transport.begin(route)
    for stop in route.stops:
        transport.post(stop)
        arrived += [float(tensor.sum()) for _, tensor in transport.receive(stop)]
        transport.send(stop, {Value(0, 0): made(stop.action, 0)})
    transport.finish()
    transport.drain()
    return arrived


def test_abandoned_step_does_not_poison_the_next(pool: WorkerPool) -> None:
    first, second = pool.run(abandon_a_step, world_size=2, process_group=True)
    assert second == [float(made(Action(0, ActionKind.F, i), 0).sum()) for i in range(2)]
    assert sorted(first) == sorted(float(made(Action(1, ActionKind.F, i), 0).sum()) for i in range(2))


def send_what_nobody_takes_yet(num_rows: int) -> tuple[int, list[bool]]:
    """Rank 1 ends its step while rank 0 has received none of its gradients.

    Returns:
        For rank 1: how many messages arrived, and for each tensor that it sent whether it has been let go after the
        next step's first message from rank 0.
    """
    rank = dist.get_rank()
    schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=6)
    plans = [chain_plan(2, length=num_rows) for _ in range(6)]
    transport = Transport([0, 1], rank, torch.device("cpu"))
    store = dist.distributed_c10d._get_default_store()
    route = plan_route(schedule, plans, rank)
    storages: list[StorageWeakRef] = []
    num_arrived = 0
    for step in range(2):
        transport.begin(route)
        for stop in route.stops:
            if rank == 0 and step == 0 and stop.action.kind is ActionKind.B and stop.action.microbatch == 0:
                store.wait(["step of rank 1 has ended"])
            transport.post(stop)
            num_arrived += len(transport.receive(stop))
            if rank == 1 and step == 1:
                break
            tensor = torch.zeros(2, num_rows, dtype=torch.float64)
            if stop.departures:
                storages.append(StorageWeakRef(tensor.untyped_storage()))
            transport.send(stop, {Value(0, 0): tensor})
            del tensor
            if step == 1:
                break
        if step == 0:
            transport.finish()
        if rank == 1:
            store.set("step of rank 1 has ended", "")
    are_let_go = [storage.expired() for storage in storages]
    dist.barrier()  # what is still under way, the barrier overtakes
    transport.abandon()
    return num_arrived, are_let_go


def test_a_step_ends_before_its_gradients_have_arrived(pool: WorkerPool) -> None:
    _, (num_arrived, are_let_go) = pool.run(send_what_nobody_takes_yet, 3, world_size=2, process_group=True)
    assert num_arrived == 6 + 1
    assert are_let_go == [True] * 6


def watch_large_tensors() -> bool:
    """Rank 0 sends a large value and hears nothing back for it; rank 1 only takes it."""
    rank = dist.get_rank()
    schedule = build_forward_only(build_schedule("1f1b", num_ranks=2, num_microbatches=1).placement, 1)
    transport = Transport([0, 1], rank, torch.device("cpu"))
    route = plan_route(schedule, [chain_plan(2, length=1 << 16)], rank)
    transport.begin(route)
    transport.post(route.stops[0])
    transport.receive(route.stops[0])
    tensor = torch.zeros(2, 1 << 16, dtype=torch.float64)
    storage = StorageWeakRef(tensor.untyped_storage())
    transport.send(route.stops[0], {Value(0, 0): tensor})
    del tensor
    while not storage.expired():  # the test's own timeout ends this
        time.sleep(0.01)
    transport.finish()
    return True


def test_large_tensors_are_let_go_before_the_step_ends(pool: WorkerPool) -> None:
    assert pool.run(watch_large_tensors, world_size=2, process_group=True) == [True, True]
