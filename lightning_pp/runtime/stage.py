"""Running the user's step on one stage: forward with stand-ins for what is not owned, backward from what was sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pp.errors import SplitError
from lightning_pp.runtime.deferred import (
    WeightGradientQueue,
    collect_weight_gradients,
    delayed_weight_gradient_modules,
    weight_gradients_deferrable,
)
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.split.doors import DoorKeeper, StandInDoors
from lightning_pp.split.interception import UnitCalls
from lightning_pp.split.placeholders import is_fake
from lightning_pp.split.plan import StagePlan, StepPlan
from lightning_pp.split.record import UnitCall, Value
from lightning_pp.split.tree import leaves_of, replace_leaves


class _StageFinished(BaseException):
    """Leaves the user's step; not an Exception, so that no ``except Exception`` of the user's swallows it."""


@dataclass
class InFlight:
    """What a stage keeps of one microbatch between its forward and its last backward action.

    Attributes:
        received: Leaves of the autograd graph: received tensors that a gradient is returned for.
        outputs: Values made here that another stage needs, until they are sent.
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

    def run_weight_gradients(self, on_complete: Callable[[nn.Parameter], None] | None = None) -> None:
        """W: computes what I has queued; see :meth:`WeightGradientQueue.run`."""
        if self.ran_backward:
            self.queue.run(on_complete)


class _AsNonLeaf(torch.autograd.Function):
    """Gives a received leaf to the user's code as a tensor that it may edit in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        # over the same memory, yet not a view in autograd's sense: in-place edits of those are refused
        alias = tensor.new_empty(0)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return alias

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


class StageRunner:
    """Runs one stage's share of a step, microbatch by microbatch.

    Args:
        stage: Number of the stage.
        units: All units of the model, owned or not.
    """

    def __init__(self, stage: int, units: Mapping[str, nn.Module]) -> None:
        self.stage = stage
        self._calls = UnitCalls(units)
        self._units = units
        self._delayed: dict[str, list[nn.Module]] = {}

    def forward(
        self,
        plan: StepPlan,
        step: Callable[[], Any],
        received: Mapping[Value, Tensor],
        randomness: StepRandomness,
        *,
        with_gradients: bool,
        splits_backward: bool = False,
    ) -> tuple[InFlight, Any]:
        """Runs the user's step for one microbatch up to this stage's last call (F).

        Args:
            plan: The plan of the microbatch's signature.
            step: Runs the user's step on the microbatch.
            received: Value to tensor, as the plan's ``receives`` lists them.
            randomness: Seeds for glue that draws random numbers.
            with_gradients: Whether a backward follows.
            splits_backward: Whether that backward is I, with W to follow.

        Returns:
            What to keep and send, and what the user's step returned (None except on the last stage).

        Raises:
            SplitError: The step calls other units than the plan says, or touches a value that is not here.
        """
        stage_plan = plan.stages[self.stage]
        run = _StageForward(plan, stage_plan, self._units, received, randomness, with_gradients)
        if stage_plan.last_call == -1:  # nothing of this stage is called in such a step
            return run.in_flight, None
        output = None
        with (
            self._calls.handled_by(run.on_call),
            _deferrable(splits_backward),
            randomness.of_glue(plan.record.glue_is_random),
        ):
            try:
                output = step()
            except _StageFinished:
                pass
            else:
                run.check_complete()
            finally:
                run.doors.undo()
        return run.in_flight, output

    def backward(
        self,
        plan: StepPlan,
        in_flight: InFlight,
        gradients: Mapping[Value, Sequence[Tensor]],
        loss_weight: float,
        *,
        split: bool,
    ) -> dict[Value, Tensor]:
        """Runs the backward of one microbatch: I if ``split``, else B.

        Args:
            plan: The plan of the microbatch's signature.
            in_flight: What :meth:`forward` kept. Its graph is freed.
            gradients: For each sent value the gradients that came back, one per stage that uses it.
            loss_weight: What the loss is multiplied by.
            split: Whether weight gradients stay in ``in_flight.queue`` until W.

        Returns:
            The gradient of every received value that one is returned for.
        """
        roots: list[GradientEdge] = []
        root_gradients: list[Tensor] = []
        if in_flight.loss is not None:
            roots.append(get_gradient_edge(in_flight.loss))
            root_gradients.append(torch.full_like(in_flight.loss, loss_weight))
        for value, parts in gradients.items():
            if value in in_flight.roots and parts:
                roots.append(in_flight.roots[value])
                root_gradients.append(parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0))
        delayed = self._delayed_modules(plan)
        if roots:
            in_flight.ran_backward = True
            with _deferrable(split):
                if split:
                    with collect_weight_gradients(in_flight.queue):
                        torch.autograd.backward(roots, root_gradients)
                    for module in delayed:
                        in_flight.queue.defer_module(module)
                else:
                    torch.autograd.backward(roots, root_gradients)
                    for module in delayed:
                        module.backward_dw()  # type: ignore[operator]
        returned = {}
        for edge in plan.stages[self.stage].receives:
            if edge.has_gradient:
                leaf = in_flight.received[edge.value]
                returned[edge.value] = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
        in_flight.loss = None
        in_flight.roots.clear()
        in_flight.outputs.clear()
        in_flight.received.clear()
        return returned

    def _delayed_modules(self, plan: StepPlan) -> list[nn.Module]:
        """Modules of the stage's units that keep their weight gradients back themselves."""
        owned = plan.stages[self.stage].owned_calls
        units = dict.fromkeys(plan.record.calls[index].unit for index in sorted(owned))
        for unit in units:
            if unit not in self._delayed:
                self._delayed[unit] = delayed_weight_gradient_modules(self._units[unit])
        return [module for unit in units for module in self._delayed[unit]]


