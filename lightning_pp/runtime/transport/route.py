"""What one rank sends and receives in one step, derived from the programs of all ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_pp.schedule import Action, ActionKind, Schedule
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.split.record.step_record import TensorSpec, Value


@dataclass(frozen=True)
class Message:
    """One tensor on its way: the value of an edge forward, or its gradient back.

    Attributes:
        tag: Distinguishes it from all others of the step.
        value: Which unit output it is, or is the gradient of.
        spec: Its shape and dtype.
        sender: The pipeline rank that it leaves.
        receiver: The pipeline rank that it goes to; may be the same.
        is_gradient: Whether it is a gradient.
    """

    tag: int
    value: Value
    spec: TensorSpec
    sender: int
    receiver: int
    is_gradient: bool


@dataclass(frozen=True)
class Stop:
    """One action of a rank's program with what it has to do with other stages.

    Attributes:
        action: The action.
        arrivals: The messages that it waits for.
        departures: The messages that it sends.
        posts: The messages of other ranks to post receives for before it waits: its own, and some of those that follow.
    """

    action: Action
    arrivals: tuple[Message, ...]
    departures: tuple[Message, ...]
    posts: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Route:
    """Everything that one rank sends and receives in one step, in the order in which it happens.

    Attributes:
        incoming: For each other pipeline rank, its messages to this one in the order in which it sends them. Backends
            that match by order (NCCL) need receives posted in just that order.
        first_posts: The messages to post receives for when the step begins.
        stops: This rank's actions.
        receipts: Tag of each incoming message to the number of messages that its sender is known to have received
            from this rank, in the order in which this rank sends them, once the message is here.
    """

    incoming: dict[int, tuple[Message, ...]]
    first_posts: tuple[Message, ...]
    stops: tuple[Stop, ...]
    receipts: dict[int, int]


# how many messages beyond those that it has come to a rank has posted a receive for, on each channel
_RECEIVES_AHEAD = 2


def plan_route(
    schedule: Schedule,
    plans: Sequence[StepPlan],
    rank: int,
    *,
    receives_occupy_device: bool = False,
) -> Route:
    """Derives from the programs of all ranks what ``rank`` sends and receives.

    Args:
        schedule: The programs.
        plans: That of each microbatch.
        rank: The pipeline rank.
        receives_occupy_device: Whether a posted receive is work that the device has begun and waits in, as over NCCL.
            Whatever drains the device then waits for the message: loading a kernel for the first time, freeing memory,
            making another communicator. So a receive is posted ahead only where nobody can come to wait in a circle.
    """
    messages = _Messages(schedule, plans)
    stops = tuple(
        Stop(action, tuple(messages.of(action, sent=False)), tuple(messages.of(action, sent=True)))
        for action in schedule.programs[rank]
    )
    incoming, receipts = _incoming(schedule, messages, rank, stops)
    first_stops = _first_stops_to_post(schedule, messages, rank) if receives_occupy_device else {}
    first_posts, stops = _with_posts(stops, incoming, first_stops)
    return Route(incoming, first_posts, stops, receipts)


class _Messages:
    """The messages of each action of any rank."""

    def __init__(self, schedule: Schedule, plans: Sequence[StepPlan]) -> None:
        self._rank_of_stage = schedule.placement.rank_of_stage
        self._plans = plans
        self._numbers = [{edge: number for number, edge in enumerate(plan.edges)} for plan in plans]
        self._most_edges = max(len(plan.edges) for plan in plans)

    def of(self, action: Action, *, sent: bool) -> Iterator[Message]:
        """What ``action`` sends, or waits for."""
        microbatch = action.microbatch
        if microbatch is None or action.kind is ActionKind.W:
            return
        stage = self._plans[microbatch].stages[action.stage]
        is_gradient = action.kind is not ActionKind.F
        # a forward receives and then sends values; a backward receives gradients of what was sent, and so on
        for edge in stage.sends if sent is not is_gradient else stage.receives:
            if edge.has_gradient or not is_gradient:
                tag = 2 * (microbatch * self._most_edges + self._numbers[microbatch][edge]) + is_gradient
                source, target = self._rank_of_stage[edge.source], self._rank_of_stage[edge.target]
                sender, receiver = (target, source) if is_gradient else (source, target)
                yield Message(tag, edge.value, edge.spec, sender, receiver, is_gradient)


def _incoming(
    schedule: Schedule, messages: _Messages, rank: int, stops: Sequence[Stop]
) -> tuple[dict[int, tuple[Message, ...]], dict[int, int]]:
    """:attr:`Route.incoming` and :attr:`Route.receipts` of ``rank``."""
    incoming: dict[int, tuple[Message, ...]] = {}
    receipts: dict[int, int] = {}
    for other, program in enumerate(schedule.programs):
        if other == rank:
            continue
        to_other = [message.tag for stop in stops for message in stop.departures if message.receiver == other]
        arrived: set[int] = set()
        ordered: list[Message] = []
        num_known = 0
        for action in program:
            arrived.update(message.tag for message in messages.of(action, sent=False) if message.sender == rank)
            while num_known < len(to_other) and to_other[num_known] in arrived:
                num_known += 1
            for message in messages.of(action, sent=True):
                if message.receiver == rank:
                    ordered.append(message)
                    receipts[message.tag] = num_known
        if ordered:
            incoming[other] = tuple(ordered)
    return incoming, receipts


def _first_stops_to_post(schedule: Schedule, messages: _Messages, rank: int) -> dict[int, int]:
    """For the tag of each message to ``rank`` the first of its actions that comes after the one that sends it.

    After: in the order in which actions begin where each takes one unit of time and messages take none, and those that
    begin together are ordered by their rank. All ranks find the same order, in which they could run one action after
    the other. So what a rank waits for comes from earlier actions than its next one, before which others wait for what
    comes from earlier ones still: nobody waits in a circle, however many ranks drain their device, and whenever.
    """
    sent: dict[int, tuple[int, int]] = {}
    ends_of: dict[int, int] = {}
    to_rank: list[int] = []
    own: list[tuple[int, int]] = []  # this rank's actions
    waiting = {other: deque(program) for other, program in enumerate(schedule.programs)}
    ends = dict.fromkeys(waiting, 0)
    while any(waiting.values()):
        for other, program in waiting.items():
            while program:
                arrivals = [message.tag for message in messages.of(program[0], sent=False)]
                if not all(tag in sent for tag in arrivals):
                    break
                begin = max(ends[other], *(ends_of[tag] for tag in arrivals), 0)
                action = program.popleft()
                ends[other] = begin + (action.microbatch is not None)
                if other == rank:
                    own.append((begin, rank))
                for message in messages.of(action, sent=True):
                    sent[message.tag], ends_of[message.tag] = (begin, other), ends[other]
                    if message.receiver == rank != message.sender:
                        to_rank.append(message.tag)
    return {tag: bisect_left(own, sent[tag]) for tag in to_rank}


def _with_posts(
    stops: tuple[Stop, ...], incoming: Mapping[int, Sequence[Message]], first_stops: Mapping[int, int]
) -> tuple[tuple[Message, ...], tuple[Stop, ...]]:
    """When the receive for each message is posted: ahead of need, in the order in which its sender sends.

    Args:
        stops: This rank's actions.
        incoming: The messages to it.
        first_stops: For tags the first stop at which the receive may be posted; others may be at any time.
    """
    waiting = {sender: deque(messages) for sender, messages in incoming.items()}
    posted: dict[int, set[int]] = {sender: set() for sender in incoming}
    posts: list[Message] = []

    def post(sender: int) -> None:
        message = waiting[sender].popleft()
        posted[sender].add(message.tag)
        posts.append(message)

    def post_ahead(sender: int, number: int) -> None:
        while len(posted[sender]) < _RECEIVES_AHEAD and waiting[sender]:
            if first_stops.get(waiting[sender][0].tag, 0) > number:
                break
            post(sender)

    for sender in incoming:
        post_ahead(sender, 0)
    first_posts = tuple(posts)
    planned = []
    for number, stop in enumerate(stops):
        posts.clear()
        if first_stops and stop.action.microbatch is not None:  # what has been sent since may allow it
            for sender in incoming:
                post_ahead(sender, number)
        for message in stop.arrivals:
            sender = message.sender
            if sender not in incoming:  # this rank itself
                continue
            while message.tag not in posted[sender]:
                post(sender)
            posted[sender].remove(message.tag)
            post_ahead(sender, number)
        planned.append(replace(stop, posts=tuple(posts)))
    return first_posts, tuple(planned)
