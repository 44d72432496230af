"""Runs F, I and W of some units alone: with random parameters, on made-up inputs.

The user's step runs as on the stage of a pipeline that has just these units (:class:`StageRunner`): everything else in
it is fake. So a model that does not fit into memory can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.planning.stage_model import RecordedModel
from lightning_pp.planning.steps.plans import UnrecordedRun
from lightning_pp.planning.unit_times.distinct import Group, calls_of
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.runtime.split_backward.deferral import weight_gradients_deferrable
from lightning_pp.runtime.stage import StageRunner
from lightning_pp.runtime.timing import moment, ms_between
from lightning_pp.split.cut.partition import inseparable_groups
from lightning_pp.split.cut.unit_costs import UnitCost
from lightning_pp.split.record.plan import StepPlan, build_plan
from lightning_pp.split.record.step_record import TensorSpec, Value
from lightning_pp.split.side_effects.generators import generators_untouched
from lightning_pp.split.side_effects.module_state import preserved_state
from lightning_pp.split.unit_calls.interception import CallHandler, UnitCalls

_SPREAD = 0.02  # of random parameters: of the size that initialisers give


@dataclass(eq=False)
class UnitsAlone:
    """Some units of a model, allocated and ready to run. Use them within :meth:`ready`.

    Attributes:
        recording: The model.
        group: The units.
        step: Runs the user's step on the microbatch that was recorded.
        device: Where they run.
        zeros: Whether they receive zeros, which serve as indices as well, instead of random values.
    """

    recording: RecordedModel
    group: Group
    step: Callable[[Any], Any]
    device: torch.device
    zeros: bool = False

    def __post_init__(self) -> None:
        self._plan, self._stage = _plan_around(self.recording, self.group)
        self._calls = UnitCalls(self.recording.units)
        self._runner = StageRunner(self._stage, self.recording.units, self._calls, self.recording.recomputation)
        # calls whose time counts, with the code before them
        self._owned = {call.index for call in calls_of(self.recording, self.group.units)}

    @contextmanager
    def ready(self) -> Iterator[None]:
        """In the block, the units have parameters with random values on the device; everything else has none."""
        recording = self.recording
        with ExitStack() as stack:
            stack.enter_context(generators_untouched(self.device))
            torch.manual_seed(0)
            stack.enter_context(recording.fake_parameters.all_fake(lambda fake, name: None))
            stack.enter_context(recording.fake_parameters.replaced(self._parameters()))
            stack.enter_context(preserved_state(recording.module))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._calls.installed())
            stack.enter_context(weight_gradients_deferrable())
            yield

    def run(self) -> UnitCost:
        """Milliseconds of F, I and W of one microbatch."""
        plan, now = self._plan, partial(moment, self.device)
        received = [(edge.value, self._made_up(edge.spec)) for edge in plan.stages[self._stage].receives]
        marks = [now()]
        in_flight, output = self._runner.forward(
            plan,
            lambda: self.step(UnrecordedRun(copies_batch=plan.record.edits_batch)),
            lambda: received,
            StepRandomness(0, self.device),
            with_gradients=True,
            splits_backward=True,
            watch=lambda handler: self._marking(handler, marks),
        )
        marks.append(now())
        forward = [index for index in range(len(marks) - 1) if index in self._owned]
        if self.group.is_last:
            forward.append(len(marks) - 2)
            in_flight.loss = _loss_of(output)
        gradients = self._gradients(in_flight.outputs)
        in_flight.outputs.clear()
        started = now()
        self._runner.backward(plan, in_flight, gradients, 1.0, split=True)
        in_flight.end_backward()
        middle = now()
        in_flight.run_weight_gradients()
        ended = now()
        times = [ms_between(marks[index], marks[index + 1]) for index in dict.fromkeys(forward)]
        return UnitCost(sum(times), ms_between(started, middle), ms_between(middle, ended))

    def _marking(self, handler: CallHandler, marks: list[Any]) -> CallHandler:
        """``handler`` with a mark after each call that the step was recorded with."""
        head = self.recording.record.split_head

        def marked(unit: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return handler(unit, original, args, kwargs)
            finally:
                if unit != head:
                    marks.append(moment(self.device))

        return marked

    def _gradients(self, sent: Mapping[Value, Tensor]) -> list[tuple[Value, Tensor]]:
        """Random gradients of what goes to later stages, one for each, as they would come back."""
        edges = self._plan.stages[self._stage].sends
        values = dict.fromkeys(edge.value for edge in edges if edge.has_gradient)
        return [(value, torch.randn_like(sent[value])) for value in values if value in sent]

    def _made_up(self, spec: TensorSpec) -> Tensor:
        if self.zeros or not (spec.dtype.is_floating_point or spec.dtype.is_complex):
            return torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)
        return torch.randn(spec.shape, dtype=spec.dtype, device=self.device)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """New parameters by canonical name: those of the units, and those that the code around them uses."""
        recording, fakes = self.recording, self.recording.fake_parameters
        names: set[str] = set()
        for unit in self.group.units:
            for key, _ in recording.units[unit].named_parameters(remove_duplicate=False):
                names.add(fakes.canonical_names[f"{unit}.{key}"])
        for call in calls_of(recording, self.group.units):
            names |= call.reads.parameters.keys()
        if self.group.is_last:
            names |= recording.record.tail.parameters.keys()
        return {name: self._parameter(name) for name in sorted(names)}

    def _parameter(self, name: str) -> nn.Parameter:
        fakes = self.recording.fake_parameters
        like = fakes.parameter(name)
        dtype = fakes.compute_dtype if fakes.is_cast(name) else like.dtype
        values = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=self.device)
        if values.is_floating_point() or values.is_complex():
            values.normal_(0.0, _SPREAD)
        else:
            values.zero_()
        return nn.Parameter(values, requires_grad=like.requires_grad)


def _plan_around(recording: RecordedModel, group: Group) -> tuple[StepPlan, int]:
    """A plan with a stage of just these units, and its number: one before it and one after it have all the others."""
    groups = inseparable_groups(recording.record)
    own = int(group.index > 0)
    stage_of_unit = {
        unit: own if index == group.index else 0 if index < group.index else own + 1
        for index, units in enumerate(groups)
        for unit in units
    }
    return build_plan(recording.record, stage_of_unit, max(stage_of_unit.values()) + 1), own


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) and loss.requires_grad else None
