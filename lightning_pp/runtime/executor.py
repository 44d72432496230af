"""Running one rank's program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.runtime.randomness import StepRandomness, host_generators_untouched
from lightning_pp.runtime.recomputation import Recomputation
from lightning_pp.runtime.sharded import ShardedStages, run_sharding_action
from lightning_pp.runtime.split_backward.deferral import weight_gradients_deferrable
from lightning_pp.runtime.stage import StageRunner
from lightning_pp.runtime.stage_forward import InFlight
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.runtime.transport.route import Route, Stop, plan_route
from lightning_pp.runtime.whole_batch import TailRun, WholeBatch
from lightning_pp.schedule import ActionKind, Schedule
from lightning_pp.split.data.tree import map_leaves
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.split.record.step_record import Value
from lightning_pp.split.unit_calls.interception import UnitCalls

_MOST_PROGRAMS = 256


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
        whole_batch: The end of the step, run once on the whole batch after the last stage's last F; None: that of each
            microbatch is run in its F.
    """

    plans: Sequence[StepPlan]
    run_step: Callable[[int, int], Any]
    loss_of: Callable[[Any], Tensor | None] | None
    loss_weights: Sequence[float]
    seed: int
    sharded: ShardedStages | None = None
    queued_bytes: dict[tuple[int, int], int] | None = None
    whole_batch: WholeBatch | None = None
    on_outputs: Callable[[list[Any]], None] | None = None


