"""The messages of one rank in one step, derived from the programs of all ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from lightning_pp.schedule import Action, ActionKind, Schedule
from lightning_pp.schedule.simulation.messages import action_turns
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
    """One action of a rank's program with its messages.

    Attributes:
        action: The action.
        arrivals: The messages that it waits for.
        departures: The messages that it sends.
        posts: The messages to post receives for before it begins: its own, and some of those that follow.
    """

    action: Action
    arrivals: tuple[Message, ...]
    departures: tuple[Message, ...]
    posts: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Route:
    """All sends and receives of one rank in one step, in order.

    Attributes:
        incoming: For each other pipeline rank, its messages to this one in the order in which it sends them. Backends
            that match by order (NCCL) need receives posted in just that order.
        stops: This rank's actions.
        receipts: Tag of each incoming message to the number of messages that its sender is known to have received
            from this rank, in the order in which this rank sends them, once the message is here.
    """

    incoming: dict[int, tuple[Message, ...]]
    stops: tuple[Stop, ...]
    receipts: dict[int, int]


# how many messages beyond those that it waits for a rank has posted receives for, on each channel
_RECEIVES_AHEAD = 2


def plan_route(
    schedule: Schedule,
    plans: Sequence[StepPlan],
    rank: int,
    *,
    occupies_device: bool = False,
) -> Route:
    """Derives from the programs of all ranks what ``rank`` sends and receives.

    Args:
        schedule: The programs.
        plans: That of each microbatch.
        rank: The pipeline rank.
        occupies_device: Whether a send and a posted receive are work that the device has begun and waits in, as over
            NCCL. Whatever drains the device then waits for the other side: loading a kernel for the first time, freeing
            memory, making another communicator. So receives are posted as :func:`_posts_in_order` says. Otherwise
            ``_RECEIVES_AHEAD`` are posted ahead on each channel.
    """
    messages = _Messages(schedule, plans)
    stops = tuple(
        Stop(action, tuple(messages.of(action, sent=False)), tuple(messages.of(action, sent=True)))
        for action in schedule.programs[rank]
    )
    incoming, receipts = _incoming(schedule, messages, rank, stops)
    if occupies_device:
        posts = _posts_in_order(schedule, messages, rank)
    else:
        posts = _posts_ahead(stops, incoming)
    stops = tuple(replace(stop, posts=tuple(posts[number])) for number, stop in enumerate(stops))
    return Route(incoming, stops, receipts)


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
        if microbatch is None or action.kind in (ActionKind.W, ActionKind.OFFLOAD, ActionKind.RELOAD):
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


def _posts_in_order(schedule: Schedule, messages: _Messages, rank: int) -> list[list[Message]]:
    """For each action of ``rank`` the receives to post before it, so that ranks never wait in a circle.

    All ranks know one order of all actions: by the time at which they begin where messages take none (see
    :func:`action_turns`), and then by rank. A receive is posted before the first action that comes after the one
    that sends, and receives that are posted together are posted in the order of their senders.

    So however many ranks drain their device, and whenever, the earliest action that is not done can run: the receives
    that its rank has posted are of earlier actions, and the receivers of what its rank has sent have done all that they
    do before they post.
    """
    turns = action_turns(schedule)
    to_rank = [
        ((turn, other), message)
        for other, program in enumerate(schedule.programs)
        if other != rank
        for turn, action in zip(turns[other], program, strict=True)
        for message in messages.of(action, sent=True)
        if message.receiver == rank
    ]
    own = [(turn, rank) for turn in turns[rank]]
    posts: list[list[Message]] = [[] for _ in own]
    for sent, message in sorted(to_rank, key=itemgetter(0)):  # those of one action stay in the action's order
        posts[bisect_left(own, sent)].append(message)
    return posts


def _posts_ahead(stops: Sequence[Stop], incoming: Mapping[int, Sequence[Message]]) -> list[list[Message]]:
    """For each action the receives to post before it: ahead of need, in the order in which the senders send."""
    waiting = {sender: deque(messages) for sender, messages in incoming.items()}
    posted: dict[int, set[int]] = {sender: set() for sender in incoming}
    posts: list[list[Message]] = [[] for _ in stops]

    def post(sender: int, number: int) -> None:
        message = waiting[sender].popleft()
        posted[sender].add(message.tag)
        posts[number].append(message)

    def post_ahead(sender: int, number: int) -> None:
        while len(posted[sender]) < _RECEIVES_AHEAD and waiting[sender]:
            post(sender, number)

    for sender in incoming:
        post_ahead(sender, 0)
    for number, stop in enumerate(stops):
        for message in stop.arrivals:
            if message.sender not in incoming:  # this rank itself
                continue
            while message.tag not in posted[message.sender]:
                post(message.sender, number)
            posted[message.sender].remove(message.tag)
            post_ahead(message.sender, number)
    return posts
