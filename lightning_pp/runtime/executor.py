"""Running one rank's program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

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

_MOST_PROGRAMS = 256
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
        self._waiting_kinds = {ActionKind.I, ActionKind.B} if can_wait else {ActionKind.I}
        self._rank, self._units = rank, dict(units)
        self._calls = UnitCalls(self._units)
        self._transport = transport
        self._device = device
        self._recomputation = recomputation
        self.offloader = Offloader(device)
        self._runners: dict[int, StageRunner] = {}
        self._programs: dict[tuple[Any, ...], _Program] = {}
        self._running: Stop | _Entry | None = None

    @property
    def running_action(self) -> str:
        """The action (``1F3``) that is under way; empty outside of steps. To be read from any thread."""
        running = self._running
        return "" if running is None else str(_entry_action(running))

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
        program = self._program(schedule, inputs.plans)
        step = _Step(inputs, self._transport, self.offloader)
        step.timer.sent_bytes = program.sent_bytes
        self._transport.begin(program.route)
        try:
            with ExitStack() as stack:
                stack.enter_context(step_seeded(inputs.seed * 4096 + self._rank, self._device))
                stack.enter_context(self._calls.installed())
                if program.splits_backward:
                    stack.enter_context(weight_gradients_deferrable())
                for entry in program.entries:
                    self._running = entry
                    with nullcontext() if inputs.label is None else inputs.label(profile_label(_entry_action(entry))):
                        step.carry_out(entry)
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

    def _program(self, schedule: Schedule, plans: Sequence[StepPlan]) -> _Program:
        key = (id(schedule), *map(id, plans))
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            program = self._programs[key] = self._lay_out(schedule, plans)
        return program

    def _lay_out(self, schedule: Schedule, plans: Sequence[StepPlan]) -> _Program:
        route = plan_route(schedule, plans, self._rank, occupies_device=not self._transport.matches_by_tag)
        # microbatches whose weight gradients wait; the others pay nothing for it
        backwards = (stop.action for stop in route.stops if stop.action.kind in self._waiting_kinds)
        split = {(action.stage, action.microbatch) for action in backwards}
        offloaded = {stop.action for stop in route.stops if stop.action.kind is ActionKind.OFFLOAD}
        share = schedule.offload_shares[self._rank] if schedule.offload_shares else 1.0
        last_stage = schedule.placement.num_stages - 1
        entries: list[_Entry | Stop] = []
        sent_bytes: Counter[int] = Counter()
        for stop in route.stops:
            stage, microbatch = stop.action.stage, stop.action.microbatch
            sent_bytes[stage] += sum(map(self._transport.sent_bytes, stop.departures))
            if microbatch is None or not stop.action.kind.is_compute:
                entries.append(stop)
                continue
            runner, waits = self._runner(stage), (stage, microbatch) in split
            moved = share if Action(stage, ActionKind.OFFLOAD, microbatch) in offloaded else 0.0
            entries.append(_Entry(stop, stop.action.kind, stage, microbatch, runner, waits, moved, stage == last_stage))
        # the objects are kept with what came of them, so that their ids stay theirs
        return _Program((schedule, *plans), route, entries, bool(split), sent_bytes)

    def _runner(self, stage: int) -> StageRunner:
        if stage not in self._runners:
            self._runners[stage] = StageRunner(stage, self._units, self._calls, self._recomputation)
        return self._runners[stage]


@dataclass(frozen=True, slots=True)
class _Entry:
    """An F, I, W or B of this rank's program with everything known before the step."""

    stop: Stop
    kind: ActionKind
    stage: int
    microbatch: int
    runner: StageRunner
    splits_backward: bool
    offloaded: float  # the share of what it saves
    is_last_stage: bool


