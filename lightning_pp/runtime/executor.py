"""Running one rank's program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lightning_pp.runtime.offloading import Offloader, SavedTensors, address_of
from lightning_pp.runtime.randomness import StepRandomness, step_seeded
from lightning_pp.runtime.recomputation import Recomputation
from lightning_pp.runtime.split_backward.deferral import weight_gradients_deferrable
from lightning_pp.runtime.stage import StageRunner
from lightning_pp.runtime.stage_forward import InFlight
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.runtime.transport.route import Route, Stop, plan_route
from lightning_pp.runtime.whole_batch import TailRun, WholeBatch
from lightning_pp.schedule import Action, ActionKind, Schedule
from lightning_pp.split.comparison.consistency import detached
from lightning_pp.split.data.tree import map_leaves, tensors_of
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.split.record.step_record import Value
from lightning_pp.split.unit_calls.interception import UnitCalls

if TYPE_CHECKING:
    from lightning_pp.sharding.stages import ShardedStages

_MOST_ROUTES = 256
_COMPUTE = (ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B)  # `in` compares by identity first
# an attribute of exceptions
_FAILED_ACTION = "_lightning_pp_action"


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
        on_outputs: Gets on the last stage what is returned, after its last forward.
        is_timed: Whether the times of the actions are taken.
        data: The microbatches; their tensors stay on the device.
        label: Makes a context around each action, and around each wait for other stages, of its name
            (:func:`profile_label`), for a profiler; None for none.
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
    is_timed: bool = True
    data: Any = None
    label: Callable[[str], AbstractContextManager[Any]] | None = None


class PipelineExecutor:
    """Runs the program of one rank, action by action.

    One step, on every rank::

        for action in program:                     # this rank's row of the schedule
            post the receives that are due before it
            F: run the user's step up to the stage's last call, un-owned units standing in
               wait for values of other stages where it comes to the calls that they stand in for
               send what later stages read
               last stage, with a loss over the whole batch: keep what its end needs; in the last F run the end, once
            I: wait for the gradients of what was sent
               one ordinary backward; linear-like operations queue their weight gradients
               send the gradients of what was received
            W: empty the queue into the parameters' gradients
            B: I and W in one; queued is only what modules keep back, or what runs beside tensor ranks' communication
            OFFLOAD, RELOAD: free, or take again, the memory of what F saved, which is copied to the host and back
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
        has_tensor_ranks: Whether units communicate in backward so that weight gradients can run beside it, in a B too.

    Attributes:
        offloader: Copies what waits for its backward to the host.
    """

    def __init__(
        self,
        rank: int,
        units: Mapping[str, nn.Module],
        transport: Transport,
        device: torch.device,
        recomputation: Recomputation | None = None,
        has_tensor_ranks: bool = False,
    ) -> None:
        can_wait = has_tensor_ranks and not torch.are_deterministic_algorithms_enabled()
        self._queuing = (ActionKind.I, ActionKind.B) if can_wait else (ActionKind.I,)
        self._rank, self._units = rank, dict(units)
        self._calls = UnitCalls(self._units)
        self._transport = transport
        self._device = device
        self._recomputation = recomputation
        self.offloader = Offloader(device)
        self._runners: dict[int, StageRunner] = {}
        self._routes: dict[tuple[int, ...], Route] = {}
        self._running: Action | None = None

    @property
    def running_action(self) -> str:
        """The action (``1F3``) that is under way; empty outside of steps. To be read from any thread."""
        running = self._running
        return "" if running is None else str(running)

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
        route = self._route(schedule, inputs.plans)
        step = _Step(inputs, self._runners, self._transport, self.offloader)
        step.timer.sent_bytes = route.sent_bytes
        self._transport.begin(route)
        try:
            with ExitStack() as stack:
                stack.enter_context(step_seeded(inputs.seed * 4096 + self._rank, self._device))
                stack.enter_context(self._calls.installed())
                if any(stop.queues for stop in route.stops):
                    stack.enter_context(weight_gradients_deferrable())
                for stop in route.stops:
                    self._running = stop.action
                    with nullcontext() if inputs.label is None else inputs.label(profile_label(stop.action)):
                        step.carry_out(stop)
                step.finish()
        except BaseException as error:
            step.abandon()
            vars(error)[_FAILED_ACTION] = self.running_action
            raise
        finally:
            self._running = None
        return step.outputs, step.timer

    def drain(self) -> None:
        """Returns when the other ranks have received what was sent; to be called before this process ends."""
        self._transport.drain()

    def _route(self, schedule: Schedule, plans: Sequence[StepPlan]) -> Route:
        key = (id(schedule), *map(id, plans))
        route = self._routes.get(key)
        if route is None:
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.clear()
            transport = self._transport
            route = self._routes[key] = plan_route(
                schedule,
                plans,
                self._rank,
                occupies_device=not transport.matches_by_tag,
                num_senders=transport.num_senders,
                queuing=self._queuing,
            )
            for stage in schedule.placement.stages_of_rank(self._rank):
                if stage not in self._runners:
                    self._runners[stage] = StageRunner(stage, self._units, self._calls, self._recomputation)
        return route


class _Step:
    """One step on one rank: a method for each kind of action, and the state between actions.

    Args:
        inputs: The step's work.
        runners: Of this rank's stages.
        transport: Moves tensors between stages.
        offloader: Copies to the host of the device that computes.

    Attributes:
        outputs: What the user's step returned, as :meth:`PipelineExecutor.run` gives it.
        timer: Takes the times of the actions.
    """

    def __init__(
        self, inputs: StepInputs, runners: Mapping[int, StageRunner], transport: Transport, offloader: Offloader
    ) -> None:
        self._runners, self._last_stage = runners, len(inputs.plans[0].stages) - 1
        self.outputs: list[Any] = [None] * len(inputs.plans)
        self._num_outputs = 0
        self._offloader, self._device = offloader, offloader.device
        self.timer = StepTimer(self._device, is_on=inputs.is_timed)
        self._inputs = inputs
        self._sharded = inputs.sharded
        self._transport = transport
        self._no_randomness = StepRandomness(0, self._device)  # for steps whose inter-unit code draws nothing
        self._in_flight: dict[tuple[int, int], InFlight] = {}
        self._offloaded: dict[tuple[int, int], SavedTensors] = {}
        self._stay: dict[int, set[int]] = {}  # addresses of what a stage saves and keeps on the device
        self._tail: TailRun | None = None
        if inputs.whole_batch is not None:
            # a batch in one piece draws what its microbatch drew
            number = len(inputs.plans) if len(inputs.plans) > 1 else 0
            randomness = self._randomness(inputs.whole_batch.plan.tail, number)
            self._tail = TailRun(inputs.whole_batch, inputs.loss_of, randomness)

    def carry_out(self, stop: Stop) -> None:
        """One action of the program."""
        action, sharded = stop.action, self._sharded
        stage, microbatch, kind = action.stage, action.microbatch, action.kind
        self._transport.post(stop)
        if microbatch is None or kind not in _COMPUTE:
            self.beside(action)
            return
        if sharded is not None:
            sharded.before(action)
        self.timer.start()
        if kind is ActionKind.F:
            self.forward(stop, stage, microbatch)
        elif kind is ActionKind.W:
            self.weight_gradients(action)
        else:
            self.backward(stop, stage, microbatch)
        self.timer.stop(action)
        if sharded is not None:
            sharded.after(action)
        if kind is ActionKind.F and stage == self._last_stage:
            self._num_outputs += 1
            if self._num_outputs == len(self.outputs) and self._inputs.on_outputs is not None:
                self._inputs.on_outputs(self.outputs)
        if kind is ActionKind.I and self._inputs.queued_bytes is not None:
            self._inputs.queued_bytes[stage, microbatch] = self._in_flight[stage, microbatch].queue.held_bytes

    def beside(self, action: Action) -> None:
        """OFFLOAD, RELOAD, UNSHARD, RESHARD or REDUCE."""
        self.timer.start()
        if action.microbatch is not None:
            saved = self._offloaded[action.stage, action.microbatch]
            saved.offload() if action.kind is ActionKind.OFFLOAD else saved.reload()
        elif self._sharded is None:
            return
        elif action.kind is ActionKind.UNSHARD:
            self._sharded.unshard(action.stage)
        elif action.kind is ActionKind.RESHARD:
            self._sharded.reshard(action.stage)
        else:
            self._sharded.reduce(action.stage)
        self.timer.stop(action)

    def forward(self, stop: Stop, stage: int, microbatch: int) -> None:
        """F: runs the user's step up to the stage's last call, and sends what later stages read."""
        inputs, is_last, runner = self._inputs, stage == self._last_stage, self._runners[stage]
        plan = inputs.plans[microbatch]
        tail = self._tail if is_last else None
        with self._saving(stop, microbatch) if stop.offloaded else nullcontext():
            kept, output = runner.forward(
                plan,
                partial(inputs.run_step, microbatch, stage),
                partial(self._receive, stop) if stop.arrivals else tuple,
                self._randomness(plan, microbatch),
                with_gradients=inputs.loss_of is not None,
                splits_backward=stop.queues,
                watch=None if tail is None else tail.watch(microbatch),
            )
        if tail is not None:
            if tail.add(microbatch, kept):
                self.outputs[0] = map_leaves(detached, tail.run(runner))
        elif is_last:
            if inputs.loss_of is not None:
                kept.loss = inputs.loss_of(output)
            # a graph kept alive by what the step returned would keep its activations
            self.outputs[microbatch] = map_leaves(detached, output)
        if stop.departures:
            self._transport.send(stop, kept.outputs)
            kept.outputs.clear()  # the transport keeps them as long as it needs to
        if inputs.loss_of is not None:
            self._in_flight[stage, microbatch] = kept

    def backward(self, stop: Stop, stage: int, microbatch: int) -> None:
        """I or B: runs the backward from what was sent, and sends the gradients of what was received."""
        inputs = self._inputs
        is_full = stop.action.kind is ActionKind.B
        kept = self._in_flight[stage, microbatch]
        if stop.offloaded:
            self._offloaded.pop((stage, microbatch)).hand_over()
        kept.queue.is_for_w = not is_full
        gradients = self._runners[stage].backward(
            inputs.plans[microbatch],
            kept,
            self._arriving_gradients(stop, microbatch),  # unnamed here, so that it is let go with the backward
            inputs.loss_weights[microbatch],
            split=stop.queues,
        )
        if stop.departures:
            self._transport.send(stop, gradients)
        kept.end_backward()
        if is_full:
            del self._in_flight[stage, microbatch]
            if kept.queue:
                kept.run_weight_gradients()

    def weight_gradients(self, action: Action) -> None:
        """W: empties the queue into the parameters' gradients."""
        kept = self._in_flight.pop((action.stage, cast(int, action.microbatch)))
        tell = None if self._sharded is None else self._sharded.reducer(action, kept.queue.parameters)
        kept.run_weight_gradients(tell)

    def finish(self) -> None:
        """Waits until the values that were sent have left."""
        if self._sharded is not None:
            self._sharded.finish()
        self._transport.finish()

    def abandon(self) -> None:
        """Drops what a step that raised leaves behind."""
        for kept in self._in_flight.values():
            kept.queue.clear()
        self._transport.abandon()

    def _saving(self, stop: Stop, microbatch: int) -> AbstractContextManager[None]:
        """Around an F whose saved tensors are to wait on the host."""
        stage = stop.action.stage
        stay = self._stay.get(stage)
        if stay is None:
            tensors = (*self._runners[stage].buffers(self._inputs.plans[microbatch]), *tensors_of(self._inputs.data))
            stay = self._stay[stage] = set(map(address_of, tensors))
        saved = self._offloaded[stage, microbatch] = SavedTensors(self._offloader, stay, stop.offloaded)
        return saved.around_forward()

    def _arriving_gradients(self, stop: Stop, microbatch: int) -> Iterable[tuple[Value, Tensor]]:
        if self._tail is not None and stop.action.stage == self._last_stage:
            return self._tail.gradients_of(microbatch)
        return self._receive(stop) if stop.arrivals else ()

    def _receive(self, stop: Stop) -> list[tuple[Value, Tensor]]:
        """What the action receives, waited for now."""
        label = self._inputs.label
        self.timer.start_waiting()
        with nullcontext() if label is None else label(f"wait for {profile_label(stop.action)}"):
            received = self._transport.receive(stop)
        self.timer.stop_waiting()
        return self._transport.joined(stop, received)

    def _randomness(self, plan: StepPlan, number: int) -> StepRandomness:
        """What the plan's inter-unit code draws from, in the microbatch of that number."""
        if not plan.record.inter_unit_draws.after:
            return self._no_randomness
        return StepRandomness.of_microbatch(self._inputs.seed, number, self._device)


def profile_label(action: Action) -> str:
    """What an action is called in a profile: ``stage 1 F microbatch 3``."""
    microbatch = "" if action.microbatch is None else f" microbatch {action.microbatch}"
    return f"stage {action.stage} {action.kind.value}{microbatch}"


def failed_action(error: BaseException) -> str:
    """The action (``1F3``: stage, kind, microbatch) in which ``error`` was raised; empty if it was in none."""
    return str(vars(error).get(_FAILED_ACTION, ""))
