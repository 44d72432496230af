"""One dry run in progress: the handler of unit calls that fills a :class:`StepRecord`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.errors import ConfigurationError, SplitError
from lightning_pp.split._torch_private import (
    NOT_FAKEABLE,
    FakeTensor,
    is_functorch_wrapped,
    running_autograd_function,
    version_of,
    without_dispatch_modes,
)
from lightning_pp.split.data.tree import leaves_of, map_leaves, own_containers, own_copy, tensors_of
from lightning_pp.split.dry_run.data_flow import DataFlow
from lightning_pp.split.dry_run.gradient_flow import gradient_sources, values_reached
from lightning_pp.split.dry_run.memory_watch import GraphReader, MemoryWatch
from lightning_pp.split.fakes.fake_mode import AsFake, MadeUpData, NeedsDataError
from lightning_pp.split.fakes.parameters import FakeParameters, has_data, is_fake
from lightning_pp.split.head.parts import HeadPart, whole_units
from lightning_pp.split.head.recorded_heads import SplitHeads
from lightning_pp.split.record.source_lines import innermost_user_line, user_line
from lightning_pp.split.record.sources import NOTHING, Inside, Parameter, Source, set_sources, storage_of
from lightning_pp.split.record.step_record import (
    OF_OPERATION,
    Handed,
    HeldMemory,
    InterUnitDraws,
    Operation,
    OperationPlace,
    OutputLeaf,
    PassedOn,
    Reads,
    StepRecord,
    TensorSpec,
    UnitCall,
    Value,
    spec_of,
)
from lightning_pp.split.record.unknown_numbers import UnknownNumber, differing
from lightning_pp.split.reductions.recording import pass_on_selected
from lightning_pp.split.side_effects.module_state import python_generators
from lightning_pp.split.side_effects.watch import ChangingHookError, SideEffectWatch
from lightning_pp.split.unit_calls.call_arguments import fingerprint_of, numbers_of, shapes_of
from lightning_pp.split.unit_calls.checkpointed_regions import never_run_again
from lightning_pp.split.unit_calls.compute_dtype import cast_activations
from lightning_pp.split.unit_calls.interception import StandingBy, UnitCalls
from lightning_pp.split.unit_calls.operations import OperationCalls
from lightning_pp.split.unit_calls.python_reads import PythonReads
from lightning_pp.split.unit_calls.selective_policy import Policy

OF_UNIT = "_pp_of_unit"  # an attribute of exceptions that a unit raises on fakes and on data alike
# a step that decodes until its data say stop does not end on fakes: so many calls of known units in a row are too many
_CALLS_OF_EACH = 50
_FEWEST_CALLS = 500


def _check_known(fake_parameters: FakeParameters) -> None:
    """Raises :class:`ConfigurationError` if the module has parameters that it had not when it was split."""
    known, module = fake_parameters.canonical_names, fake_parameters.module
    if added := [name for name, _ in module.named_parameters() if name not in known]:
        raise ConfigurationError(
            f"{type(module).__name__} has {len(added)} parameters that were added after it was split over the stages: "
            f"{', '.join(added[:3])}. Make all layers in __init__, setup() or configure_model()."
        )


def _check_may_be_called(unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises :class:`SplitError` where no stage could run the unit without the others."""
    if running_autograd_function():
        raise SplitError(
            f"{user_line()} calls the unit {unit!r} in the forward of a torch.autograd.Function. The model cannot be "
            "cut inside such a function. Use units= to name the module that applies it, so that it stays on one stage."
        )
    if any(map(is_functorch_wrapped, tensors_of((args, kwargs)))):
        raise SplitError(
            f"{user_line()} calls the unit {unit!r} inside a transform of torch.func (vmap, grad, jvp, ...). The model "
            "cannot be cut inside a transform. Use units= to name a module that applies it, so that it stays on one "
            "stage."
        )