class _Step:
    """One step on one rank: a method for each kind of action, and the state between actions.

    Args:
        inputs: The step's work.
        transport: Moves tensors between stages.
        offloader: Copies to the host of the device that computes.

    Attributes:
        outputs: What the user's step returned, as :meth:`PipelineExecutor.run` gives it.
        timer: Takes the times of the actions.
    """

    def __init__(self, inputs: StepInputs, transport: Transport, offloader: Offloader) -> None:
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

    def carry_out(self, entry: _Entry | Stop) -> None:
        """One action of the program."""
        stop = entry if isinstance(entry, Stop) else entry.stop
        self._transport.post(stop)
        if isinstance(entry, Stop):
            self.beside(entry.action)
            return
        if self._sharded is not None:
            self._sharded.before(stop.action)
        self.timer.start()
        if entry.kind is ActionKind.F:
            self.forward(entry)
        elif entry.kind is ActionKind.W:
            self.weight_gradients(entry)
        else:
            self.backward(entry)
        self.end(entry)

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

    def end(self, entry: _Entry) -> None:
        """An F, I, W or B is done."""
        self.timer.stop(entry.stop.action)
        if self._sharded is not None:
            self._sharded.after(entry.stop.action)
        if entry.kind is ActionKind.F and entry.is_last_stage:
            self._num_outputs += 1
            if self._num_outputs == len(self.outputs) and self._inputs.on_outputs is not None:
                self._inputs.on_outputs(self.outputs)
        if entry.kind is ActionKind.I and self._inputs.queued_bytes is not None:
            place = entry.stage, entry.microbatch
            self._inputs.queued_bytes[place] = self._in_flight[place].queue.held_bytes

    def forward(self, entry: _Entry) -> None:
        """F: runs the user's step up to the stage's last call, and sends what later stages read."""
        inputs, microbatch = self._inputs, entry.microbatch
        plan = inputs.plans[microbatch]
        tail = self._tail if entry.is_last_stage else None
        with self._saving(entry) if entry.offloaded else nullcontext():
            kept, output = entry.runner.forward(
                plan,
                partial(inputs.run_step, microbatch, entry.stage),
                partial(self._receive, entry.stop) if entry.stop.arrivals else tuple,
                self._randomness(plan, microbatch),
                with_gradients=inputs.loss_of is not None,
                splits_backward=entry.splits_backward,
                watch=None if tail is None else tail.watch(microbatch),
            )
        if tail is not None:
            if tail.add(microbatch, kept):
                self.outputs[0] = map_leaves(detached, tail.run(entry.runner))
        elif entry.is_last_stage:
            if inputs.loss_of is not None:
                kept.loss = inputs.loss_of(output)
            # a graph kept alive by what the step returned would keep its activations
            self.outputs[microbatch] = map_leaves(detached, output)
        if entry.stop.departures:
            self._transport.send(entry.stop, kept.outputs)
            kept.outputs.clear()  # the transport keeps them as long as it needs to
        if inputs.loss_of is not None:
            self._in_flight[entry.stage, microbatch] = kept

    def backward(self, entry: _Entry) -> None:
        """I or B: runs the backward from what was sent, and sends the gradients of what was received."""
        inputs, microbatch = self._inputs, entry.microbatch
        is_full = entry.kind is ActionKind.B
        kept = self._in_flight[entry.stage, microbatch]
        if entry.offloaded:
            self._offloaded.pop((entry.stage, microbatch)).hand_over()
        kept.queue.is_for_w = not is_full
        gradients = entry.runner.backward(
            inputs.plans[microbatch],
            kept,
            self._arriving_gradients(entry),  # unnamed here, so that it is let go with the backward
            inputs.loss_weights[microbatch],
            split=entry.splits_backward,
        )
        if entry.stop.departures:
            self._transport.send(entry.stop, gradients)
        kept.end_backward()
        if is_full:
            del self._in_flight[entry.stage, microbatch]
            if kept.queue:
                kept.run_weight_gradients()

    def weight_gradients(self, entry: _Entry) -> None:
        """W: empties the queue into the parameters' gradients."""
        kept = self._in_flight.pop((entry.stage, entry.microbatch))
        tell = None
        if self._sharded is not None:
            tell = self._sharded.reducer(entry.stop.action, kept.queue.parameters)
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

    def _saving(self, entry: _Entry) -> AbstractContextManager[None]:
        """Around an F whose saved tensors are to wait on the host."""
        stay = self._stay.get(entry.stage)
        if stay is None:
            tensors = (*entry.runner.buffers(self._inputs.plans[entry.microbatch]), *tensors_of(self._inputs.data))
            stay = self._stay[entry.stage] = set(map(address_of, tensors))
        saved = SavedTensors(self._offloader, stay, entry.offloaded)
        self._offloaded[entry.stage, entry.microbatch] = saved
        return saved.around_forward()

    def _arriving_gradients(self, entry: _Entry) -> Iterable[tuple[Value, Tensor]]:
        if entry.is_last_stage and self._tail is not None:
            return self._tail.gradients_of(entry.microbatch)
        return self._receive(entry.stop) if entry.stop.arrivals else ()

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


def _entry_action(entry: _Entry | Stop) -> Action:
    return entry.action if isinstance(entry, Stop) else entry.stop.action


@dataclass(frozen=True, slots=True)
class _Program:
    """This rank's program for one schedule and certain plans."""

    made_from: tuple[Any, ...]
    route: Route
    entries: list[_Entry | Stop]
    splits_backward: bool
    sent_bytes: Mapping[int, int]
