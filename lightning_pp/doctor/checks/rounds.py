"""Many steps of messages in the orders of schedules, mixed with gathers and reductions among all ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.doctor.checks.groups import TIMEOUT, join, settle
from lightning_pp.doctor.findings import Check, Finding, Rank, Status
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.runtime.transport.route import Message, Route, plan_route
from lightning_pp.schedule import build_schedule
from lightning_pp.split.record.plan import StepPlan, build_plan
from lightning_pp.split.record.step_record import OutputLeaf, Reads, StepRecord, TensorSpec, UnitCall, Value

_NUM_ROUNDS = 200
_NUM_ROUNDS_QUICK = 40
_SCHEDULES = ("1f1b", "zb_h1", "zb_v")
_DTYPES = (torch.float32, torch.bfloat16, torch.int16)
_SIZES = (1, 1000, 50_000)


def run_rounds(rank: Rank) -> dict[str, Any]:
    """Every rank makes the same random choices; every number that arrives is compared with the one that was sent."""
    join(rank)
    transport = Transport(range(rank.num_ranks), rank.rank, rank.device, TIMEOUT, name="doctor/rounds")
    choices, routes = random.Random(1), dict[tuple[Any, ...], Route]()
    wrong: list[str] = []
    num_rounds = _NUM_ROUNDS_QUICK if rank.is_quick else _NUM_ROUNDS
    for number in range(num_rounds):
        key = choices.choice(_SCHEDULES), choices.choice(_DTYPES), choices.choice(_SIZES), choices.randint(1, 4)
        collectives = [choices.choice(("gather", "reduction")) for _ in range(choices.randint(0, 3))]
        rank.note(f"round {number + 1} of {num_rounds}: {key[0]}, {key[1]}, {key[2]} elements, {collectives}")
        if key not in routes:
            routes[key] = _route(rank, *key)
        wrong += _run_round(rank, transport, routes[key], number, collectives)
    transport.drain()
    settle(rank.device)
    return {"num_rounds": num_rounds, "wrong": wrong[:20]}


def judge(values: Sequence[dict[str, Any]]) -> list[Finding]:
    """Whether all numbers were right."""
    wrong = [text for value in values for text in value["wrong"]]
    number = values[0]["num_rounds"]
    if wrong:
        advice = "Messages are mixed up or damaged: update NCCL and torch; attach the JSON to an issue."
        return [Finding(Status.FAILURE, f"{wrong[0]} ({len(wrong)} or more in {number} rounds)", advice, wrong)]
    found = f"{number} random rounds of messages, gathers and reductions gave the right numbers."
    return [Finding(Status.OK, found)]


def _route(rank: Rank, schedule: str, dtype: torch.dtype, num_elements: int, num_microbatches: int) -> Route:
    """What this rank sends and receives if every stage reads the one before."""
    built = build_schedule(schedule, num_ranks=rank.num_ranks, num_microbatches=num_microbatches)
    plan = _chain(built.placement.num_stages, TensorSpec((num_elements,), dtype))
    occupies = rank.device.type != "cpu"
    return plan_route(built, [plan] * num_microbatches, rank.rank, receives_occupy_device=occupies)


def _chain(num_stages: int, spec: TensorSpec) -> StepPlan:
    record = StepRecord()
    for index in range(num_stages):
        reads = Reads(values={Value(index - 1, 0)} if index else set())
        record.calls.append(UnitCall(index, f"unit{index}", reads, leaves=[OutputLeaf(spec, None, requires_grad=True)]))
        record.gradient_sources[Value(index, 0)] = frozenset(reads.values)
    record.tail.values.add(Value(num_stages - 1, 0))
    record.gradient_sources[None] = frozenset({Value(num_stages - 1, 0)})
    return build_plan(record, {f"unit{index}": index for index in range(num_stages)}, num_stages)


def _run_round(rank: Rank, transport: Transport, route: Route, number: int, collectives: list[str]) -> list[str]:
    wrong: list[str] = []
    under_way: list[tuple[Any, Tensor, float, str]] = []
    due = {(place + 1) * len(route.stops) // (len(collectives) + 1): kind for place, kind in enumerate(collectives)}
    pending = list(collectives)
    transport.begin(route)
    for place, stop in enumerate(route.stops):
        for (_, tensor), message in zip(transport.receive(stop), stop.arrivals, strict=True):
            expected = _number(number, message)
            if not bool((tensor == expected).all()):
                wrong.append(
                    f"In round {number + 1} {stop.action} of rank {rank.rank} received {float(tensor[0]):g} from rank "
                    f"{message.sender} in place of {expected}"
                )
        if place in due and pending:
            under_way.append(_begin_collective(rank, pending.pop(0), number))
        sent = {
            message.value: torch.full(message.spec.shape, _number(number, message), device=rank.device).to(
                message.spec.dtype
            )
            for message in stop.departures
        }
        transport.send(stop, sent)
    transport.finish()
    under_way += [_begin_collective(rank, kind, number) for kind in pending]
    for work, result, expected_sum, kind in under_way:
        work.wait()
        if float(result.sum()) != expected_sum:
            text = f"The {kind} of round {number + 1} gave {float(result.sum()):g} on rank {rank.rank}"
            wrong.append(f"{text} in place of {expected_sum:g}")
    return wrong


def _begin_collective(rank: Rank, kind: str, number: int) -> tuple[Any, Tensor, float, str]:
    """The work, its result, the sum that this should have, and its kind."""
    mine = torch.full((8,), float(rank.rank + number % 7), device=rank.device)
    total = 8.0 * sum(other + number % 7 for other in range(rank.num_ranks))
    if kind == "gather":
        result = torch.empty(8 * rank.num_ranks, device=rank.device)
        return dist.all_gather_into_tensor(result, mine, async_op=True), result, total, kind
    return dist.all_reduce(mine, async_op=True), mine, total, kind


def _number(number: int, message: Message) -> int:
    """What a message of a round is full of; small enough for all dtypes."""
    return (number * 7 + message.tag * 3 + message.sender) % 113 + 1


CHECKS = [
    Check(
        "rounds",
        "random rounds of messages in the orders of schedules, mixed with gathers and reductions",
        run_rounds,
        judge,
        limit_s=70.0,
        advice="Leave CUDA_DEVICE_MAX_CONNECTIONS to the strategy, update NCCL, and attach the JSON to an issue.",
    )
]
