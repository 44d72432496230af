"""The forward of one microbatch on one stage: runs own units, replaces calls of others, keeps tensors to send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_pp.errors import SplitError
from lightning_pp.runtime._torch_private import edge_to
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.runtime.recomputation import Recomputation
from lightning_pp.runtime.split_backward.deferral import WeightGradientQueue
from lightning_pp.split.data.tree import leaves_of, replace_leaves
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.head.deferred_logits import WholeHeadError, deferred
from lightning_pp.split.head.parts import parts_in
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.record.step_record import OF_OPERATION, Operation, OperationPlace, TensorSpec, UnitCall, Value
from lightning_pp.split.side_effects.carried import FakeSideEffects, SideEffectKeeper
from lightning_pp.split.unit_calls.compilation import uncompiled_outside_units
from lightning_pp.split.unit_calls.compute_dtype import cast_activations
from lightning_pp.split.unit_calls.operations import NoteFunction, OperationCalls, lost_operation


class StageFinished(BaseException):
    """Ends the user's step; not an Exception, so that no ``except Exception`` of the user catches it."""


@dataclass(slots=True)
class InFlight:
    """The state of one microbatch on a stage between its forward and its last backward action.

    Attributes:
        received: Leaves of the autograd graph: received tensors that depend on weights of other stages.
        outputs: Values made here that another stage needs, until they are sent; those that the plan keeps.
        roots: Where their gradients enter the graph. A value itself, once sent, is kept only if backward needs it.
        loss: The loss, on the last stage of a training step.
        queue: Weight gradients that I has left for W.
        ran_backward: Whether I had anything to do; a stage that is frozen, with all before it, has not.
    """

    received: dict[Value, Tensor] = field(default_factory=dict)
    outputs: dict[Value, Tensor] = field(default_factory=dict)
    roots: dict[Value, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None
    queue: WeightGradientQueue = field(default_factory=WeightGradientQueue)
    ran_backward: bool = False

    def end_backward(self) -> None:
        """I is over: nothing is kept but what W needs."""
        self.loss = None
        self.received.clear()
        self.outputs.clear()
        self.roots.clear()

    def run_weight_gradients(self, on_complete: Callable[[nn.Parameter], None] | None = None) -> None:
        """W: computes what I has queued; see :meth:`WeightGradientQueue.run`."""
        if self.ran_backward:
            self.queue.run(on_complete)


@dataclass(frozen=True, slots=True)
class _Call:
    """One unit call of the step, as a stage sees it.

    Attributes:
        unit: Name of the unit.
        record: What the dry run saw.
        is_owned: Whether it runs here.
        is_last: Whether the step ends with it here.
        draws_follow: Whether code after it draws random numbers.
        sent: For each output leaf its name, if another stage needs it.
        has_side_effects: Whether the unit leaves anything behind besides its outputs.
        is_received: Whether the stage receives any of its outputs.
        fake: Its result where it does not run here, if that is constant and nothing else is to be done.
        value: Its result if that is one tensor; otherwise None.
        crossed_before: By number the operations between the call before and this one whose results cross here.
    """

    unit: str
    record: UnitCall
    is_owned: bool
    is_last: bool
    draws_follow: bool
    sent: tuple[Value | None, ...]
    has_side_effects: bool
    is_received: bool
    fake: Tensor | None
    value: Value | None
    crossed_before: Mapping[int, Operation]


KNOWN_IN_ADVANCE = (
    "Every stage must know in advance which units a step calls and where gradients flow. Decide by the values of a "
    "microbatch, by batch_idx, by what the module reads from its trainer (self.global_step, self.current_epoch), or "
    "by its plain attributes. Choose inside a unit if a sum, a count or any() over samples decides: these cover the "
    "whole batch while the step runs, but not when it is recorded. If something else decides (a global variable, the "
    "inside of another object, a trainer not reached through the module), set dynamic_step=True on the strategy."
)


_LOGITS_USED = (
    "{how}, but {head!r} is cut along its classes, so no stage has all logits. In the recorded step one cross "
    "entropy was their only use. Set split_head=False on the strategy, or use logits in validation only."
)


class StageCalls:
    """A plan's part for one stage, prepared for the forwards of all microbatches that follow the plan.

    Args:
        plan: The plan.
        stage: Number of the stage.
    """

    def __init__(self, plan: StepPlan, stage: int) -> None:
        self.plan = plan.stages[stage]
        self.inter_unit_draws = plan.record.inter_unit_draws
        self.compute_dtype = plan.record.compute_dtype
        # and whether a gradient goes back
        self.received = received = {edge.value: edge.has_gradient for edge in self.plan.receives}
        self.sent = frozenset(edge.value for edge in self.plan.sends) | self.plan.keeps
        self.tracked = {value for value in (*received, *self.sent) if plan.record.leaf(value).requires_grad}
        self.name_of = plan.name_of
        # results of operations between units that come here or leave, and those of them that the step ends with
        self.operations = {
            value.leaf: plan.record.operations[value.leaf]
            for value in (*received, *self.sent)
            if not value.made_by_unit
        }
        self.record = plan.record
        self.split_head = plan.record.split_head
        last_call = self.plan.last_call
        self.last_operations = frozenset(
            number
            for number, operation in self.operations.items()
            if last_call is not None and operation.place.num_calls == last_call + 1
        )
        # what nobody writes into can be the leaf itself
        self.edited = {value for value in received if plan.record.leaf(value).edited_in_place}
        self.calls: list[_Call] = []
        for call in plan.record.calls:
            values = [Value(call.index, position) for position in range(len(call.leaves))]
            value = values[0] if call.output is None and call.leaves[0].spec is not None else None
            is_owned, draws_follow = call.index in self.plan.owned_calls, call.index in self.inter_unit_draws.after
            is_received = not received.keys().isdisjoint(values)
            is_fake_alone = not (is_owned or is_received or draws_follow or call.side_effects or value is None)
            self.calls.append(
                _Call(
                    call.unit,
                    call,
                    is_owned,
                    call.index == last_call and not self.last_operations,
                    draws_follow,
                    tuple(value if value in self.sent else None for value in values),
                    bool(call.side_effects),
                    is_received,
                    call.leaves[0].fake if is_fake_alone and not call.leaves[0].edited_in_place else None,
                    value,
                    {n: each for n, each in self.operations.items() if each.place.num_calls == call.index},
                )
            )


def _another_size(call: _Call, leaf: int, tensor: Tensor, spec: TensorSpec) -> SplitError:
    what, foreseen = f"Output {leaf}", "Run without data on inputs of the same shapes, the unit returned"
    if leaf < 0:
        what, foreseen = (
            "A tensor that is not an output",
            "By the sizes of the unit's inputs it should have",
        )
    return SplitError(
        f"{what} of the unit {call.unit!r} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}. {foreseen} "
        f"{spec.shape} and {spec.dtype}. Other stages rely on that.{'' if leaf >= 0 else ' Return it from the unit.'}"
    )


class StageForward:
    """One forward, as the handler of its unit calls.

    A received tensor is waited for when the step reaches the call that it replaces; the code before the call overlaps
    with the transfer.

    Args:
        calls: The stage's calls.
        units: All units of the model.
        receive: Waits for and returns the values that the plan's ``receives`` lists.
        randomness: Seeds for inter-unit code that draws random numbers.
        with_gradients: Whether a backward follows.
        recomputation: Which units are run again in backward.
        note_function: As of :class:`OperationCalls`.
    """

    # fmt: off
    __slots__ = ("_failure", "_inputs", "_next_call", "_num_last_operations", "_operations", "_randomness", "_receive",
                 "_recomputation", "_stage", "_units", "_with_gradients", "in_flight", "side_effects")
    # fmt: on

    def __init__(
        self,
        calls: StageCalls,
        units: Mapping[str, nn.Module],
        receive: Callable[[], Iterable[tuple[Value, Tensor]]],
        randomness: StepRandomness,
        with_gradients: bool,
        recomputation: Recomputation,
        note_function: NoteFunction = lambda name, received: None,
    ) -> None:
        self._recomputation = recomputation
        # followed only where the result of one crosses
        self._operations: OperationCalls | None = None
        if calls.operations:
            self._operations = OperationCalls(calls.record.operation_numbers.get, self._on_operation, note_function)
        self._num_last_operations = 0
        self.in_flight = InFlight()
        self.side_effects = FakeSideEffects()
        self._stage = calls
        self._units = units
        self._randomness = randomness
        self._next_call = 0
        self._receive: Callable[[], Iterable[tuple[Value, Tensor]]] | None = receive  # None once it has been called
        self._with_gradients = with_gradients
        self._inputs: dict[Value, Tensor] = {}
        self._failure: Exception | None = None

    def on_call(self, unit: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the unit, or returns its replacement.

        Raises:
            SplitError: It is not the call that the dry run saw here.
            StageFinished: It was the last that this stage runs.
        """
        if unit == self._stage.split_head:
            return deferred(parts_in(self._units)[unit], args, kwargs)
        index = self._next_call
        self._next_call += 1
        calls = self._stage.calls
        if index >= len(calls) or calls[index].unit != unit:
            if index < len(calls):
                recorded = f"called {calls[index].unit!r} there"
            else:
                recorded = f"ended after {calls[-1].unit!r}" if calls else "called no unit"
            raise SplitError(
                f"{user_line()} called unit {unit!r}, but the recorded step {recorded}. {KNOWN_IN_ADVANCE}"
            )
        call = calls[index]
        if self._operations is None:
            return self._called(call, index, original, args, kwargs) if call.fake is None else call.fake
        self._check_operations(call.crossed_before)
        output = self._called(call, index, original, args, kwargs)
        self._operations.note_call(call.record, output)
        return output

    def _called(
        self, call: _Call, index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        unit = call.unit
        if not call.is_owned:
            if call.draws_follow:
                self._randomness.seed_inter_unit(index)
            if call.has_side_effects:
                self.side_effects.leave(call.record, self._units[unit], args, kwargs, self._tensor_of)
            if call.value is not None:
                return self._tensor_of(call.value)
            if call.is_received and self._receive is not None:
                self._take_received(self._receive)
            return call.record.output_of(self._inputs)
        if self._stage.compute_dtype is not None:
            args, kwargs = cast_activations(call.record, args, kwargs, self._stage.compute_dtype)
        if unit in self._recomputation.units:
            original = partial(self._recomputation.run, original)
        if self._stage.inter_unit_draws.after:
            self._randomness.enter_unit()
        if call.has_side_effects:
            side_effects = SideEffectKeeper(call.record, self._units[unit], args, kwargs, self._stage.sent)
            with side_effects.watching():
                output = self._keep(call, original(*args, **kwargs))
            for value, tensor in side_effects.kept().items():
                self._keep_sent(call, value, tensor)
        else:
            output = self._keep(call, original(*args, **kwargs))
        if call.is_last:
            raise StageFinished
        if call.draws_follow:
            self._randomness.seed_inter_unit(index)
        return output

    def run(self, step: Callable[[], Any]) -> Any:
        """Runs the user's step up to the stage's last call; unit calls run :meth:`on_call`.

        Returns:
            What it returned; None where it was left before.
        """
        output = None
        try:
            if self._operations is None:
                output = step()
            else:
                with uncompiled_outside_units(), self._operations:
                    output = step()
        except StageFinished:
            pass
        except WholeHeadError as error:
            raise SplitError(_LOGITS_USED.format(how=error, head=self._stage.split_head)) from None
        except Exception:
            self.raise_failure()
            raise
        else:
            self.check_complete()
        finally:
            self.side_effects.undo()
            self._operations = None  # it holds this forward, with what was received
        self.raise_failure()
        self.receive_the_rest()
        return output

    def _on_operation(self, number: int, place: OperationPlace, given: list[Tensor], result: Tensor) -> Tensor:
        """Substitutes the received tensor for an operation's result, or stores the result for sending.

        Raises:
            SplitError: Its result differs from the recorded step.
            StageFinished: It was the last result that this stage sends.
        """
        operation = self._stage.operations.get(number)
        if operation is None:
            return result
        value, spec = Value(OF_OPERATION, number), operation.result.spec
        assert spec is not None
        if result.shape != spec.shape or result.dtype != spec.dtype:
            raise SplitError(
                f"{user_line()} ({place.name}) made a tensor of shape {tuple(result.shape)} and dtype {result.dtype}, "
                f"but the recorded step made {spec.shape} and {spec.dtype} there. The tensor crosses between stages, "
                "and the other stages rely on the recorded size."
            )
        if value in self._stage.received:
            return self._tensor_of(value)
        if type(result) is not Tensor:
            raise SplitError(
                f"{user_line()} ({place.name}) used a value that stage {self._stage.plan.stage} does not have. This "
                f"stage sends the result, and the recorded step did not use that value there. {KNOWN_IN_ADVANCE}"
            )
        self._keep_value(value, result)
        if number in self._stage.last_operations:
            self._num_last_operations += 1
            if self._num_last_operations == len(self._stage.last_operations):
                raise StageFinished
        return result

    def _check_operations(self, operations: Mapping[int, Operation]) -> None:
        """Raises :class:`SplitError` if one of ``operations``, which cross before the call reached now, has not run."""
        assert self._operations is not None
        for number, operation in operations.items():
            if not self._operations.have_run(self._stage.record, [number]):
                raise SplitError(lost_operation(operation.place, operation.line))

    def receive_the_rest(self) -> None:
        """Waits for the received tensors, if the step has not yet."""
        if self._receive is not None:
            self._take_received(self._receive)

    def raise_failure(self) -> None:
        """Raises what receiving has failed with, if it has, whatever the user's code made of it."""
        if self._failure is not None:
            raise self._failure

    def check_complete(self) -> None:
        """The step ended: no call may be missing."""
        calls = self._stage.calls
        if self._next_call < len(calls):
            missing = calls[self._next_call]
            raise SplitError(
                f"The step ended after {self._next_call} unit calls, but the recorded step went on to call unit "
                f"{missing.unit!r} at {missing.record.line}. {KNOWN_IN_ADVANCE}"
            )

    def _take_received(self, receive: Callable[[], Iterable[tuple[Value, Tensor]]]) -> None:
        self._receive = None
        try:
            received = receive()
        except RuntimeError as error:
            self._failure = error
            raise
        for value, tensor in received:
            if value in self._stage.plan.keeps:
                self._keep_received(value, tensor)
            if self._with_gradients and value in self._stage.tracked:
                self.in_flight.received[value] = tensor.requires_grad_()
            if value in self._stage.edited:
                # a leaf cannot be edited, and one that a stage on this rank made may be under way to a third
                with torch.enable_grad():  # the user's code may have switched it off for this call
                    tensor = tensor.clone()
            self._inputs[value] = tensor

    def _keep_received(self, value: Value, tensor: Tensor) -> None:
        """Keeps a received value as it has come; its gradient enters the graph at the leaf."""
        self.in_flight.outputs[value] = tensor.detach()
        if self._with_gradients and self._stage.received[value]:
            self.in_flight.roots[value] = edge_to(tensor.requires_grad_())

    def _tensor_of(self, value: Value) -> Tensor:
        if value in self._stage.received and self._receive is not None:
            self._take_received(self._receive)
        if value not in self._inputs:  # once, for the unit may return it as well
            self._inputs[value] = self._stage.calls[value.call].record.leaf(value.leaf).for_one_step()
        return self._inputs[value]

    def _keep(self, call: _Call, output: Any) -> Any:
        """Checks what an owned call returned against the record, and keeps what others need."""
        record = call.record
        if type(output) is Tensor and len(call.sent) == 1:  # nearly always
            sent = call.sent[0]
            if sent is not None and not record.leaves[0].edited_in_place:
                self._keep_sent(call, sent, output)
                return output
        leaves = [output] if isinstance(output, Tensor) else leaves_of(output)
        if len(leaves) != len(record.leaves):
            raise SplitError(
                f"The unit {call.unit!r} returned {len(leaves)} values, but the dry run saw {len(record.leaves)}."
            )
        replaced = False
        for position, (leaf, expected, sent) in enumerate(zip(leaves, record.leaves, call.sent, strict=True)):
            if expected.spec is None:
                continue
            if type(leaf) is not Tensor and (not isinstance(leaf, Tensor) or is_fake(leaf)):
                raise SplitError(
                    f"The unit {call.unit!r} on stage {self._stage.plan.stage} used a value of another stage that it "
                    f"did not use in the recorded step. {KNOWN_IN_ADVANCE}"
                )
            if sent is not None:
                self._keep_sent(call, sent, leaf)
                if expected.edited_in_place:
                    # the code after it edits its own copy; what is sent stays as the unit made it
                    leaves[position], replaced = leaf.clone(), True
            elif leaf.shape != expected.spec.shape:
                raise _another_size(call, position, leaf, expected.spec)
        if not replaced:
            return output
        return leaves[0] if isinstance(output, Tensor) else replace_leaves(output, leaves)

    def _keep_sent(self, call: _Call, value: Value, tensor: Tensor) -> None:
        """Keeps a tensor that another stage needs."""
        leaf = call.record.leaf(value.leaf)
        spec = leaf.spec
        assert spec is not None  # only tensors are values
        if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
            raise _another_size(call, value.leaf, tensor, spec)
        # code after the unit may edit what left it as a side effect, and nothing can give it a copy
        self._keep_value(value, tensor.clone() if value.leaf < 0 and leaf.edited_in_place else tensor)

    def _keep_value(self, value: Value, kept: Tensor) -> None:
        self.in_flight.outputs[value] = kept
        if kept.requires_grad:
            if self._with_gradients and value not in self._stage.tracked:
                raise SplitError(
                    f"On stage {self._stage.plan.stage} {self._stage.name_of(value)} requires a gradient. In the "
                    f"recorded step it did not, so no stage sends one back. {KNOWN_IN_ADVANCE}"
                )
            self.in_flight.roots[value] = edge_to(kept)
