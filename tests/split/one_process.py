"""All stages of a pipeline in one process, without torch.distributed.

Every stage is a model of its own, built anew, that keeps only the parameters of its units. Values and gradients are
handed from stage to stage by hand, in the order in which a pipeline would. What comes out is compared with plain
autograd on the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from layouts import split_model
from live_memory import LiveMemory
from torch import Tensor, nn

from lightning_pp.planning.stage_model import RecordingOptions, SplitModel, record_model
from lightning_pp.planning.steps.plans import StepPlanCache, signature_of
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.runtime.recomputation import Recomputation
from lightning_pp.runtime.stage import StageRunner
from lightning_pp.runtime.stage_forward import InFlight
from lightning_pp.split.data.tree import own_copy, tensors_of
from lightning_pp.split.dry_run.run import DryRun, dry_run
from lightning_pp.split.fakes.parameters import FakeParameters, has_data, is_fake
from lightning_pp.split.record.plan import StagePlan, StepPlan, build_plan
from lightning_pp.split.record.step_record import StepRecord, Value
from lightning_pp.split.unit_calls.units import discover_units

CPU = torch.device("cpu")

# What gradients are divided by where they are smaller: their errors are relative to 1 at least.
TOLERANCE = 1e-9


@dataclass
class Outcome:
    """What a step gave: its loss, what it logged, the gradient of every parameter by its canonical name."""

    loss: Tensor
    logged: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    outputs: list[Any] = field(default_factory=list)


def build(architecture: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same model, with the same float64 parameters, every time."""
    torch.manual_seed(seed)
    return architecture().double().train()


def loss_of(output: Any) -> Tensor:
    return output["loss"] if hasattr(output, "keys") else output


@contextmanager
def logging_to(module: nn.Module, sink: Callable[[str, Any], None]) -> Iterator[None]:
    module.__dict__["log"] = sink
    try:
        yield
    finally:
        del module.__dict__["log"]


def recorded(module: nn.Module, batch: Any, step: str = "training_step") -> Callable[[DryRun], Any]:
    """The step as a dry run wants it."""

    def run(dry: DryRun) -> Any:
        with logging_to(module, lambda _, value: dry.need_at_end(value)):
            return getattr(module, step)(batch)  # a dry run leaves the batch as it is

    return run


def record_of(module: nn.Module, batch: Any, *, units: Any = None, with_gradients: bool = True) -> StepRecord:
    """What a dry run of its training step records."""
    return dry_run(
        recorded(module, batch),
        units=discover_units(module, units),
        fake_parameters=FakeParameters(module, CPU),
        with_gradients=with_gradients,
    )


def run_whole(module: nn.Module, batches: Sequence[Any], weights: Sequence[float]) -> Outcome:
    """Plain autograd on the whole model, one batch after the other."""
    logged: dict[str, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    module.zero_grad()
    for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):

        def log(name: str, value: Any, index: int = index) -> None:
            logged[f"{name}/{index}"] = torch.as_tensor(value).detach().clone()

        with logging_to(module, log):
            loss = loss_of(module.training_step(own_copy(batch))) * weight  # type: ignore[operator]
        loss.backward()
        total += loss.detach()
    return Outcome(total, logged, {name: parameter.grad for name, parameter in module.named_parameters()})


class Stage:
    """One stage: a model with only its own parameters, and what runs them."""

    def __init__(self, number: int, module: nn.Module, split: SplitModel, *, splits_backward: bool) -> None:
        self.number = number
        self.module = module
        self.fake_parameters = FakeParameters(module, CPU)
        self.fake_parameters.mode = split.fake_parameters.mode
        self.fake_parameters.release(split.owned_by(number))
        self.splits_backward = splits_backward
        self.units = {name: module.get_submodule(name) for name in split.units}
        self.runner = StageRunner(number, self.units)
        assert set(self.gradients()) == split.owned_by(number)
        assert all(has_data(parameter) for parameter in module.parameters())

    def gradients(self) -> dict[str, Tensor | None]:
        names = self.fake_parameters.canonical_names
        return {names[name]: parameter.grad for name, parameter in self.module.named_parameters()}


def gradients_of_sent(plan: StagePlan, wires: Mapping[Value, Sequence[Tensor]]) -> list[tuple[Value, Tensor]]:
    """The gradients that have come back for what a stage sent."""
    sent = dict.fromkeys(edge.value for edge in plan.sends)
    return [(value, gradient) for value in sent for gradient in wires.get(value, ())]