def _sources_of_real_parameters(fake_parameters: FakeParameters) -> dict[int, frozenset[Source]]:
    """The sources of each parameter with data, by its storage; several if parameters share it."""
    found: dict[int, frozenset[Source]] = {}
    for name, parameter in fake_parameters.module.named_parameters():
        storage = storage_of(parameter)
        if storage is not None and has_data(parameter):
            found[storage] = found.get(storage, NOTHING) | {Parameter(fake_parameters.canonical_names[name])}
    return found


class DryRun:
    """One recording in progress; :func:`lightning_pp.split.dry_run.run` is the entry point.

    A sink (``self.log``, a metric) passes what it is given to :meth:`need_at_end`, since the last stage will need it.

    Args:
        units: Names and modules of the units.
        fake_parameters: Makes the fakes.
        num_calls: The number of unit calls after which data are made up; None for never.
        reads: Lines that read a value in an earlier attempt.
        seed_inter_unit: Given the index of a call, seeds the generators for the code after it (-1: before the first).
        policy: What units save that are run again in backward.
        splits_heads: Whether parts of a head stand for it, where ``units`` has any.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        fake_parameters: FakeParameters,
        num_calls: int | None = None,
        reads: Sequence[str] = (),
        seed_inter_unit: Callable[[int], None] | None = None,
        policy: Policy | None = None,
        splits_heads: bool = True,
    ) -> None:
        self.record = StepRecord(compute_dtype=fake_parameters.compute_dtype)
        self._heads = SplitHeads(units if splits_heads else {}, self.record)
        self._splits_heads = splits_heads
        # units that do not run, and have no buffers that other code could write into
        not_run = {name: unit for name, unit in units.items() if type(vars(unit).get("forward")) is StandingBy}
        self.standing_by = {name: unit for name, unit in not_run.items() if next(unit.buffers(), None) is None}
        self._fake_parameters = fake_parameters
        self._num_calls = num_calls
        self._earlier_reads = list(reads)
        self._seed_inter_unit = seed_inter_unit
        self._policy = policy
        self._python_generators: Any = None
        self._is_second = False
        self._called: set[str] = set()
        self._num_repeated = 0  # calls since a unit was called for the first time
        # of the call that has run last: what it returned besides tensors that depends on values
        self._unknown: dict[int, tuple[Any, Any]] = {}
        self._draws_in_python: set[int] = set()
        # seen now, before fakes take their places
        _check_known(fake_parameters)
        self._real_parameters = _sources_of_real_parameters(fake_parameters)
        self._flow = DataFlow(fake_parameters.mode)
        self._graph = GraphReader()
        # the end of the step may fail on a part of the batch, since it runs on all of it; what it does there, if known
        self.end_may_fail = False
        self.end_of_batch: StepRecord | None = None
        self._unit_calls = UnitCalls(units)
        self._regions = self._unit_calls.regions
        self._regions.watching = self._region_noted
        self._end_data = ExitStack()
        self._own_parameters = {
            name: frozenset(
                fake_parameters.canonical_names[key] for key in fake_parameters.names if key.startswith(name + ".")
            )
            for name in units
        }
        self._marker_nodes: dict[Value, Any] = {}
        self._operation_nodes: dict[Value, Any] = {}
        numbers = self.record.operation_numbers
        self.operations = OperationCalls(
            lambda place: numbers.setdefault(place, len(numbers)), self._on_operation, lambda name, received: None
        )
        self._end = Reads()
        self._units_that_need_data: set[type[nn.Module]] = set()
        self._units = dict(units)
        # hooks inside units that change what modules take or return
        self._part_of_units: list[Any] = []

    @contextmanager
    def recording(self, module: nn.Module) -> Iterator[None]:
        """Around the user's step: watches every operation, and every call of a unit."""
        tensors = [*module.buffers()]
        for child in module.modules():
            tensors += [value for value in child.__dict__.values() if isinstance(value, Tensor)]
        held = set(map(storage_of, tensors))
        watch = MemoryWatch({*held, *self._real_parameters}, self._fake_parameters.fakes())
        for tensor in tensors:  # the step may replace it
            watch.hold(tensor)
        flow = self._flow = DataFlow(self._fake_parameters.mode, held, self._real_parameters, watch, self._policy)
        flow.watch_parameters(self._fake_parameters)
        about = flow.is_missing, flow.read, flow.address, flow.look, flow.note_gradient_hook
        reads = PythonReads(*about, watch.in_one_piece)
        try:
            with reads, flow, self._end_data:
                if self._num_calls == 0:
                    self._make_up_the_end()
                self._start_inter_unit(-1)
                with self._unit_calls.handled_by(self._on_call):
                    yield
        finally:
            flow.restore()  # after a failure as well, for the step may be tried again

    def lines_of_value_reads(self) -> list[str]:
        """Lines outside units that read a weight-dependent value, in this attempt or the previous one."""
        return list(dict.fromkeys([*self._earlier_reads, *(read.line for read in self._flow.value_reads)]))

    def need_at_end(self, value: Any, place: str | None = None) -> None:
        """Records that the tensors in ``value`` are needed where the step ends.

        Args:
            value: Anything that holds tensors.
            place: Where they are kept, if it is not the running line that needs them.
        """
        self._heads.check_leaving(value)
        current, self._flow.reads = self._flow.reads, Reads()
        try:
            self._flow.need(tensors_of(value))
            found = self._flow.reads
        finally:
            self._flow.reads = current
        if place is not None:
            found.escapes = dict.fromkeys(found.escapes, place)
        _add(found, self._end)

    def depends_on_weights(self, tensor: Tensor) -> bool:
        """Whether the value of ``tensor`` does, and not on the batch alone."""
        return self._flow.is_missing(tensor)

    def depends_on_units(self, tensor: Tensor) -> bool:
        """Whether the value of ``tensor`` depends on a unit's output, not only on parameters and the batch."""
        return any(not isinstance(source, Parameter) for source in self._flow.origins_of(tensor))

    def own(self, batch: Any) -> Any:
        """The batch for one run of the step, which may write into it; contents are put back afterwards."""
        with without_dispatch_modes():
            return own_copy(batch) if self._is_second else own_containers(batch)

    @property
    def edits(self) -> Mapping[int, tuple[str, bool]]:
        """Where the code between units did so, by storage, and whether it made the new content of the old."""
        return self._flow.edits

    def depends_on_batch(self, tensor: Tensor) -> bool:
        """Whether the value of ``tensor`` was made of the batch, or of weights."""
        return self._flow.depends_on_batch(tensor)

    def again(self, sources: Mapping[int, frozenset[Source]]) -> DryRun:
        """A recording of one more run, with ``sources`` for the memories that this one has left."""
        run = DryRun(
            self._units,
            self._fake_parameters,
            self._num_calls,
            seed_inter_unit=self._seed_inter_unit,
            policy=self._policy,
            splits_heads=self._splits_heads,
        )
        run._real_parameters = {**self._real_parameters, **sources}
        run._is_second = True  # what is left may be the batch itself
        return run

    def note_progress_read(self) -> None:
        """Records that the step may depend on how far the training is."""
        self.record.reads_progress = True

    def _on_call(self, unit: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one unit on fakes and records it; a head that is cut into parts returns logits that are not computed."""
        if unit in self._heads:
            found = (self._flow.sources_of(tensor) for tensor in tensors_of((args, kwargs)))
            sources = frozenset(map(Parameter, self._own_parameters[unit])).union(*found)
            logits = self._heads.called(unit, args, kwargs, sources, in_region=self._regions.running is not None)
            pass_on_selected(tensors_of((args, kwargs)), logits)
            return logits
        _check_may_be_called(unit, args, kwargs)
        self._num_repeated = self._num_repeated + 1 if unit in self._called else 0
        self._called.add(unit)
        self._check_ends(unit)
        self._end_inter_unit()
        call = self._begun_call(unit, args, kwargs)
        given = args, kwargs
        args, kwargs = cast_activations(call, args, kwargs, self.record.compute_dtype)
        call.is_cast = any(map(is_not, leaves_of((args, kwargs)), leaves_of(given)))
        tensors = tensors_of((args, kwargs))
        self._flow.keep(tensors, call.given)
        with without_dispatch_modes():
            self._note_saved_between(tensors, call.reads.memory)
        call.tracks_gradients = torch.is_grad_enabled()
        call.differentiated = values_reached((args, kwargs), self._marker_nodes)
        call.region = self._regions.running
        call.shapes, call.numbers = shapes_of(*given), numbers_of(*given)
        self._flow.call_looks = False
        marked = self._run_and_mark(call, original, args, kwargs)
        if self._flow.call_looks:
            call.looks_at = fingerprint_of(*given)
        if len(self.record.calls) == self._num_calls:
            self._make_up_the_end()
        self._start_inter_unit(call.index)
        self.operations.note_call(call, marked)
        pass_on_selected(tensors_of(given), marked)
        return marked

    def _check_ends(self, unit: str) -> None:
        """Raises :class:`SplitError` if many units in a row had been called before, up to ``unit`` now."""
        if self._num_repeated > max(_FEWEST_CALLS, _CALLS_OF_EACH * len(self._units)):
            raise SplitError(
                f"The dry run of the step on fake data did not end. {user_line()} called {unit!r}, and the last "
                f"{self._num_repeated} calls all repeated earlier units. In a pipeline, outputs must not decide how "
                "often a step calls its units, as in decoding until a stop token. Decode in a Trainer() on one "
                "device, after strategy.gather_module() or from a checkpoint. limit_val_batches=0 leaves out "
                "validation."
            )

    def _begun_call(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnitCall:
        """The next call of the record, with what the code since the last one has read."""
        flow, module = self._flow, self._units[unit]
        if isinstance(module, HeadPart):
            self._heads.note_part(module)
        call = UnitCall(index=len(self.record.calls), unit=unit, reads=flow.reads, line=user_line())
        if call.index == self._num_calls:
            raise self._refused_reads(self.lines_of_value_reads(), unit)
        self.record.calls.append(call)
        flow.num_calls = len(self.record.calls)
        call.activations = frozenset(
            place
            for place, leaf in enumerate(leaves_of((args, kwargs)))
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and flow.is_missing(leaf)
            if not isinstance(module, HeadPart)  # whose sums keep their precision
        )
        return call

    def _run_and_mark(
        self, call: UnitCall, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the unit of ``call``, again after each hook that turns out to be part of it, and marks its outputs."""
        flow, fakes = self._flow, self._fake_parameters
        passed_on = _Arguments(args, kwargs)
        watched = nn.Identity() if call.unit in self.standing_by else self._units[call.unit]
        side_effects = SideEffectWatch(watched, args, kwargs)
        has_own = watched is self._units[call.unit] and not isinstance(watched, HeadPart)
        while True:
            flow.call, flow.own_parameters = call, self._own_parameters[call.unit]
            try:
                num_regions = self._regions.num_regions
                with fakes.computing(call.unit, self._note_computing_fake) if has_own else nullcontext():
                    result = self._run(call, lambda: original(*args, **kwargs), side_effects)
                call.num_regions_inside = self._regions.num_regions - num_regions
                flow.need(leaf for leaf in tensors_of(result) if passed_on.position_of(leaf) is None)
            finally:
                flow.call, flow.own_parameters = None, frozenset()
            reads, flow.reads = flow.reads, Reads()
            try:
                return self._marked(call, result, passed_on, side_effects)
            except ChangingHookError as error:
                self._part_of_units.append(error.hook)
                flow.reads = reads

    def _on_operation(self, number: int, place: OperationPlace, given: list[Tensor], result: Tensor) -> Tensor:
        """Replaces the sources of a result between units by the result, if another stage could receive it."""
        flow = self._flow
        storage = storage_of(result)
        if (
            type(result) is not FakeTensor
            or storage is None
            or storage in map(storage_of, given)  # a view
            or not result.is_contiguous()
            or result.is_complex()
            or running_autograd_function()
            or any(map(is_functorch_wrapped, given))
        ):
            return result
        origins = flow.origins_of(result)
        values = frozenset(source for source in origins if isinstance(source, Value))
        if not values or any(isinstance(source, Inside) for source in origins):
            return result
        reads = frozenset(source for source in flow.sources_of(result) if isinstance(source, Value))
        parameters = frozenset(source.name for source in origins if isinstance(source, Parameter))
        value = Value(OF_OPERATION, number)
        flow.mark_operation(result, value)
        leaf = OutputLeaf(spec_of(result), None, requires_grad=result.requires_grad, memory=flow.watch.number(result))
        operation = Operation(place, user_line(), reads, values, parameters, leaf)
        self.record.operations[number] = operation
        if result.requires_grad:
            with without_dispatch_modes():
                self._note_saved_between([result], operation.memory)
            self._operation_nodes[value] = result.grad_fn
        return result

    def _start_inter_unit(self, index: int) -> None:
        if self._seed_inter_unit is not None:
            self._seed_inter_unit(index)
        self._python_generators = python_generators()

    def _end_inter_unit(self) -> None:
        """Notes whether the code since the last call has drawn from the generators of Python or NumPy."""
        if self._python_generators != python_generators():
            self._draws_in_python.add(len(self.record.calls) - 1)

    def finish(self, result: Any, with_gradients: bool) -> None:
        """Completes the record with what the end of the step needs."""
        record, flow = self.record, self._flow
        self._heads.check_leaving(result)
        self._heads.check_end()
        record.tail = flow.reads
        flow.need(tensors_of(result))
        self._note_what_decides()
        self._check_gradient_hooks()
        record.updates = flow.parameter_updates()
        self._note_edits()
        num_calls = len(record.calls)
        for read in flow.value_reads:
            if (before := read.num_calls_before) < num_calls:
                refusal = self._refused_reads([read.line], record.calls[before].unit, read.sources)
                if with_gradients:
                    raise refusal
                record.early_reads = {**dict.fromkeys(range(before, num_calls), str(refusal)), **record.early_reads}
            record.value_reads_in_tail.append(read.line)
        if with_gradients:
            loss = result.get("loss") if isinstance(result, Mapping) else result
            roots: dict[Value | None, Any] = dict(self._marker_nodes.items())
            if isinstance(loss, Tensor) and loss.requires_grad:
                roots[None] = loss.grad_fn
                self._note_saved_between([loss], record.tail.memory)
            record.gradient_sources = gradient_sources(roots, self._marker_nodes)
            for operation in record.operations.values():
                if operation.place.num_calls == num_calls:  # the end of the step, whatever lies in it
                    record.tail.memory.saved.update(operation.memory.saved)
                    operation.memory = HeldMemory()
            nodes = {**self._marker_nodes, **self._operation_nodes}
            roots |= {value: node for value, node in nodes.items() if not value.made_by_unit}
            record.nearest_gradients = gradient_sources(roots, nodes)

    def _check_gradient_hooks(self) -> None:
        for line, made_after in self._flow.gradient_hooks:
            if made_after < len(self.record.calls):
                raise SplitError(
                    f"{line} puts a hook on the gradient of a tensor made before the end of the last unit. A stage may "
                    "have only a part of this gradient. Put the hook on a tensor made inside a unit or after the last "
                    "unit, such as the loss."
                )

    def finish_opaque(self, line: str) -> StepRecord:
        """Completes the record of a step whose end cannot run without its data.

        What the end touched so far is needed there; nothing after that can be seen.
        """
        self.merge_all()
        self._check_gradient_hooks()
        self._note_what_decides()
        self._note_edits()
        self.record.value_reads_in_tail.append(line)
        self.record.outputs_cross_alone = True  # how gradients of others flow is not known
        return self.record

    def ends_elsewhere(self) -> bool:
        """Whether all unit calls have been seen, and what follows them may fail here."""
        if self.end_of_batch is not None:
            calls, others = self.record.calls, self.end_of_batch.calls
            return [call.unit for call in calls] == [call.unit for call in others]
        return self.end_may_fail and self.called_all

    @property
    def called_all(self) -> bool:
        """Whether all units were called; for a head its parts."""
        units = self._units
        return whole_units(units, {call.unit for call in self.record.calls}) == whole_units(units, units)

    def _note_edits(self) -> None:
        self.record.edits_batch = self._flow.edits_batch
        for value in self._flow.edited:
            self.record.leaf(value).edited_in_place = True
            if not value.made_by_unit:
                self.record.operations[value.leaf].can_cross = False

    def _note_what_decides(self) -> None:
        """Notes what may decide, besides shapes, which units are called and with what."""
        self._end_inter_unit()
        calls = self.record.calls
        self.record.depends_on_batch_values = (
            any(call.looks_at is not None for call in calls)
            or self._flow.looks_in_python
            or any(num_calls < len(calls) for num_calls in self._flow.shapes_of_values)
        )
        self.record.num_looks = self._flow.num_looks
        self.record.weights_of_float32_norms = frozenset(self._flow.weights_of_float32_norms)
        after = frozenset(self._flow.inter_unit_draws | self._draws_in_python)
        self.record.inter_unit_draws = InterUnitDraws(after, in_python=bool(self._draws_in_python))
        self.record.drawn_uses = self._flow.drawn_values.uses
        # what Python does with numbers of its own generators cannot be seen
        self.record.has_dynamic_shapes = bool(self._flow.shapes_of_values)
        self.record.may_branch_at_random = bool(self._draws_in_python) or self._flow.branches_at_random

    def merge_all(self) -> None:
        """Adds to the needs of the record's end all reads since the last call, and the arguments of sinks."""
        self.record.tail = self._flow.reads
        self.merge_end()

    def merge_end(self) -> None:
        """Adds what sinks were given to what the end needs."""
        _add(self._end, self.record.tail)

    def _run(self, call: UnitCall, run_unit: Callable[[], Any], side_effects: SideEffectWatch) -> Any:
        """The unit's result for fakes, or for made-up data if it reads data."""
        flow = self._flow
        kind = type(self._units[call.unit])
        self._unknown = {}
        failure: Exception | None = None
        result: Any = None
        if kind not in self._units_that_need_data:
            flow.call_reads_data = False
            try:
                with self._saved_memory_noted(call), side_effects.attempt(self._part_of_units):
                    result = run_unit()
            except SplitError as error:
                if not isinstance(error, NeedsDataError):
                    raise
                failure = error
            except Exception as error:
                failure = error
            if failure is None and not flow.call_reads_data:
                return result
        specs: set[tuple[TensorSpec, ...]] = set()
        made_up = None
        left: list[tuple[list[Any], dict[Any, list[Any]]]] = []  # by each run
        # the first is only to see whether numbers change with the signs of the data, which not all code accepts
        for data in (MadeUpData(1, signed=True), MadeUpData(1), MadeUpData(0)):
            call.flops = call.weight_flops = call.flops_saved_by_policy = call.flops_run_again = 0
            call.work.clear()
            call.flops_run_again_inside = 0
            call.memory = HeldMemory()
            try:
                with (
                    flow.made_up_data(data),
                    self._saved_memory_noted(call),
                    side_effects.attempt(self._part_of_units),
                ):
                    made_up = run_unit()
            except Exception as error:
                if data.is_signed:
                    continue
                if failure is None and kind not in self._units_that_need_data:
                    return result  # it could do without data
                raise self._no_run(call, failure or error, error) from error
            if not data.is_signed:
                specs.add(tuple(spec_of(tensor) for tensor in tensors_of(made_up)))
            left.append((leaves_of(made_up), side_effects.left_behind()))
        if len(specs) > 1:
            shapes = " and ".join(str([spec.shape for spec in found]) for found in specs)
            raise SplitError(
                f"The output shapes of the unit {call.unit!r} depend on weights ({shapes} for the same input shapes), "
                "so no other stage can know them. Pad the outputs inside the unit, or use units= to name a larger "
                "module that does not return them."
            )
        self._units_that_need_data.add(kind)
        self._note_unknown(call.unit, left, side_effects)
        return made_up

    def _note_unknown(
        self, unit: str, runs: list[tuple[list[Any], dict[Any, list[Any]]]], side_effects: SideEffectWatch
    ) -> None:
        """Notes the numbers of the last run that another run on other data has not: what each gave and left behind."""
        outputs, behind = runs.pop()
        for other_outputs, other_behind in runs:
            self._unknown |= differing(other_outputs, outputs)
            for place, leaves in behind.items():
                for number, found in differing(other_behind.get(place, ()), leaves).items():
                    side_effects.unknown.setdefault(place, {})[number] = UnknownNumber(unit, found)

    @staticmethod
    def _no_run(call: UnitCall, failure: Exception, error: Exception) -> Exception:
        if not isinstance(failure, (NeedsDataError, *NOT_FAKEABLE)) and type(failure) is type(error):
            vars(failure)[OF_UNIT] = True  # the user's own, or torch's
            return failure
        return SplitError(
            f"The unit {call.unit!r} cannot run without the values of its inputs ({failure}), and on made-up values it "
            f"raises {type(error).__name__} at {innermost_user_line(error)}: {error}. Make it accept any values of the "
            "right shapes, or name smaller modules with units=, so that this code lies outside units."
        )

    def _marked(self, call: UnitCall, result: Any, passed_on: _Arguments, side_effects: SideEffectWatch) -> Any:
        """Marks the outputs and side effects of a unit, so that they can be followed."""
        call.leaves.clear()
        call.side_effects.clear()
        call.left.clear()
        # what is returned and left as well is one value
        returned: dict[int, tuple[Tensor, Value]] = {}

        def mark(leaf: Tensor, value: Value, leaves: list[OutputLeaf]) -> Tensor:
            marker = self._mark(leaf, value, leaves)
            returned[id(leaf)] = (marker, value)
            return marker

        def mark_returned(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                found = self._unknown.get(len(call.leaves))
                call.leaves.append(OutputLeaf(None, leaf if found is None else UnknownNumber(call.unit, found)))
                return leaf
            position = passed_on.position_of(leaf)
            if position is not None:
                call.leaves.append(OutputLeaf(None, PassedOn(position=position)))
                return leaf
            return mark(leaf, Value(call.index, len(call.leaves)), call.leaves)

        def mark_left(leaf: Tensor) -> tuple[Tensor, Any]:
            if id(leaf) not in returned:
                with without_dispatch_modes():
                    mark(leaf, Value(call.index, -1 - len(call.left)), call.left)
            marker, value = returned[id(leaf)]
            return marker, Handed(value)

        with without_dispatch_modes():
            marked = map_leaves(mark_returned, result)
            # leaves become 0, not None: some containers leave out entries that are None
            call.output = None if isinstance(result, Tensor) else map_leaves(lambda _: 0, result)
        call.side_effects.extend(side_effects.side_effects(mark_left, passed_on.position_of))
        return marked

    def _mark(self, leaf: Tensor, value: Value, leaves: list[OutputLeaf]) -> Tensor:
        # a clone has a node of its own in the autograd graph, and memory of its own
        with AsFake(self._fake_parameters.mode):
            marker = leaf.clone()
        self._flow.mark_output(marker, value)
        fake = marker.detach()
        set_sources(fake, {value})
        # made-up data are let go as soon as the call is over
        memory = self._flow.watch.unite(marker, leaf if is_fake(leaf) else marker)
        leaves.append(OutputLeaf(spec_of(marker), fake, requires_grad=marker.requires_grad, memory=memory))
        if marker.requires_grad:
            self._marker_nodes[value] = marker.grad_fn
        return marker

    def _make_up_the_end(self) -> None:
        self._end_data.enter_context(self._flow.made_up_data(MadeUpData()))

    def _refused_reads(self, lines: Sequence[str], following: str, sources: Any = ()) -> SplitError:
        made_by = sorted({self.record.calls[source.call].unit for source in sources if isinstance(source, Value)})
        return SplitError(
            f"{', '.join(lines[:3]) or 'The step'} reads a value that depends on "
            f"weights{f' ({chr(44).join(made_by)})' if made_by else ''}, and the unit {following!r} is called after "
            "it. The stages without the value cannot know what the step does next. Move the read into a unit or after "
            "the last unit (self.log needs no .item()), branch by the batch only, or name the reading module in units=."
        )

    def _note_computing_fake(self, fake: nn.Parameter, name: str) -> None:
        set_sources(fake, {Parameter(name)})
        self._flow.know_parameter(fake, name)
        self._flow.watch.note_weight(fake, fake.requires_grad)

    def _note_saved_between(self, tensors: Iterable[Tensor], memory: HeldMemory) -> None:
        """What the code between units keeps for backward, of what leads to ``tensors``."""
        # from the graph, since hooks on saved tensors, as around units, are refused by torch.func there
        with never_run_again():
            stops = {*self._marker_nodes.values(), *self._operation_nodes.values()}
            self._flow.keep(self._graph.saved_behind(tensors, stops), memory.saved)

    @contextmanager
    def _saved_memory_noted(self, call: UnitCall) -> Iterator[None]:
        """Notes what autograd keeps of a unit call between forward and backward."""
        if not torch.is_grad_enabled():
            yield
            return
        flow = self._flow  # the graph holds ``pack``, which must not hold this recording

        def pack(tensor: Tensor) -> Tensor:
            flow.keep([tensor], call.memory.saved)
            call.flops_run_again = call.flops - call.flops_saved_by_policy
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    @contextmanager
    def _region_noted(self) -> Iterator[None]:
        """Notes what runs again of a region that a unit checkpoints: all until autograd would keep something last."""
        call = self._flow.call
        if call is None or not torch.is_grad_enabled():
            yield
            return
        before = call.flops_run_again_inside - call.flops

        def pack(tensor: Tensor) -> Tensor:
            call.flops_run_again_inside = before + call.flops
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def release(self) -> None:
        """Lets go of all tensors, since they hold the graph, which holds this recording where no collector sees it."""
        self._marker_nodes.clear()
        self._operation_nodes.clear()


class _Arguments:
    """The arguments of a unit, to recognise those that it returns unchanged."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = leaves_of((args, kwargs))
        self._tensors = [
            (place, leaf, version_of(leaf)) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)
        ]

    def position_of(self, tensor: Tensor) -> int | None:
        """The place of ``tensor`` among the leaves of the arguments, if it is one of them and was not written into."""
        for place, leaf, version in self._tensors:
            if leaf is tensor and version_of(leaf) == version:
                return place
        return None


def _add(found: Reads, to: Reads) -> None:
    to.values |= found.values
    to.nearest |= found.nearest
    to.parameters = {**found.parameters, **to.parameters}
    to.escapes = {**found.escapes, **to.escapes}
