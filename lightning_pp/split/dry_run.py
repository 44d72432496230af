"""Running the user's step once on fake parameters, to learn what calls what and what crosses.

Source of the idea: none of the existing pipelines does this; tracing by fake tensors is torch's
(:class:`torch._subclasses.fake_tensor.FakeTensorMode`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from lightning_pp.errors import SplitError
from lightning_pp.split.data_flow import DataFlow, Parameter, innermost_user_line, set_sources, storage_of
from lightning_pp.split.gradient_flow import gradient_sources
from lightning_pp.split.interception import UnitCalls
from lightning_pp.split.mean_losses import intercepted_mean_losses
from lightning_pp.split.module_state import preserved_state
from lightning_pp.split.placeholders import Placeholders, is_fake
from lightning_pp.split.record import OutputLeaf, Reads, StepRecord, UnitCall, Value, spec_of
from lightning_pp.split.tree import map_leaves, tensors_of

_NOT_FAKEABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

# Called with everything that the step hands to `self.log`, to metrics and the like.
Sink = Callable[[Any], None]


class DryRun:
    """One recording in progress; :func:`dry_run` is the entry point.

    A sink (``self.log``, a metric) passes what it is given to :meth:`need_at_end`, since the last stage will need it.
    """

    def __init__(self, units: Mapping[str, nn.Module], placeholders: Placeholders, dummy: int) -> None:
        self.record = StepRecord()
        self._placeholders = placeholders
        self._flow = DataFlow(placeholders.mode, dummy=dummy)
        self._own_parameters = {
            name: frozenset(placeholders.canonical_names[key] for key in placeholders.names if _is_within(key, name))
            for name in units
        }
        self._marker_nodes: dict[Value, Any] = {}
        self._end = Reads()

    def need_at_end(self, value: Any) -> None:
        """Records that the tensors in ``value`` are needed where the step ends."""
        current, self._flow.reads = self._flow.reads, self._end
        try:
            self._flow.need(tensors_of(value))
        finally:
            self._flow.reads = current

    def on_call(self, unit: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one unit on fakes and records it."""
        flow = self._flow
        call = UnitCall(index=len(self.record.calls), unit=unit, reads=flow.reads)
        self.record.calls.append(call)
        flow.call, flow.own_parameters = call, self._own_parameters[unit]
        flow.num_calls = len(self.record.calls)
        try:
            with _saved_bytes_counted(call, self._placeholders):
                result = original(*args, **kwargs)
        except _NOT_FAKEABLE as error:
            raise SplitError(
                f"The unit {unit!r} cannot be run without data: {type(error).__name__} at "
                f"{innermost_user_line(error)}. Its output shape depends on values, so no other stage can know it."
            ) from error
        finally:
            flow.call, flow.own_parameters = None, frozenset()
        flow.reads = Reads()

        def as_output(leaf: Any) -> Any:
            value = Value(call.index, len(call.leaves))
            if not isinstance(leaf, Tensor):
                call.leaves.append(OutputLeaf(None, leaf))
                return leaf
            # a clone has a node of its own in the autograd graph, and memory of its own
            fake = leaf if is_fake(leaf) else self._placeholders.mode.from_tensor(leaf)
            marker = fake.clone()
            flow.mark_output(marker, value)
            stand_in = self._placeholders.mode.from_tensor(marker.detach()) if not is_fake(marker) else marker.detach()
            set_sources(stand_in, {value})
            call.leaves.append(OutputLeaf(spec_of(marker), stand_in, requires_grad=marker.requires_grad))
            if marker.requires_grad:
                self._marker_nodes[value] = marker.grad_fn
            return marker

        with _flow_paused():
            marked = map_leaves(as_output, result)
            call.output = map_leaves(lambda _: None, result)
        return marked

    def finish(self, result: Any, with_gradients: bool) -> StepRecord:
        """Completes the record with what the end of the step needs."""
        record, flow = self.record, self._flow
        record.tail = flow.reads
        self._merge_end()
        flow.reads = record.tail
        flow.need(tensors_of(result))
        record.glue_is_random = flow.glue_is_random
        for value in flow.edited:
            record.leaf(value).edited_in_place = True
        num_calls = len(record.calls)
        for read in flow.value_reads:
            if read.num_calls_before < num_calls:
                following = record.calls[read.num_calls_before].unit
                values = [source for source in read.sources if isinstance(source, Value)]
                made_by = sorted({record.calls[value.call].unit for value in values})
                raise SplitError(
                    f"{read.line} reads a value that depends on weights ({', '.join(made_by) or 'parameters'}), and "
                    f"the unit {following!r} is called after it: the stages that do not hold the value cannot know "
                    "which way the step goes. Move the read after the last unit (self.log needs no .item()), into a unit, "
                    "or make the branch depend on the batch only."
                )
            record.value_reads_in_tail.append(read.line)
        if with_gradients:
            loss = result.get("loss") if isinstance(result, Mapping) else result
            roots: dict[Value | None, Any] = dict(self._marker_nodes.items())
            if isinstance(loss, Tensor) and loss.requires_grad:
                roots[None] = loss.grad_fn
            record.gradient_sources = gradient_sources(roots, self._marker_nodes)
        return record

    def finish_opaque(self, line: str) -> StepRecord:
        """Completes the record of a step whose end cannot run on fakes (it calls ``.numpy()``, say).

        What the end touched so far is needed there; nothing after that can be seen.
        """
        self.record.tail = self._flow.reads
        self._merge_end()
        self.record.glue_is_random = self._flow.glue_is_random
        self.record.value_reads_in_tail.append(line)
        return self.record

    def _merge_end(self) -> None:
        tail, end = self.record.tail, self._end
        tail.values |= end.values
        tail.parameters |= end.parameters
        tail.escapes.update(end.escapes)