def _deferrable(splits_backward: bool) -> AbstractContextManager[None]:
    return weight_gradients_deferrable() if splits_backward else nullcontext()


class _StageForward:
    """The forward of one microbatch on one stage, as the handler of its unit calls."""

    def __init__(
        self,
        plan: StepPlan,
        stage_plan: StagePlan,
        units: Mapping[str, nn.Module],
        received: Mapping[Value, Tensor],
        randomness: StepRandomness,
        with_gradients: bool,
    ) -> None:
        self.in_flight = InFlight()
        self.doors = StandInDoors()
        self._units = units
        self._record = plan.record
        self._plan = stage_plan
        self._randomness = randomness
        self._next_call = 0
        self._inputs: dict[Value, Tensor] = {}
        self._sent = {edge.value for edge in stage_plan.sends}
        for edge in stage_plan.receives:
            tensor = received[edge.value]
            if with_gradients and edge.has_gradient:
                leaf = tensor.requires_grad_()
                self.in_flight.received[edge.value] = leaf
                tensor = _AsNonLeaf.apply(leaf)  # type: ignore[no-untyped-call]
            self._inputs[edge.value] = tensor

    def on_call(self, unit: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self._next_call
        self._next_call += 1
        calls = self._record.calls
        if index >= len(calls) or calls[index].unit != unit:
            expected = f"{calls[index].unit!r}" if index < len(calls) else "the end of the step"
            raise SplitError(
                f"The step called the unit {unit!r} as call {index}, where the dry run of a batch of the same shapes "
                f"saw {expected}. A step must call its units in the same order for all batches of the same shapes; "
                "make the choice inside a unit, or let it depend on a shape or on self.training."
            )
        call = calls[index]
        if index not in self._plan.owned_calls:
            self._randomness.next_call(index)
            self.doors.leave(call, self._units[unit], args, kwargs, self._tensor_of)
            return call.output_of(self._inputs)
        doors = DoorKeeper(call, self._units[unit], args, kwargs, self._sent)
        with self._randomness.of_unit(index), doors.watching():
            output = original(*args, **kwargs)
        output = self._keep(call, output)
        for value, tensor in doors.kept().items():
            self._keep_value(call, value, tensor)
        if index == self._plan.last_call:
            raise _StageFinished
        self._randomness.next_call(index)
        return output

    def check_complete(self) -> None:
        """The step ended: no owned call may be missing."""
        missing = [call.unit for call in self._record.calls[self._next_call :] if call.index in self._plan.owned_calls]
        if missing or self._next_call < len(self._record.calls):
            following = self._record.calls[self._next_call].unit
            raise SplitError(
                f"The step ended after {self._next_call} unit calls, where the dry run of a batch of the same shapes "
                f"saw {len(self._record.calls)}; the next would have been {following!r}."
            )

    def _tensor_of(self, value: Value) -> Tensor:
        stand_in: Tensor = self._record.leaf(value).stand_in
        return self._inputs.get(value, stand_in)

    def _keep(self, call: UnitCall, output: Any) -> Any:
        """Checks what an owned call returned against the record, and keeps what others need."""
        leaves = [output] if isinstance(output, Tensor) else leaves_of(output)
        if len(leaves) != len(call.leaves):
            raise SplitError(
                f"The unit {call.unit!r} returned {len(leaves)} values, where the dry run saw {len(call.leaves)}."
            )
        replaced = False
        for position, (leaf, expected) in enumerate(zip(leaves, call.leaves, strict=True)):
            if expected.spec is None:
                continue
            if not isinstance(leaf, Tensor) or is_fake(leaf):
                raise SplitError(
                    f"The unit {call.unit!r} on stage {self._plan.stage} computed with a value of another stage that "
                    "the dry run did not see it use. The values that a unit reads must not depend on more than the "
                    "shapes of the batch; make the choice inside a unit."
                )
            value = Value(call.index, position)
            if value not in self._sent:
                continue
            self._keep_value(call, value, leaf)
            if expected.edited_in_place:
                # the code after it edits its own copy; what is sent stays as the unit made it
                leaves[position], replaced = leaf.clone(), True
        if not replaced:
            return output
        return leaves[0] if isinstance(output, Tensor) else replace_leaves(output, leaves)

    def _keep_value(self, call: UnitCall, value: Value, tensor: Tensor) -> None:
        """Keeps a tensor that another stage needs."""
        expected = call.leaf(value.leaf)
        assert expected.spec is not None  # only tensors are values
        if tuple(tensor.shape) != expected.spec.shape or tensor.dtype != expected.spec.dtype:
            what = f"Output {value.leaf}" if value.leaf >= 0 else "A tensor left behind besides the outputs"
            raise SplitError(
                f"{what} of the unit {call.unit!r} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, where the "
                f"dry run of a batch of the same shapes saw {expected.spec.shape} and {expected.spec.dtype}: other "
                "stages cannot know its size."
            )
        # code after the unit may edit what left it by a door, and nothing can give it a copy
        edited_later = value.leaf < 0 and expected.edited_in_place
        kept = self.in_flight.outputs[value] = tensor.clone() if edited_later else tensor
        if kept.requires_grad:
            self.in_flight.roots[value] = get_gradient_edge(kept)