class PipelineExecutor:
    """Runs the program of one rank, action by action.

    One step, on every rank::

        post the first receives
        for action in program:                     # this rank's row of the schedule
            F: run the user's step up to the stage's last call, un-owned units standing in
               wait for values of other stages where it comes to the calls that they stand in for
               send what later stages read
               last stage, with a loss over the whole batch: keep what its end needs; in the last F run the end, once
            I: wait for the gradients of what was sent
               one ordinary backward; linear-like operations queue their weight gradients
               send the gradients of what was received
            W: empty the queue into the parameters' gradients
            B: I and W in one, nothing queued but by modules that keep their weight gradients back
            UNSHARD, RESHARD, REDUCE: handed to who shards the stages; collectives run beside the rest
        wait until the values that were sent have left; gradients may take until the next step

    There is no other collective in it, and no rank waits for what it does not need: one that is done starts the next
    step. A step that raises leaves nothing behind: queued gradients, received tensors and messages are dropped, and the
    next step starts clean.

    Args:
        rank: This rank's place in the pipeline.
        units: All units of the model.
        transport: Moves tensors between stages.
        device: Where this rank computes.
        recomputation: Which units are run again in backward.
    """

    def __init__(
        self,
        rank: int,
        units: Mapping[str, nn.Module],
        transport: Transport,
        device: torch.device,
        recomputation: Recomputation | None = None,
    ) -> None:
        self._rank = rank
        self._units = dict(units)
        self._calls = UnitCalls(self._units)
        self._transport = transport
        self._device = device
        self._recomputation = recomputation
        self._no_randomness = StepRandomness(0, device)  # for steps whose inter-unit code draws nothing
        self._runners: dict[int, StageRunner] = {}
        self._programs: dict[tuple[int, ...], _Program] = {}

    def run(self, schedule: Schedule, inputs: StepInputs) -> tuple[list[Any], StepTimer]:
        """Runs one step.

        Args:
            schedule: Programs for as many microbatches as ``inputs`` has.
            inputs: The step's work.

        Returns:
            What the user's step returned for each microbatch (None for each, except on the rank of the last stage;
            with ``whole_batch`` the first entry is what it returned for the batch, and the others are None), and the
            timer of this rank's actions; reading it may wait for the device.
        """
        outputs: list[Any] = [None] * len(inputs.plans)
        in_flight: dict[tuple[int, int], InFlight] = {}
        timer = StepTimer(self._device)
        transport, sharded = self._transport, inputs.sharded
        program = self._program(schedule, inputs.plans)
        loss_of = inputs.loss_of
        trains = loss_of is not None
        tail = self._tail(inputs)
        num_outputs = 0
        transport.begin(program.route)
        try:
            with ExitStack() as stack:
                stack.enter_context(host_generators_untouched(inputs.seed * 4096 + self._rank, self._device))
                stack.enter_context(self._calls.installed())
                if program.splits_backward:
                    stack.enter_context(weight_gradients_deferrable())
                for entry in program.entries:
                    kind, stage, microbatch = entry.kind, entry.stage, entry.microbatch
                    if microbatch is None:
                        if sharded is not None:
                            timer.start()
                            run_sharding_action(sharded, entry.stop.action)
                            timer.stop(entry.stop.action)
                        continue
                    if sharded is not None:
                        sharded.before(entry.stop.action)
                    timer.start()
                    if kind is ActionKind.F:
                        plan = inputs.plans[microbatch]
                        kept, output = entry.runner.forward(
                            plan,
                            partial(inputs.run_step, microbatch, stage),
                            partial(_receive, entry.stop, transport, timer) if entry.stop.arrivals else _nothing,
                            StepRandomness.of_microbatch(inputs.seed, microbatch, self._device)
                            if plan.record.inter_unit_draws.after
                            else self._no_randomness,
                            with_gradients=trains,
                            splits_backward=entry.splits_backward,
                            watch=tail.watch(microbatch) if tail is not None and entry.is_last_stage else None,
                        )
                        if entry.is_last_stage and tail is not None:
                            if tail.add(microbatch, kept):
                                outputs[0] = map_leaves(_detached, tail.run(entry.runner))
                        elif entry.is_last_stage:
                            if loss_of is not None:
                                kept.loss = loss_of(output)
                            # a graph kept alive by what the step returned would keep its activations
                            outputs[microbatch] = map_leaves(_detached, output)
                        if entry.stop.departures:
                            transport.send(entry.stop, kept.outputs)
                            kept.outputs.clear()  # the transport keeps them as long as it needs to
                        if trains:
                            in_flight[stage, microbatch] = kept
                        del kept, output
                    elif kind is ActionKind.W:
                        kept = in_flight.pop((stage, microbatch))
                        queued = kept.queue.parameters
                        kept.run_weight_gradients(
                            None if sharded is None else sharded.reducer(entry.stop.action, queued)
                        )
                        del kept
                    else:
                        kept = in_flight[stage, microbatch]
                        gradients = self._backward(entry, inputs, kept, timer, tail)
                        if entry.stop.departures:
                            transport.send(entry.stop, gradients)
                        kept.end_backward()
                        if kind is ActionKind.B:
                            del in_flight[stage, microbatch]
                            if kept.queue:  # of modules that keep their weight gradients back
                                kept.run_weight_gradients()
                        del kept, gradients
                    timer.stop(entry.stop.action)
                    if sharded is not None:
                        sharded.after(entry.stop.action)
                    if kind is ActionKind.F and entry.is_last_stage:
                        num_outputs += 1
                        if num_outputs == len(outputs) and inputs.on_outputs is not None:
                            inputs.on_outputs(outputs)
                    if kind is ActionKind.I and inputs.queued_bytes is not None:
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

    def drain(self) -> None:
        """Returns when the other ranks have received what was sent; to be called before this process ends."""
        self._transport.drain()

    def _tail(self, inputs: StepInputs) -> TailRun | None:
        whole = inputs.whole_batch
        if whole is None:
            return None
        # a batch in one piece draws what its microbatch drew
        number = len(inputs.plans) if len(inputs.plans) > 1 else 0
        draws = whole.plan.tail.record.inter_unit_draws.after
        randomness = StepRandomness.of_microbatch(inputs.seed, number, self._device) if draws else self._no_randomness
        return TailRun(whole, inputs.loss_of, randomness)

    def _backward(
        self, entry: _Entry, inputs: StepInputs, kept: InFlight, timer: StepTimer, tail: TailRun | None
    ) -> dict[Value, Tensor]:
        assert entry.microbatch is not None
        gradients: Iterable[tuple[Value, Tensor]] = ()
        if entry.is_last_stage and tail is not None:
            gradients = tail.gradients_of(entry.microbatch)
        elif entry.stop.arrivals:
            gradients = _receive(entry.stop, self._transport, timer)
        return entry.runner.backward(
            inputs.plans[entry.microbatch],
            kept,
            gradients,
            inputs.loss_weights[entry.microbatch],
            split=entry.kind is ActionKind.I,
        )

    def _program(self, schedule: Schedule, plans: Sequence[StepPlan]) -> _Program:
        key = (id(schedule), *map(id, plans))
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            program = self._programs[key] = self._lay_out(schedule, plans)
        return program

    def _lay_out(self, schedule: Schedule, plans: Sequence[StepPlan]) -> _Program:
        route = plan_route(schedule, plans, self._rank)
        # microbatches whose backward is I and W; the others pay nothing for a split
        split = {
            (stop.action.stage, stop.action.microbatch) for stop in route.stops if stop.action.kind is ActionKind.I
        }
        last_stage = schedule.placement.num_stages - 1
        entries = [
            _Entry(
                stop,
                stop.action.kind,
                stop.action.stage,
                stop.action.microbatch,
                self._runner(stop.action.stage),
                (stop.action.stage, stop.action.microbatch) in split,
                stop.action.stage == last_stage,
            )
            for stop in route.stops
        ]
        # the objects are kept with what came of them, so that their ids stay theirs
        return _Program((schedule, *plans), route, entries, bool(split))

    def _runner(self, stage: int) -> StageRunner:
        if stage not in self._runners:
            self._runners[stage] = StageRunner(stage, self._units, self._calls, self._recomputation)
        return self._runners[stage]


@dataclass(frozen=True, slots=True)
class _Entry:
    """An action of this rank's program with all that is known of it before the step."""

    stop: Stop
    kind: ActionKind
    stage: int
    microbatch: int | None
    runner: StageRunner
    splits_backward: bool
    is_last_stage: bool


def _receive(stop: Stop, transport: Transport, timer: StepTimer) -> list[tuple[Value, Tensor]]:
    """What the action receives, waited for now."""
    timer.start_waiting()
    received = transport.receive(stop)
    timer.stop_waiting()
    return received


def _nothing() -> Iterable[tuple[Value, Tensor]]:
    return ()


@dataclass(frozen=True, slots=True)
class _Program:
    """This rank's program for one schedule and certain plans."""

    made_from: tuple[Any, ...]
    route: Route
    entries: list[_Entry]
    splits_backward: bool


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
