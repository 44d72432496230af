"""One rank's program with its messages, derived from the programs of all ranks and the plans of a step."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Stop:
    """One action of a rank's program with everything that is known before the step.

    Attributes:
        action: The action.
        arrivals: The messages that it waits for.
        departures: The messages that it sends.
        queues: Whether the backward of its stage and microbatch queues weight gradients.
        offloaded: The share of what the F of its stage and microbatch saves that waits on the host.
        posts: The messages to post receives for before it begins: its own, and some of those that follow.
    """

    action: Action
    arrivals: tuple[Message, ...]
    departures: tuple[Message, ...]
    queues: bool
    offloaded: float
    posts: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Route:
    """One rank's program, with all its sends and receives in order.

    Attributes:
        made_from: The schedule and the plans, kept so that their ids stay theirs.
        incoming: For each other pipeline rank, its messages to this one in the order in which it sends them. Backends
            that match by order (NCCL) need receives posted in just that order.
        stops: This rank's actions.
        receipts: Tag of each incoming message to the number of messages that its sender is known to have received
            from this rank, in the order in which this rank sends them, once the message is here.
        sent_bytes: What each stage sends to other ranks.
    """

    made_from: tuple[Schedule | StepPlan, ...]
    incoming: dict[int, tuple[Message, ...]]
    stops: tuple[Stop, ...]
    receipts: dict[int, int]
    sent_bytes: Mapping[int, int]


# how many messages beyond those that it waits for a rank has posted receives for, on each channel
_RECEIVES_AHEAD = 2


def plan_route(
    schedule: Schedule,
    plans: Sequence[StepPlan],
    rank: int,
    *,
    occupies_device: bool = False,
    num_senders: int = 1,
    queuing: Collection[ActionKind] = (ActionKind.I,),
) -> Route:
    """Derives from the programs of all ranks what ``rank`` does, sends and receives.

    Args:
        schedule: The programs.
        plans: That of each microbatch.
        rank: The pipeline rank.
        num_senders: So many ranks send a part of each message.
        queuing: The backwards that queue weight gradients; other microbatches pay nothing for it.
        occupies_device: Whether a send and a posted receive are work that the device has begun and waits in, as over
            NCCL. Whatever drains the device then waits for the other side: loading a kernel for the first time, freeing
            memory, making another communicator. So receives are posted as :func:`_posts_in_order` says. Otherwise
            ``_RECEIVES_AHEAD`` are posted ahead on each channel.
    """
    messages, program = _Messages(schedule, plans), schedule.programs[rank]
    queued = {(action.stage, action.microbatch) for action in program if action.kind in queuing}
    offloaded = {(action.stage, action.microbatch) for action in program if action.kind is ActionKind.OFFLOAD}
    share = schedule.offload_shares[rank] if schedule.offload_shares else 1.0
    stops: list[Stop] = []
    sent_bytes: Counter[int] = Counter()
    for action in program:
        arrivals, departures = (tuple(messages.of(action, sent=sent)) for sent in (False, True))
        place = action.stage, action.microbatch
        stops.append(Stop(action, arrivals, departures, place in queued, share if place in offloaded else 0.0))
        to_others = (message.spec for message in departures if message.receiver != rank)
        sent_bytes[action.stage] += sum(spec.sent_bytes(num_senders) for spec in to_others)
    incoming, receipts = _incoming(schedule, messages, rank, stops)
    posts = _posts_in_order(schedule, messages, rank) if occupies_device else _posts_ahead(stops, incoming)
    posted = tuple(replace(stop, posts=tuple(receives)) for stop, receives in zip(stops, posts, strict=True))
    return Route((schedule, *plans), incoming, posted, receipts, sent_bytes)


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
