"""Runs the user's step on one stage: forward with fakes for other stages' parameters, backward from sent tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.errors import SplitError
from lightning_pp.runtime._torch_private import run_backward
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.runtime.recomputation import Recomputation
from lightning_pp.runtime.split_backward.deferral import (
    collect_weight_gradients,
    delayed_weight_gradient_modules,
    weight_gradients_deferrable_if,
)
from lightning_pp.runtime.stage_forward import KNOWN_IN_ADVANCE, InFlight, StageCalls, StageForward
from lightning_pp.split.record.plan import StepPlan
from lightning_pp.split.record.step_record import Value
from lightning_pp.split.unit_calls.interception import CallHandler, UnitCalls

_MOST_PLANS = 512
CallWatch = Callable[[CallHandler], CallHandler]


class StageRunner:
    """Runs one stage's share of a step, microbatch by microbatch.

    Args:
        stage: Number of the stage.
        units: All units of the model, owned or not.
        calls: Intercepts their calls; by default for this stage alone.
        recomputation: Which units are run again in backward.
    """

    def __init__(
        self,
        stage: int,
        units: Mapping[str, nn.Module],
        calls: UnitCalls | None = None,
        recomputation: Recomputation | None = None,
    ) -> None:
        self.recomputation = recomputation or Recomputation(())
        self.stage = stage
        self._calls = calls or UnitCalls(units)
        self._units = units
        self._delayed: dict[str, list[nn.Module]] = {}
        self._prepared: dict[int, tuple[StepPlan, StageCalls, list[nn.Module]]] = {}

    def forward(
        self,
        plan: StepPlan,
        step: Callable[[], Any],
        receive: Callable[[], Iterable[tuple[Value, Tensor]]],
        randomness: StepRandomness,
        *,
        with_gradients: bool,
        splits_backward: bool = False,
        watch: CallWatch | None = None,
    ) -> tuple[InFlight, Any]:
        """Runs the user's step for one microbatch up to this stage's last call (F).

        Args:
            plan: The plan of the microbatch's signature.
            step: Runs the user's step on the microbatch.
            receive: Waits for all values of the plan's ``receives`` and returns them; called when the step needs them.
            randomness: Seeds for inter-unit code that draws random numbers.
            with_gradients: Whether a backward follows.
            splits_backward: Whether that backward is I, with W to follow.
            watch: Is shown what units are called with.

        Returns:
            What to keep and send, and what the user's step returned (None except on the last stage).

        Raises:
            SplitError: The step calls other units than the plan says, or touches a value that is not here.
        """
        calls = self._prepare(plan)[1]
        note = self._calls.regions.note_function
        run = StageForward(calls, self._units, receive, randomness, with_gradients, self.recomputation, note)
        if calls.plan.last_call == -1:  # nothing of this stage is called in such a step
            if calls.received:
                run.receive_the_rest()
            return run.in_flight, None
        scope, draws = weight_gradients_deferrable_if(splits_backward), calls.inter_unit_draws
        with self._calls.handled_by(run.on_call if watch is None else watch(run.on_call)):
            if scope is None and not draws.after:
                return run.in_flight, run.run(step)
            with scope or nullcontext(), randomness.between_units(draws) if draws.after else nullcontext():
                return run.in_flight, run.run(step)

    def backward(
        self,
        plan: StepPlan,
        in_flight: InFlight,
        gradients: Iterable[tuple[Value, Tensor]],
        loss_weight: float,
        *,
        split: bool,
    ) -> dict[Value, Tensor]:
        """Runs the backward of one microbatch: I if ``split``, else B but for what modules keep back themselves.

        That is left in ``in_flight.queue`` in both cases, for it need not be done before gradients are sent.

        Args:
            plan: The plan of the microbatch's signature.
            in_flight: What :meth:`forward` kept. :meth:`InFlight.end_backward` frees it: to be called when what is
                returned has been sent, since another stage waits for that.
            gradients: The gradients that came back for sent values, one per stage that uses the value; they are summed.
            loss_weight: What the loss is multiplied by.
            split: Whether all weight gradients stay in ``in_flight.queue`` until W.

        Returns:
            The gradient of every received value that one is returned for.

        Raises:
            SplitError: A gradient came of a value that the recorded step had cut off from the loss.
        """
        roots: list[Any] = []  # tensors, and edges where a tensor has been sent
        root_gradients: list[Tensor] = []
        if in_flight.loss is not None:
            roots.append(in_flight.loss)
            root_gradients.append(torch.full_like(in_flight.loss, loss_weight))
        for value, gradient in gradients:
            root = in_flight.roots.get(value)
            if root is not None:
                roots.append(root)
                root_gradients.append(gradient)
        _, calls, delayed = self._prepare(plan)
        if roots:
            in_flight.ran_backward = True
            scope = weight_gradients_deferrable_if(split)
            if scope is None and not split:
                run_backward(roots, root_gradients)
            else:
                with scope or nullcontext(), collect_weight_gradients(in_flight.queue) if split else nullcontext():
                    run_backward(roots, root_gradients)
            for module in delayed:
                in_flight.queue.defer_module(module)
        returned = {}
        for value, leaf in in_flight.received.items():
            if calls.received[value]:
                returned[value] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            elif leaf.grad is not None:
                raise SplitError(
                    f"Stage {self.stage} has a gradient for {plan.name_of(value)}. In the recorded step it had none, "
                    f"so no stage takes it. {KNOWN_IN_ADVANCE}"
                )
        return returned

    def buffers(self, plan: StepPlan) -> list[Tensor]:
        """The buffers of this stage's units."""
        units = {plan.record.calls[index].unit for index in plan.stages[self.stage].owned_calls}
        return [each for unit in units for each in self._units[unit].buffers()]

    def _prepare(self, plan: StepPlan) -> tuple[StepPlan, StageCalls, list[nn.Module]]:
        """What a plan means here, and the modules of its units that keep their weight gradients back themselves."""
        prepared = self._prepared.get(id(plan))
        if prepared is None:
            if len(self._prepared) >= _MOST_PLANS:
                self._prepared.clear()
            owned = plan.stages[self.stage].owned_calls
            units = dict.fromkeys(plan.record.calls[index].unit for index in sorted(owned))
            for unit in units:
                if unit not in self._delayed:
                    self._delayed[unit] = delayed_weight_gradient_modules(self._units[unit])
            delayed = [module for unit in units for module in self._delayed[unit]]
            # the plan is kept with what came of it, so that its id stays its own
            prepared = self._prepared[id(plan)] = (plan, StageCalls(plan, self.stage), delayed)
        return prepared