class OneProcessPipeline:
    """Cuts a model into stages and runs them in turn.

    Args:
        architecture: Makes the model.
        batch: What the cut is made with.
        num_stages: Number of stages.
        units: Names or patterns of the units, or None to discover them.
        refined: Units in whose place their children are units.
        split_points: Units that start a stage, or None to balance.
        splits_backward: Whether weight gradients are deferred.
        own_dry_runs: Whether every stage records the step by itself, with the parameters that it has left.
        activation_checkpointing: The strategy's argument.
    """

    def __init__(
        self,
        architecture: Callable[[], nn.Module],
        batch: Any,
        num_stages: int,
        *,
        units: Sequence[str] | None = None,
        refined: Collection[str] = (),
        split_points: Sequence[str] | None = None,
        splits_backward: bool = False,
        own_dry_runs: bool = False,
        training: bool = True,
        activation_checkpointing: Any = False,
    ) -> None:
        self._training = training
        whole = build(architecture).train(training)
        self.split = split_model(
            record_model(
                whole,
                device=CPU,
                step=recorded(whole, batch, self.step_name),
                with_gradients=training,
                patterns=units,
                num_stages=num_stages,
                how=RecordingOptions(activation_checkpointing=activation_checkpointing, refined=refined),
            ),
            num_stages,
            split_points,
        )
        self.stages = [
            Stage(number, build(architecture).train(training), self.split, splits_backward=splits_backward)
            for number in range(num_stages)
        ]
        for stage in self.stages:
            stage.runner.recomputation = self.split.recomputation or stage.runner.recomputation
        self._first = (
            signature_of(batch),
            build_plan(self.split.record, self.split.partition.stage_of_unit, num_stages),
        )
        self._records_itself = own_dry_runs
        self._books = [self.split.plans] * num_stages
        self._modules = [self.split.module] * num_stages
        if own_dry_runs:
            self._modules = [stage.module for stage in self.stages]
            self._books = [StepPlanCache(stage.module, stage.units, stage.fake_parameters) for stage in self.stages]
            for book in self._books:
                book.set_partition(self.split.partition.stage_of_unit, num_stages, self.split.owners)

    @property
    def step_name(self) -> str:
        return "training_step" if self._training else "validation_step"

    def plans(self, batch: Any) -> list[StepPlan]:
        """Every stage's plan for ``batch``; the cut has recorded the step on the batch that it was made with."""
        signature, plan = self._first
        if signature == signature_of(batch) and not self._records_itself:
            return [plan] * len(self.stages)
        return [
            book.plan(signature_of(batch), recorded(module, batch, self.step_name), with_gradients=self._training)
            for book, module in zip(self._books, self._modules, strict=True)
        ]

    def run(self, batches: Sequence[Any], weights: Sequence[float]) -> Outcome:
        """Forward of all stages for all batches, then backward of all, latest first."""
        logged: dict[str, Tensor] = {}
        total = torch.zeros((), dtype=torch.float64)
        runs = []
        for index, batch in enumerate(batches):
            kept, output = self.forward(batch, index, logged)
            kept[-1].loss = loss_of(output)
            assert has_data(kept[-1].loss)
            total += kept[-1].loss.detach() * weights[index]
            runs.append((self.plans(batch), kept))
        for (plans, kept), weight in reversed(list(zip(runs, weights, strict=True))):
            self.backward(plans, kept, weight)
        gradients: dict[str, Tensor | None] = {}
        for stage in self.stages:
            for name, gradient in stage.gradients().items():
                other = gradients.get(name)
                gradients[name] = gradient if other is None else other if gradient is None else other + gradient
        return Outcome(total, logged, gradients)

    def forward(
        self, batch: Any, index: int = 0, logged: dict[str, Tensor] | None = None
    ) -> tuple[list[InFlight], Any]:
        """What every stage keeps of ``batch``, and what the last returned."""
        wires: dict[Value, Tensor] = {}
        kept: list[InFlight] = []
        output: Any = None
        for stage, plan in zip(self.stages, self.plans(batch), strict=True):
            received = [(edge.value, wires[edge.value].clone()) for edge in plan.stages[stage.number].receives]
            is_last = stage is self.stages[-1]
            own_batch = own_copy(batch) if plan.record.edits_batch else batch

            def log(name: str, value: Any, is_last: bool = is_last) -> None:
                if is_last and logged is not None:
                    assert not is_fake(value), name
                    logged[f"{name}/{index}"] = torch.as_tensor(value).detach().clone()

            with logging_to(stage.module, log), torch.set_grad_enabled(self._training):
                in_flight, output = stage.runner.forward(
                    plan,
                    partial(getattr(stage.module, self.step_name), own_batch),
                    partial(iter, received),
                    StepRandomness(index, CPU),
                    with_gradients=self._training,
                    splits_backward=stage.splits_backward,
                )
            expected = {edge.value for edge in plan.stages[stage.number].sends}
            assert set(in_flight.outputs) == expected
            for value, tensor in in_flight.outputs.items():
                assert has_data(tensor)
                wires[value] = tensor.detach()
            kept.append(in_flight)
        assert all(has_data(tensor) for tensor in tensors_of(output))
        return kept, output

    def watched_forwards(self, batch: Any, threshold: int = 0) -> Iterator[tuple[StepPlan, InFlight, int]]:
        """Runs F of every stage, and watches what it allocates.

        Args:
            batch: Of one microbatch.
            threshold: Memories of fewer bytes do not count.

        Yields:
            Of each stage the plan, what it keeps for I, and the bytes of what lives when its outputs have been sent.
        """
        values: dict[Value, Tensor] = {}
        for stage, plan in zip(self.stages, self.plans(batch), strict=True):
            with LiveMemory(threshold) as memory, logging_to(stage.module, lambda *_: None):
                in_flight, output = stage.runner.forward(
                    plan,
                    partial(stage.module.training_step, batch),
                    partial(
                        iter, [(edge.value, values[edge.value].clone()) for edge in plan.stages[stage.number].receives]
                    ),
                    StepRandomness(0, CPU),
                    with_gradients=True,
                    splits_backward=stage.splits_backward,
                )
                for value, tensor in in_flight.outputs.items():
                    values[value] = torch.from_numpy(tensor.detach().numpy().copy())  # as if sent: not allocated here
                    del tensor
                in_flight.outputs.clear()
                if stage is self.stages[-1]:
                    in_flight.loss = loss_of(output).sum()
                del output
                live_bytes = memory.live_bytes
            yield plan, in_flight, live_bytes

    def backward(self, plans: Sequence[StepPlan], kept: Sequence[InFlight], weight: float) -> None:
        """Last stage first."""
        wires: dict[Value, list[Tensor]] = {}
        for stage, plan, in_flight in reversed(list(zip(self.stages, plans, kept, strict=True))):
            gradients = gradients_of_sent(plan.stages[stage.number], wires)
            returned = stage.runner.backward(plan, in_flight, gradients, weight, split=stage.splits_backward)
            in_flight.end_backward()
            for value, gradient in returned.items():
                wires.setdefault(value, []).append(gradient)
            if stage.splits_backward and len(in_flight.queue):
                in_flight.queue.run()