def dry_run(
    step: Callable[[DryRun], Any],
    *,
    module: nn.Module,
    units: Mapping[str, nn.Module],
    placeholders: Placeholders,
    with_gradients: bool,
) -> StepRecord:
    """Runs ``step`` with every parameter fake, and records unit calls, what they read, and what the end needs.

    Everything computed from the batch alone stays real, so masks, positions and Python branches on the batch work. The
    module's state (buffers, lists, attributes, gradients) is as before afterwards, and no random number is drawn from
    the global generators.

    Args:
        step: Runs the user's step on one microbatch and returns what it returned. It is given the recording, so that
            sinks such as ``self.log`` can report what they consume.
        module: The whole model.
        units: Names and modules of the units.
        placeholders: Makes the fakes.
        with_gradients: Whether autograd is on, as in training.

    Raises:
        SplitError: The step looks at a weight-dependent value before its last unit call, or a unit cannot run on fakes.
    """
    failure: Exception | None = None
    for dummy in (0, 1):
        run = DryRun(units, placeholders, dummy)
        try:
            return _attempt(run, step, module, units, placeholders, with_gradients)
        except SplitError:
            raise
        except Exception as error:  # a branch on a stand-in value may raise what the real value would not
            failure = failure or error
            if not with_gradients and {call.unit for call in run.record.calls} == set(units):
                return run.finish_opaque(innermost_user_line(error))
            if not run._flow.value_reads:
                break
    assert failure is not None
    if isinstance(failure, _NOT_FAKEABLE) or "FakeTensor" in str(failure) or "fake tensor" in str(failure).lower():
        raise SplitError(
            f"The step does something outside its units that needs the data of another stage, at "
            f"{innermost_user_line(failure)}: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}. Move it "
            "into a unit, or after the last unit call of a validation step."
        ) from failure
    raise failure


def _attempt(
    run: DryRun,
    step: Callable[[DryRun], Any],
    module: nn.Module,
    units: Mapping[str, nn.Module],
    placeholders: Placeholders,
    with_gradients: bool,
) -> StepRecord:
    def tag(fake: nn.Parameter, name: str) -> None:
        set_sources(fake, {Parameter(name)})

    calls = UnitCalls(units)
    with (
        preserved_state(module) as changes,
        placeholders.all_fake(tag),
        torch.set_grad_enabled(with_gradients),
        torch.random.fork_rng(devices=_cuda_devices(placeholders.device)),
    ):

        def on_mean_loss(_: Any, loss: Callable[..., Tensor]) -> Tensor:
            run.record.num_mean_losses += 1
            run.record.step_edits_module = bool(changes())
            return loss()

        with calls.handled_by(run.on_call), intercepted_mean_losses(on_mean_loss), run._flow:
            result = step(run)
        record = run.finish(result, with_gradients)
        changed = changes()
        run._flow.reads = record.tail
        for _, _, value in changed:
            run._flow.need(tensors_of(value))
        record.mutated_attributes = tuple((name, attribute) for name, attribute, _ in changed)
    return record


def _flow_paused() -> AbstractContextManager[None]:
    """Operations within are not part of the step."""
    return torch.utils._python_dispatch._disable_current_modes()


@contextmanager
def _saved_bytes_counted(call: UnitCall, placeholders: Placeholders) -> Iterator[None]:
    """Adds up what autograd keeps of a unit call between forward and backward, each memory once, parameters not."""
    if not torch.is_grad_enabled():
        yield
        return
    seen = {storage_of(fake) for fake in placeholders.fakes()}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = storage_of(tensor)
        if storage is not None and storage not in seen:
            seen.add(storage)
            kept.append(tensor.detach() if not is_fake(tensor) else tensor)
            call.saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _is_within(parameter: str, unit: str) -> bool:
    return parameter.startswith(unit + ".")


def _cuda_devices(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []
