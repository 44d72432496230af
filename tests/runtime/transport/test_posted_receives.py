"""Where sends and receives occupy the device, no rank comes to wait in a circle, however often devices are drained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from test_transport import chain_plan

from lightning_pp.runtime.transport.route import Message, Route, plan_route
from lightning_pp.schedule import Schedule, build_forward_only, build_schedule
from lightning_pp.schedule.sharding import Sharding, insert_sharding
from lightning_pp.schedule.simulation.messages import message_peaks
from lightning_pp.split.record.plan import StepPlan, build_plan
from lightning_pp.split.record.step_record import OutputLeaf, Reads, StepRecord, UnitCall, Value

FAMILIES = (
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"
)  # fmt: skip
KINDS = ("chain", "skip", "decoder", "mixed", "sharded")


def decoder_plan(num_stages: int) -> StepPlan:
    """A plan for one unit a stage: the first half encodes, and each of the others reads the code besides."""
    chain = chain_plan(num_stages, skip=False).record
    record = StepRecord()
    code = Value(max(0, num_stages // 2 - 1), 0)
    for call in chain.calls:
        values = {*call.reads.values, *([code] if call.index > code.call else [])}
        leaf = OutputLeaf(chain.spec(Value(call.index, 0)), None, requires_grad=True)
        record.calls.append(UnitCall(call.index, call.unit, Reads(values=values), leaves=[leaf]))
        record.gradient_sources[Value(call.index, 0)] = frozenset(values)
    record.tail.values.add(Value(num_stages - 1, 0))
    record.gradient_sources[None] = frozenset({Value(num_stages - 1, 0)})
    return build_plan(record, {f"unit{index}": index for index in range(num_stages)}, num_stages)


def plans_of(schedule: Schedule, kind: str) -> list[StepPlan]:
    num_stages = schedule.placement.num_stages
    chain, skip = chain_plan(num_stages, skip=False), chain_plan(num_stages)
    decoder = decoder_plan(num_stages)
    kinds = {"chain": [chain], "skip": [skip], "decoder": [decoder], "mixed": [decoder, chain], "sharded": [skip]}
    return [kinds[kind][number % len(kinds[kind])] for number in range(schedule.num_microbatches)]


def routes_of(schedule: Schedule, kind: str = "skip", *, occupies_device: bool = True) -> list[Route]:
    if kind == "sharded" and not schedule.forward_only:
        units = [f"unit{stage}" for stage in range(schedule.placement.num_stages)]
        sharding = Sharding("full_shard", tuple((unit,) for unit in units), dict.fromkeys(units, 1))
        schedule = insert_sharding(schedule, sharding)
    plans = plans_of(schedule, kind)
    return [
        plan_route(schedule, plans, rank, occupies_device=occupies_device)
        for rank in range(schedule.placement.num_ranks)
    ]


def schedules(name: str) -> Iterator[Schedule]:
    for num_ranks in (2, 3, 4, 8):
        for num_microbatches in (1, 2, num_ranks, 2 * num_ranks + 1):
            yield (schedule := build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches))
        yield build_forward_only(schedule.placement, 5)


def events_that_never_come(routes: Sequence[Route], *, rendezvous: bool) -> int:
    """How many posts and sends are left if every rank drains its device before each of them, and before each action.

    It then waits until all that it has posted a receive for is sent; and with ``rendezvous`` until receives are posted
    for all that it has sent. Ranks that drain less often wait for less.
    """
    events: list[list[tuple[str, Message | None]]] = []
    for rank, route in enumerate(routes):
        events.append([])
        for stop in route.stops:
            events[rank] += [("post", message) for message in stop.posts]
            events[rank] += [("act", None)]
            events[rank] += [("send", message) for message in stop.departures if message.receiver != rank]
    sent: set[int] = set()
    posted: set[int] = set()
    waits: list[set[int]] = [set() for _ in routes]  # tags, those of sends as negative numbers
    done = [0] * len(routes)
    before = -1
    while before != sum(done):
        before = sum(done)
        for rank, of_rank in enumerate(events):
            while done[rank] < len(of_rank):
                waits[rank] = {tag for tag in waits[rank] if not (tag in sent if tag > 0 else -tag in posted)}
                if waits[rank]:
                    break
                name, message = of_rank[done[rank]]
                if message is not None and name == "post":
                    posted.add(message.tag + 1)
                    waits[rank].add(message.tag + 1)
                elif message is not None:
                    sent.add(message.tag + 1)
                    if rendezvous:
                        waits[rank].add(-message.tag - 1)
                done[rank] += 1
    return sum(map(len, events)) - sum(done)


@pytest.mark.by_day(16)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_waits_for_ever_for_a_receive_or_for_a_send(name: str, kind: str) -> None:
    """Over all families and kinds of step 1,000 cases."""
    for schedule in schedules(name):
        routes = routes_of(schedule, kind)
        assert events_that_never_come(routes, rendezvous=True) == 0, (schedule.placement, schedule.num_microbatches)
        for route in routes:
            posted = [message for stop in route.stops for message in stop.posts]
            for sender, messages in route.incoming.items():
                # channels match by order
                assert [message for message in posted if message.sender == sender] == list(messages)


@pytest.mark.parametrize("name", FAMILIES)
def test_receives_are_posted_ahead_where_nothing_is_waited_for(name: str) -> None:
    """A third of them or more, so that messages travel while the rank computes."""
    schedule = build_schedule(name, num_ranks=4, num_microbatches=12)
    ahead = total = 0
    for route in routes_of(schedule):
        needed = {message.tag: number for number, stop in enumerate(route.stops) for message in stop.arrivals}
        posted = {message.tag: number for number, stop in enumerate(route.stops) for message in stop.posts}
        assert all(posted[tag] <= needed[tag] for tag in posted)
        ahead += sum(posted[tag] < needed[tag] for tag in posted)
        total += len(posted)
    assert ahead >= total / 3, (ahead, total)


def most_held(route: Route) -> int:
    """The most bytes of messages that a rank holds in the second of two steps, by the receipts that it gets."""
    held = most = 0
    kept: dict[int, list[Message]] = {}  # by receiver, gradients of the step before
    for _ in range(2):
        under_way: dict[int, list[Message]] = {}
        num_done: Counter[int] = Counter()
        most = held
        for stop in route.stops:
            held += sum(message.spec.num_bytes for message in stop.posts)
            most = max(most, held)
            for message in stop.arrivals:
                if message.sender == message.receiver:
                    continue
                done = route.receipts[message.tag]
                released = [
                    *kept.pop(message.sender, ()),
                    *under_way.get(message.sender, [])[num_done[message.sender] : done],
                ]
                num_done[message.sender] = max(done, num_done[message.sender])
                held -= sum(each.spec.num_bytes for each in released) + message.spec.num_bytes
            for message in stop.departures:
                if message.sender != message.receiver:
                    under_way.setdefault(message.receiver, []).append(message)
                    held += message.spec.num_bytes
            most = max(most, held)
        left = {receiver: messages[num_done[receiver] :] for receiver, messages in under_way.items()}
        held -= sum(each.spec.num_bytes for messages in kept.values() for each in messages)
        kept = {receiver: [each for each in messages if each.is_gradient] for receiver, messages in left.items()}
        held -= sum(each.spec.num_bytes for messages in left.values() for each in messages if not each.is_gradient)
    assert held == sum(each.spec.num_bytes for messages in kept.values() for each in messages)
    return most


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["chain", "skip", "decoder"])
def test_the_plan_counts_the_bytes_of_messages_that_a_rank_holds(name: str, kind: str) -> None:
    schedule = build_schedule(name, num_ranks=4, num_microbatches=12)
    edges = plans_of(schedule, kind)[0].edges
    values = [(edge.source, edge.target, *[edge.spec.num_bytes] * 2, edge.has_gradient) for edge in edges]
    for route, counted in zip(routes_of(schedule, kind), message_peaks(schedule, values), strict=True):
        most = most_held(route)
        assert most <= counted <= 1.5 * most, (most, counted)


def test_messages_in_parts_are_whole_while_they_are_used() -> None:
    schedule = build_forward_only(build_schedule("1f1b", num_ranks=2, num_microbatches=1).placement, 1)
    assert message_peaks(schedule, [(0, 1, 2, 8, False)]) == (2, 8)


def test_the_posting_of_backends_with_tags_would_wait_for_itself() -> None:
    for name, rendezvous in product(FAMILIES, (False, True)):
        schedule = build_schedule(name, num_ranks=4, num_microbatches=8)
        routes = routes_of(schedule, occupies_device=False)
        assert events_that_never_come(routes, rendezvous=rendezvous) > 0, name