def compare_evaluation(architecture: Callable[[], nn.Module], batch: Any, num_stages: int, **options: Any) -> None:
    """Runs the validation step through ``num_stages`` stages and on the whole model; what is returned must agree."""
    pipeline = OneProcessPipeline(architecture, batch, num_stages, training=False, **options)
    logged: dict[str, Tensor] = {}
    _, found = pipeline.forward(batch, logged=logged)
    expected_logs: dict[str, Tensor] = {}
    whole = build(architecture).eval()
    with torch.no_grad(), logging_to(whole, lambda name, value: expected_logs.update({f"{name}/0": value})):
        expected = whole.validation_step(batch)  # type: ignore[operator]
    torch.testing.assert_close(logged, {name: torch.as_tensor(value) for name, value in expected_logs.items()})
    mine, theirs = tensors_of(found), tensors_of(expected)
    assert len(mine) == len(theirs) > 0
    torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def gradient_error(found: Outcome, expected: Outcome) -> float:
    """The largest difference of a gradient's elements, relative to the gradient's largest (or to 1)."""
    assert found.gradients.keys() == expected.gradients.keys()
    largest = 0.0
    for name, gradient in expected.gradients.items():
        mine = found.gradients[name]
        reference = torch.zeros(()) if gradient is None else gradient
        difference = (torch.zeros(()) if mine is None else mine) - reference
        largest = max(largest, float(difference.abs().max() / max(1.0, float(reference.abs().max()))))
    return largest


def compare(
    architecture: Callable[[], nn.Module],
    batches: Sequence[Any],
    num_stages: int,
    *,
    runs_again: bool = False,
    **options: Any,
) -> tuple[OneProcessPipeline, float]:
    """Runs ``batches`` through ``num_stages`` stages and through the whole model; checks losses, logs and gradients.

    Args:
        architecture: Makes the model.
        batches: Its batches.
        num_stages: Stages.
        runs_again: Whether every unit of the stages is run again in backward.
        options: Of the pipeline.

    Returns:
        The pipeline and the largest gradient error.
    """
    weights = [(index + 1) / 4 for index in range(len(batches))]
    expected = run_whole(build(architecture), batches, weights)
    pipeline = OneProcessPipeline(architecture, batches[0], num_stages, **options)
    if runs_again:
        for stage in pipeline.stages:
            stage.runner.recomputation = Recomputation(stage.units)
    found = pipeline.run(batches, weights)
    torch.testing.assert_close(found.loss, expected.loss, rtol=TOLERANCE, atol=TOLERANCE)
    assert found.logged.keys() == expected.logged.keys()
    for name, value in expected.logged.items():
        torch.testing.assert_close(found.logged[name], value, rtol=TOLERANCE, atol=TOLERANCE)
    error = gradient_error(found, expected)
    assert error < TOLERANCE, error
    assert all(edge.source < edge.target for plan in pipeline.plans(batches[0]) for edge in plan.edges)
    return pipeline, error
