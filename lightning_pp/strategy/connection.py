"""Groups that join this rank to its pipeline and its replicas; makes them again after an error has ended them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_pp.distributed.control import ControlGroups, make_control_groups
from lightning_pp.distributed.groups import destroyed_with, largest_of_all
from lightning_pp.distributed.meshes import tensor_mesh
from lightning_pp.distributed.messages import MessageLine
from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.split.side_effects.generators import GeneratorStates


class Connection:
    """The groups of one rank. Every rank must make it, and must call every method but :meth:`abandon`.

    An error on one rank ends what the other ranks of its pipeline wait for, so all of them leave the run with an error;
    the next run starts with :meth:`recover`.

    Args:
        mesh: The whole mesh.
        sizes: Its sizes.
        device: Where this rank computes.
        timeout: How long a message may take.

    Attributes:
        groups: For small messages between ranks that wait for them.
    """

    def __init__(self, mesh: DeviceMesh, sizes: ParallelSizes, device: torch.device, timeout: timedelta | None) -> None:
        self._mesh = mesh
        self._sizes = sizes
        self._device = device
        self._timeout = timeout
        self._of_stages = ControlGroups()
        self._is_open = True
        self._messages: MessageLine | None = None
        self._transport: Transport | None = None
        self._is_opened_ahead = False
        self._made: list[dist.ProcessGroup] = []
        destroyed_with(self, self._made)
        self.groups = self._new_groups()

    @property
    def messages(self) -> MessageLine:
        """For messages that are sent aside from the step; from :meth:`set_last_stage` on."""
        assert self._messages is not None
        return self._messages

    def set_last_stage(self, rank: int) -> None:
        """Sets the pipeline rank of the last stage, which sends messages."""
        self.groups = replace(self.groups, last_stage_rank=rank)
        self._messages = MessageLine(replace(self._new_groups(), last_stage_rank=rank), self._device)

    def open_neighbours(self) -> int:
        """Opens the channels between neighbours, where stages have any, before a limit of memory is kept.

        Returns:
            The bytes of the device that they have taken, on the rank of all where it is most.
        """
        transport = self.new_transport()
        self._is_opened_ahead = True
        return 0 if transport.matches_by_tag else largest_of_all(transport.open_neighbours(), self._device)

    def new_transport(self) -> Transport:
        """What carries tensors between the stages: on the host over a group that is its alone, else over channels."""
        if self._is_opened_ahead:
            assert self._transport is not None
            self._is_opened_ahead = False
            return self._transport
        earlier = self._of_stages
        self._of_stages = self._new_groups() if self._device.type == "cpu" else ControlGroups()
        earlier.replace_by(ControlGroups())
        ranks = [int(rank) for rank in self._mesh["pipeline"].mesh.tolist()]
        place = self._mesh.get_local_rank("pipeline")
        name = f"{self.groups.share(lambda: uuid4().hex, 'A name of channels')}/{ranks[0]}"
        axis, group = tensor_mesh(self._mesh), self._of_stages.pipeline
        tensor_group = None if axis is None else axis.get_group()
        self._transport = Transport(ranks, place, self._device, self._timeout, group, name, tensor_group=tensor_group)
        return self._transport

    def align_generators(self) -> None:
        """Every rank of a pipeline draws the same outside of steps from here on, on the host and on its device."""
        mine = GeneratorStates.now(self._device)
        self.groups.gather_in_pipeline(mine)[0].put_back(self._device)

    @property
    def channels(self) -> list[Any]:
        """What carries tensors between stages, where they do not go through a group."""
        return [] if self._transport is None else self._transport.channels

    def abandon(self) -> None:
        """After an exception: ends what the other ranks wait for."""
        if self._is_open:
            self._is_open = False
            for groups in (self.groups, self._of_stages):
                groups.abandon()
            if self._messages is not None:  # a thread may come here while it is made
                self._messages.groups.abandon()
                self._messages.close()

    def recover(self, counters: Sequence[int]) -> tuple[bool, list[int]]:
        """Brings the ranks together again, if one of them has failed since the last run.

        Args:
            counters: Numbers that only grow; those of a rank that has failed may be behind.

        Returns:
            Whether one has failed, so that :meth:`new_transport` is needed; and each counter's largest value.
        """
        if self._mesh.size() == 1:
            return False, list(counters)
        shared = torch.tensor([not self._is_open, *counters], dtype=torch.int64, device=self._device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        failed, *largest = shared.tolist()
        if failed:
            self._is_open = True
            self.groups.replace_by(self._new_groups())
            self.messages.groups.replace_by(self._new_groups())
            self._messages = MessageLine(self.messages.groups, self._device)
        return bool(failed), largest

    def _new_groups(self) -> ControlGroups:
        grid = self._mesh.mesh.reshape(self._sizes.pipeline, self._sizes.data_parallel, self._sizes.tensor)
        groups = make_control_groups(grid, self._timeout)
        self._made += groups.all
        return groups
