"""Running one rank's program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.runtime.randomness import StepRandomness, host_generators_untouched
from lightning_pp.runtime.sharded import ShardedStages, run_sharding_action
from lightning_pp.runtime.stage import InFlight, StageRunner
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.runtime.transport import Route, Transport, plan_route
from lightning_pp.schedule import Action, ActionKind, Schedule
from lightning_pp.split.plan import StepPlan
from lightning_pp.split.record import Value
from lightning_pp.split.tree import map_leaves


@dataclass(frozen=True)
class StepInputs:
    """One step's work.

    Attributes:
        plans: The plan of each microbatch.
        run_step: ``run_step(microbatch, stage)`` runs the user's step and returns what it returned.
        loss_of: Finds the loss in what the user's step returned; None for a step without backward.
        loss_weights: What each microbatch's loss is multiplied by before backward.
        seed: Seed of the step, equal on all ranks of a pipeline, different between pipelines.
        sharded: Who carries out the sharding actions of the program; None leaves them out.
        queued_bytes: If given, gets for each stage and microbatch what the weight gradients hold that I has queued.
    """

    plans: Sequence[StepPlan]
    run_step: Callable[[int, int], Any]
    loss_of: Callable[[Any], Tensor | None] | None
    loss_weights: Sequence[float]
    seed: int
    sharded: ShardedStages | None = None
    queued_bytes: dict[tuple[int, int], int] | None = None


class PipelineExecutor:
    """Runs the program of one rank, action by action.

    One step, on every rank::

        post the first receives
        for action in program:                     # this rank's row of the schedule
            F: wait for the values that the stage's calls read
               run the user's step up to the stage's last call, un-owned units standing in
               send what later stages read
            I: wait for the gradients of what was sent
               one ordinary backward; linear-like operations queue their weight gradients
               send the gradients of what was received
            W: empty the queue into the parameters' gradients
            B: I and W in one, nothing queued
            UNSHARD, RESHARD, REDUCE: handed to who shards the stages; collectives run beside the rest
        wait until all that was sent has left

    There is no other collective in it. A step that raises leaves nothing behind: queued gradients, received tensors and
    messages are dropped, and the next step starts clean.

    Args:
        rank: This rank's place in the pipeline.
        units: All units of the model.
        transport: Moves tensors between stages.
        device: Where this rank computes.
    """

    def __init__(self, rank: int, units: Mapping[str, nn.Module], transport: Transport, device: torch.device) -> None:
        self._rank = rank
        self._units = dict(units)
        self._transport = transport
        self._device = device
        self._runners: dict[int, StageRunner] = {}
        self._splits: dict[int, tuple[Schedule, frozenset[tuple[int, int | None]]]] = {}
        self._routes: dict[tuple[int, ...], tuple[Schedule, tuple[StepPlan, ...], Route]] = {}

    def run(self, schedule: Schedule, inputs: StepInputs) -> tuple[list[Any], StepTimer]:
        """Runs one step.

        Args:
            schedule: Programs for as many microbatches as ``inputs`` has.
            inputs: The step's work.

        Returns:
            What the user's step returned for each microbatch (None for each, except on the rank of the last stage),
            and the timer of this rank's actions; reading it may wait for the device.
        """
        outputs: list[Any] = [None] * len(inputs.plans)
        in_flight: dict[tuple[int, int], InFlight] = {}
        timer = StepTimer(self._device)
        transport, sharded = self._transport, inputs.sharded
        transport.begin(self._route(schedule, inputs.plans))
        last_stage = schedule.placement.num_stages - 1
        try:
            with host_generators_untouched(inputs.seed * 4096 + self._rank, self._device):
                for action in schedule.programs[self._rank]:
                    if action.microbatch is None:
                        if sharded is not None:
                            timer.start_waiting()
                            timer.start_working()
                            run_sharding_action(sharded, action)
                            timer.stop(action)
                        continue
                    if sharded is not None:
                        sharded.before(action)
                    stage, microbatch = action.stage, action.microbatch
                    timer.start_waiting()
                    received = transport.receive(action)
                    timer.start_working()
                    if action.kind is ActionKind.F:
                        kept, output = self._forward(schedule, action, inputs, dict(received))
                        if stage == last_stage:
                            if inputs.loss_of is not None:
                                kept.loss = inputs.loss_of(output)
                            # a graph kept alive by what the step returned would keep its activations
                            outputs[microbatch] = map_leaves(_detached, output)
                        transport.send(action, kept.outputs)
                        kept.outputs.clear()  # the transport keeps them as long as it needs to
                        if inputs.loss_of is not None:
                            in_flight[stage, microbatch] = kept
                        del kept, output
                    elif action.kind is ActionKind.W:
                        kept = in_flight.pop((stage, microbatch))
                        queued = kept.queue.parameters
                        kept.run_weight_gradients(None if sharded is None else sharded.reducer(action, queued))
                        del kept
                    else:
                        kept = in_flight[stage, microbatch]
                        gradients = self._backward(action, inputs, kept, received)
                        transport.send(action, gradients)
                        if action.kind is ActionKind.B:
                            del in_flight[stage, microbatch]
                        del kept, gradients
                    received.clear()
                    timer.stop(action)
                    if sharded is not None:
                        sharded.after(action)
                    if action.kind is ActionKind.I and inputs.queued_bytes is not None:
                        inputs.queued_bytes[stage, microbatch] = in_flight[stage, microbatch].queue.held_bytes
                if sharded is not None:
                    sharded.finish()
                transport.finish()
        except BaseException:
            for kept in in_flight.values():
                kept.queue.clear()
            transport.abandon()
            raise
        return outputs, timer

    def _forward(
        self, schedule: Schedule, action: Action, inputs: StepInputs, received: dict[Value, Tensor]
    ) -> tuple[InFlight, Any]:
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None
        return self._runner(stage).forward(
            inputs.plans[microbatch],
            lambda: inputs.run_step(microbatch, stage),
            received,
            StepRandomness.of_microbatch(inputs.seed, microbatch, self._device),
            with_gradients=inputs.loss_of is not None,
            splits_backward=(stage, microbatch) in self._split_backwards(schedule),
        )

    def _backward(
        self,
        action: Action,
        inputs: StepInputs,
        kept: InFlight,
        received: Sequence[tuple[Value, Tensor]],
    ) -> dict[Value, Tensor]:
        microbatch = action.microbatch
        assert microbatch is not None
        gradients: dict[Value, list[Tensor]] = {}
        for value, gradient in received:
            gradients.setdefault(value, []).append(gradient)
        return self._runner(action.stage).backward(
            inputs.plans[microbatch],
            kept,
            gradients,
            inputs.loss_weights[microbatch],
            split=action.kind is ActionKind.I,
        )

    def _runner(self, stage: int) -> StageRunner:
        if stage not in self._runners:
            self._runners[stage] = StageRunner(stage, self._units)
        return self._runners[stage]

    def _split_backwards(self, schedule: Schedule) -> frozenset[tuple[int, int | None]]:
        """The stages and microbatches of this rank whose backward is I and W; the others pay nothing for a split."""
        if id(schedule) not in self._splits:
            own = schedule.programs[self._rank]
            split = frozenset((action.stage, action.microbatch) for action in own if action.kind is ActionKind.I)
            self._splits[id(schedule)] = (schedule, split)
        return self._splits[id(schedule)][1]

    def _route(self, schedule: Schedule, plans: Sequence[StepPlan]) -> Route:
        key = (id(schedule), *map(id, plans))
        if key not in self._routes:
            if len(self._routes) >= 256:
                self._routes.clear()
            # the objects are kept with the route, so that their ids stay theirs
            self._routes[key] = (schedule, tuple(plans), plan_route(schedule, plans, self._rank))
        return self._routes[key][2]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
