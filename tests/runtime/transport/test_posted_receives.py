"""On backends whose receives occupy the device none is posted that waits for what this rank has yet to do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test_transport import chain_plan

from lightning_pp.runtime.transport.route import Message, Route, plan_route
from lightning_pp.schedule import Schedule, build_forward_only, build_schedule

FAMILIES = (
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"
)  # fmt: skip


def schedules(name: str) -> list[Schedule]:
    found = []
    for num_ranks in (2, 3, 4, 8):
        for num_microbatches in (1, 2, num_ranks, 2 * num_ranks + 1):
            found.append(build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches))
    return [*found, *(build_forward_only(schedule.placement, 5) for schedule in found[3::4])]


def sent_while_one_rests(routes: Sequence[Route], resting: int, num_done: int) -> set[int]:
    """Tags of what is sent if rank ``resting`` does no more than its first actions, and the others all they can."""
    sent = {message.tag for stop in routes[resting].stops[:num_done] for message in stop.departures}
    done = {rank: 0 for rank in range(len(routes)) if rank != resting}
    before = -1
    while before != sum(done.values()):
        before = sum(done.values())
        for rank in done:
            stops = routes[rank].stops
            while done[rank] < len(stops) and all(message.tag in sent for message in stops[done[rank]].arrivals):
                sent.update(message.tag for message in stops[done[rank]].departures)
                done[rank] += 1
    return sent


def actions_that_never_run(routes: Sequence[Route]) -> int:
    """How many actions are left if every rank drains its device before each: waits for all receives it has posted."""
    sent: set[int] = set()
    done = [0] * len(routes)
    posted = [{message.tag for message in route.first_posts} for route in routes]
    before = -1
    while before != sum(done):
        before = sum(done)
        for rank, route in enumerate(routes):
            while done[rank] < len(route.stops):
                stop = route.stops[done[rank]]
                posted[rank].update(message.tag for message in stop.posts)
                own = {message.tag for message in stop.arrivals if message.sender == rank}
                if not (posted[rank] | own) <= sent:
                    break
                sent.update(message.tag for message in stop.departures)
                done[rank] += 1
    return sum(len(route.stops) for route in routes) - sum(done)


def waits_for_itself(routes: Sequence[Route], rank: int) -> list[tuple[int, Message]]:
    """Receives that are posted, by the number of actions that are done then, and never end while the rank rests."""
    found = []
    for number, stop in enumerate(routes[rank].stops):
        posted = [*(routes[rank].first_posts if number == 0 else ()), *stop.posts]
        if posted:
            sent = sent_while_one_rests(routes, rank, number)
            found += [(number, message) for message in posted if message.tag not in sent]
    return found


def routes_of(schedule: Schedule, *, receives_occupy_device: bool) -> list[Route]:
    plans = [chain_plan(schedule.placement.num_stages)] * schedule.num_microbatches
    return [
        plan_route(schedule, plans, rank, receives_occupy_device=receives_occupy_device)
        for rank in range(schedule.placement.num_ranks)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_receive_waits_for_what_its_rank_has_yet_to_send(name: str) -> None:
    for schedule in schedules(name):
        routes = routes_of(schedule, receives_occupy_device=True)
        assert actions_that_never_run(routes) == 0
        for rank, route in enumerate(routes):
            assert waits_for_itself(routes, rank) == []
            posted = [*route.first_posts, *(message for stop in route.stops for message in stop.posts)]
            for sender, messages in route.incoming.items():
                # channels match by order
                assert [message for message in posted if message.sender == sender] == list(messages)


@pytest.mark.parametrize("name", FAMILIES)
def test_receives_are_posted_ahead_where_nothing_is_waited_for(name: str) -> None:
    """A third of them or more, so that messages travel while the rank computes."""
    schedule = build_schedule(name, num_ranks=4, num_microbatches=12)
    ahead = total = 0
    for route in routes_of(schedule, receives_occupy_device=True):
        needed = {message.tag: number for number, stop in enumerate(route.stops) for message in stop.arrivals}
        posted = {message.tag: number for number, stop in enumerate(route.stops) for message in stop.posts}
        posted |= {message.tag: -1 for message in route.first_posts}
        ahead += sum(posted[tag] < needed[tag] for tag in posted)
        total += len(posted)
    assert ahead >= total / 3, (ahead, total)


def test_the_posting_of_backends_with_tags_would_wait_for_itself() -> None:
    for name in FAMILIES:
        routes = routes_of(build_schedule(name, num_ranks=4, num_microbatches=8), receives_occupy_device=False)
        assert any(waits_for_itself(routes, rank) for rank in range(3)), name
        assert actions_that_never_run(routes) > 0, name
