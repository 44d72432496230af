"""Moving tensors between the stages of one pipeline."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pp.distributed.groups import are_aborted, free_bytes, pair_group
from lightning_pp.distributed.watch.this_rank import RankStoppedError
from lightning_pp.runtime._torch_private import unrecorded
from lightning_pp.runtime.transport.route import Message, Route, Stop
from lightning_pp.runtime.transport.sends import Send, Sends
from lightning_pp.split.record.step_record import Value

_TAG_RANGE = 1 << 30
_TAGS_PER_STEP = 1 << 19
_MOST_ROUTES = 256
# as torch 2.11 maps them; complex numbers go as pairs of these
_DTYPES_OF_NCCL = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip


class _Lane(NamedTuple):
    """The way of one message of a route, the same in every step.

    Attributes:
        group: The group, or the channel, that it goes through. ``dist.isend`` looks it and the peer up for every
            message, which takes as long as sending.
        peer: The other side's rank in it.
        tag: Of its receive, from the step's first on; 0 where messages find their receive by order.
        alike: A tensor of its shape and dtype, over the memory of one element.
        whole: As ``alike`` of the whole tensor, where each tensor rank sends a part; else None.
        is_empty: Whether it has no elements, and is not sent.
        is_complex: Whether its elements are.
        is_bytes: Whether it goes as bytes, since the backend knows no numbers of its kind.
    """

    group: Any
    peer: int
    tag: int
    alike: Tensor
    whole: Tensor | None
    is_empty: bool
    is_complex: bool
    is_bytes: bool

    def on_wire(self, tensor: Tensor) -> Tensor:
        """The memory of a contiguous ``tensor`` as the backend takes it."""
        if self.is_complex:
            return torch.view_as_real(tensor)
        return tensor.view(-1).view(torch.uint8) if self.is_bytes else tensor


class Transport:
    """Sends and receives of one rank of one pipeline.

    Receives are posted when the route says. A send keeps its tensor until the other side has it and then
    lets go; the caller keeps nothing. Between two stages on one rank tensors are handed over as they are.

    Gloo finds the receive for a message by its tag. NCCL knows no tags and matches by order, so there each direction of
    each pair of ranks that has messages is a channel, a group of its own, made by the two alone. The first message of a
    channel makes the connection, and who sends or receives it waits for the other side on the host. So all channels of
    a route are opened before its first message, in the order of :func:`opening_order`.

    Args:
        ranks: Global ranks of the pipeline, in pipeline order.
        rank: This rank's place in ``ranks``.
        device: Where received tensors are put.
        timeout: How long a receive may wait.
        group: The group to use where there is not one per channel; None for the default one.
        name: Of the channels, the same on all ranks of the pipeline, and used once in a job.
        matches_by_tag: Whether messages find their receive by tag; None: on the host they do.
        tensor_group: The tensor ranks of a stage, which have the same values; None for one. Each sends its part of a
            large tensor to its counterpart. Those of the receiving stage join the parts: see :meth:`joined`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        timeout: timedelta | None = None,
        group: dist.ProcessGroup | None = None,
        name: str = "pipeline",
        matches_by_tag: bool | None = None,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._ranks = tuple(ranks)
        self._rank = rank
        self._device = device
        self._matches_by_tag = device.type == "cpu" if matches_by_tag is None else matches_by_tag
        self._group, self._tensor_group = group, tensor_group
        self._num_senders = 1 if tensor_group is None else tensor_group.size()
        self._name = name
        self._timeout = timeout
        self._channels: dict[tuple[int, int], Any] = {}
        weakref.finalize(self, _shut_down, self._channels)
        # for each route, by the tags of its messages; a route is kept with its lanes, so that its id stays its own
        self._lanes_of: dict[int, tuple[Route, dict[int, _Lane]]] = {}
        self._lanes: dict[int, _Lane] = {}
        self._world: dist.ProcessGroup | None = None
        self._first_tag = 0
        self._step = 0
        self._receipts: Mapping[int, int] = {}
        self._posted: dict[int, tuple[Any, Tensor]] = {}
        self._handed_over: dict[int, Tensor] = {}
        self._sends = Sends(works_tell=not self._matches_by_tag)
        self._abandoned: list[Any] = []

    @property
    def channels(self) -> list[Any]:
        """The channels that have been opened; see :func:`~lightning_pp.distributed.groups.pair_group`."""
        return list(self._channels.values())

    @property
    def matches_by_tag(self) -> bool:
        """Whether messages find their receive by tag, and a receive that waits occupies nothing."""
        return self._matches_by_tag

    @property
    def num_senders(self) -> int:
        """So many ranks, those of the tensor axis, send a part of each message."""
        return self._num_senders

    def open_neighbours(self) -> int:
        """Opens the channels from and to the next ranks of the pipeline, which every schedule trains with.

        Returns:
            The bytes of the device that they have taken; 0 where messages use tags, without channels.
        """
        if self._matches_by_tag:
            return 0
        neighbours = [place for place in (self._rank - 1, self._rank + 1) if 0 <= place < len(self._ranks)]
        free_before = free_bytes(self._device)
        self._open_new({pair for place in neighbours for pair in ((self._rank, place), (place, self._rank))})
        return max(0, free_before - free_bytes(self._device))

    def begin(self, route: Route) -> None:
        """Starts a step."""
        self._step += 1
        self._first_tag = self._step * _TAGS_PER_STEP % _TAG_RANGE if self._matches_by_tag else 0
        world = dist.group.WORLD
        if world is not self._world:  # another run has another default group
            self._world, self._lanes_of = world, {}
        if id(route) not in self._lanes_of:
            if len(self._lanes_of) >= _MOST_ROUTES:
                self._lanes_of.clear()
            departures = (message for stop in route.stops for message in stop.departures)
            arrivals = (message for messages in route.incoming.values() for message in messages)
            messages = [message for message in (*departures, *arrivals) if message.sender != message.receiver]
            if not self._matches_by_tag:
                self._open_new({(message.sender, message.receiver) for message in messages})
            self._lanes_of[id(route)] = (route, {message.tag: self._lay_out(message) for message in messages})
        self._lanes = self._lanes_of[id(route)][1]
        self._receipts = route.receipts

    def post(self, stop: Stop) -> None:
        """Posts the receives that are due before the action begins."""
        for message in stop.posts:
            lane, work = self._lanes[message.tag], None
            # like another tensor torch makes one in half the time that it takes for a shape, a dtype and a device
            tensor = torch.empty_like(lane.alike, memory_format=torch.contiguous_format)
            if not lane.is_empty:
                work = self._begun(lane.group.recv, lane, tensor)
            self._posted[message.tag] = (work, tensor)

    def _begun(self, begin: Callable[..., Any], lane: _Lane, tensor: Tensor) -> Any:
        args = [lane.on_wire(tensor)], lane.peer, self._first_tag + lane.tag
        return unrecorded(begin, *args) if self._device.type == "cpu" else begin(*args)

    def receive(self, stop: Stop) -> list[tuple[Value, Tensor]]:
        """Waits for everything that the action needs, once :meth:`post` has been called for it."""
        received = []
        for message in stop.arrivals:
            sender, tag = message.sender, message.tag
            if sender == self._rank:
                received.append((message.value, self._handed_over.pop(tag)))
                continue
            work, tensor = self._posted.pop(tag)
            if work is not None:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise RankStoppedError(
                        f"Pipeline rank {self._rank} did not receive what {stop.action} needs from pipeline rank "
                        f"{sender} (global rank {self._ranks[sender]}; message {tag} of step {self._step}): {error}"
                    ) from error
                # one that is empty is not sent, and proves nothing
                self._sends.acknowledge(sender, self._receipts[tag])
            received.append((message.value, tensor))
        return received

    def joined(self, stop: Stop, received: list[tuple[Value, Tensor]]) -> list[tuple[Value, Tensor]]:
        """What :meth:`receive` returned, with parts joined. All tensor ranks call this, in the order of actions.

        A joined tensor has memory of its own, so a message that comes later does not overwrite it.
        """
        if self._num_senders == 1:
            return received
        tensors = []
        for message, (value, tensor) in zip(stop.arrivals, received, strict=True):
            like = None if message.sender == self._rank else self._lanes[message.tag].whole
            if like is not None:
                with torch.inference_mode(tensor.is_inference()):  # whatever the user's code has set just now
                    part, tensor = tensor, torch.empty_like(like, memory_format=torch.contiguous_format)
                    of_all, own = (each.view(-1).view(torch.uint8) for each in (tensor, part))  # for any dtype
                    dist.all_gather_single(of_all, own, group=self._tensor_group)
            tensors.append((value, tensor))
        return tensors

    def send(self, stop: Stop, tensors: Mapping[Value, Tensor]) -> None:
        """Sends what the action has to send, without waiting for it to arrive."""
        for message in stop.departures:
            tensor, receiver, work = tensors[message.value], message.receiver, None
            if tensor.requires_grad:
                tensor = tensor.detach()
            if receiver == self._rank:
                self._handed_over[message.tag] = tensor
                continue
            lane = self._lanes[message.tag]
            if lane.whole is not None:  # a copy, so that the rest of the tensor is not kept
                tensor = tensor.reshape(self._num_senders, -1)[dist.get_rank(self._tensor_group)].clone()
            if not lane.is_empty:
                tensor = tensor.contiguous()
                work = self._begun(lane.group.send, lane, tensor)
            self._sends.add(receiver, Send(work, tensor, message.is_gradient))

    def finish(self) -> None:
        """Ends a step. Gradients may still be under way; they are the receiver's business, and the next step's."""
        self._sends.end_step()

    def drain(self) -> None:
        """Returns when everything that was sent has been received; to be called before the process ends."""
        self._sends.wait()
        if self._device.type == "cuda":  # what waits there for a send is the stream, and not yet the host
            torch.cuda.current_stream(self._device).synchronize()

    def abandon(self) -> None:
        """Forgets a step that failed. Its messages carry the step's number, so a later step cannot mistake them.

        What is still under way keeps its memory: the other side may complete it yet, or never.
        """
        self._abandoned += [*self._posted.values(), *self._sends.abandon()]
        self._posted.clear()
        self._handed_over.clear()

    def _open_new(self, channels: set[tuple[int, int]]) -> None:
        """Makes each channel that no earlier route has used, and sends a number over it."""
        for channel in opening_order(channels - self._channels.keys()):
            source, target = (self._ranks[place] for place in channel)
            name, place = f"{self._name}/{source}-{target}/", channel.index(self._rank)
            # on one group for both directions NCCL would run sends and receives one after the other
            self._channels[channel] = pair_group(name, place, self._device.type, self._timeout)
            self._open(channel)

    def _open(self, channel: tuple[int, int]) -> None:
        number, group = torch.zeros(1, device=self._device), self._channels[channel]
        work = group.send([number], 1, 0) if channel[0] == self._rank else group.recv([number], 0, 0)
        work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _lay_out(self, message: Message) -> _Lane:
        spec = message.spec
        group, peer = self._group_and_peer(message)
        alike = torch.empty((), dtype=spec.dtype, device=self._device).expand(spec.shape)
        whole, num_bytes = None, spec.sent_bytes(self._num_senders)
        if num_bytes < spec.num_bytes:
            whole, alike = alike, alike[(0,) * alike.dim()].expand(num_bytes // spec.dtype.itemsize)
        tag = message.tag if self._matches_by_tag else 0
        is_bytes = not self._matches_by_tag and spec.dtype not in _DTYPES_OF_NCCL
        return _Lane(group, peer, tag, alike, whole, not spec.num_bytes, spec.dtype.is_complex, is_bytes)

    def _group_and_peer(self, message: Message) -> tuple[Any, int]:
        """What the message goes through, and the other side's rank in it."""
        is_sender = message.sender == self._rank
        if not self._matches_by_tag:
            return self._channels[message.sender, message.receiver], int(is_sender)
        group = self._group or dist.group.WORLD
        assert group is not None
        return group, dist.get_group_rank(group, self._ranks[message.receiver if is_sender else message.sender])


def opening_order(channels: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Channels in the order in which each rank opens its own, one after the other.

    It is the same on all ranks, so none waits in a circle; and neighbours come in every other pair first, so that the
    time does not grow with the pipeline's length.

    Args:
        channels: (sender, receiver), as places in the pipeline.
    """

    def key(channel: tuple[int, int]) -> tuple[int, int, int, bool]:
        first, distance = min(channel), abs(channel[0] - channel[1])
        return distance, first // distance % 2, first, channel[0] > channel[1]

    return sorted(channels, key=key)


def _shut_down(channels: dict[tuple[int, int], Any]) -> None:
    for channel in () if are_aborted() else channels.values():
        with contextlib.suppress(RuntimeError):  # after a failure there may be nobody on the other side
            channel.shutdown()
    channels.clear()
