"""Following values through the code between units, by a dispatch mode that sees every operation of a dry run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.errors import SplitError
from lightning_pp.split._torch_private import (
    OperationsMode,
    arg_tree_leaves,
    schema_of,
    tree_leaves,
    tree_map,
    without_dispatch_modes,
)
from lightning_pp.split.dry_run.drawn_values import DrawnValues
from lightning_pp.split.dry_run.memory_watch import MemoryWatch
from lightning_pp.split.fakes.fake_mode import FakeValueMode, MadeUpData, NeedsDataError
from lightning_pp.split.fakes.operation_work import work_of
from lightning_pp.split.fakes.parameters import FakeParameters, is_fake
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.record.sources import (
    NOTHING,
    Inside,
    Parameter,
    Source,
    made_after,
    set_made_after,
    set_sources,
    sources_of,
    storage_of,
)
from lightning_pp.split.record.step_record import Reads, UnitCall, Value
from lightning_pp.split.unit_calls.compute_dtype import weights_of_float32_norm
from lightning_pp.split.unit_calls.looks import values_looked_at
from lightning_pp.split.unit_calls.selective_policy import Policy, saves_output

_OVERWRITES = ("copy_", "fill_", "zero_", "normal_")  # not index_put_ and the like, which keep other elements
_ITEM = torch.ops.aten._local_scalar_dense.default
_REPEAT = torch.ops.aten.repeat.default
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


@dataclass
class ValueRead:
    """A weight-dependent value that Python read (``.item()``, ``if tensor:``) outside units."""

    line: str
    sources: frozenset[Source]
    num_calls_before: int


class DataFlow(OperationsMode):  # type: ignore[no-untyped-call]
    """Carries the sources of values from inputs to outputs of every operation.

    Real tensors stay real unless something fake was written into them (``out[:, 0] = cls``): from then on they read as
    fake, since what they hold is not what one device would hold. Where data are made up, results are real and marked
    with their sources as fakes are. Memory that the step did not make (the batch) is as before after :meth:`restore`.

    Args:
        fake_mode: The mode of all fakes.
        own_memory: Storages that the step may edit, such as copies of buffers.
        parameters: Sources of real parameters, by storage: what holds them out of reach has not been given fakes.
        watch: Knows which memories are there without the step.
        policy: What units save that are run again in backward; None: nothing.

    Attributes:
        reads: What the current call (or the end of the step) needs, by way of whatever inter-unit code.
        call: The unit call that is running, None in inter-unit code.
        num_calls: Unit calls so far.
        own_parameters: Names of the parameters of the running unit.
        call_reads_data: Whether the running call has read a value of a fake.
        call_looks: Whether it has read a value of the step's arguments, or made a shape from it.
        value_reads: Where inter-unit code did.
        looks_in_python: Whether Python looked at such a value in inter-unit code (``mask.all()``).
        shapes_of_values: Before which unit calls, by number, inter-unit code made shapes of such values (``x[mask]``).
        num_looks: How often it read values, including constants.
        edited: Unit outputs, and results of operations between units, that code after them writes into.
        inter_unit_draws: Calls after which inter-unit code draws random numbers, up to the next; -1: before the first.
        branches_at_random: Whether Python read a number that inter-unit code drew.
        gradient_hooks: For each hook that inter-unit code put on a weight-dependent tensor, the line, and the unit
            calls before the tensor was made; the call itself for a unit's output.
        edits_batch: Whether the step wrote into memory that it did not make.
        edits: Where inter-unit code did so, by storage, and whether it made the new content of the old.
        weights_of_float32_norms: Parameters, in the dtype of computation, of norms of float32.
        watch: Numbers the memories that the step makes.
        drawn_values: Follows random numbers that inter-unit code draws.
    """

    def __init__(
        self,
        fake_mode: FakeValueMode,
        own_memory: Iterable[int | None] = (),
        parameters: Mapping[int, frozenset[Source]] = MappingProxyType({}),
        watch: MemoryWatch | None = None,
        policy: Policy | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = Reads()
        self.call: UnitCall | None = None
        self.num_calls = 0
        self.own_parameters: frozenset[str] = frozenset()
        self.call_reads_data = False
        self.call_looks = False
        self.value_reads: list[ValueRead] = []
        self.looks_in_python = False
        self.shapes_of_values: set[int] = set()
        self.num_looks = 0
        self.edited: set[Value] = set()
        self.inter_unit_draws: set[int] = set()
        self.branches_at_random = False
        self.gradient_hooks: list[tuple[str, int]] = []
        self.edits_batch, self.edits = False, dict[int, tuple[str, bool]]()
        self.weights_of_float32_norms: set[str] = set()
        # by storage: InstanceNorm repeats its weights for each sample
        self._repeated: dict[int, frozenset[Source]] = {}
        self.watch = watch or MemoryWatch()
        self._policy = policy
        self._fake_mode = fake_mode
        # where inter-unit code first touched a parameter, or what was made inside a call
        self._lines: dict[Source, str] = {}
        self._made_up: MadeUpData | None = None
        self._output_storages: dict[int, Value] = {}
        # of results of operations between units: the unit outputs, parameters and so on that they were computed from
        self._origins: dict[Source, frozenset[Source]] = {}
        self._written: dict[int, frozenset[Source]] = dict(parameters)
        self._written_with_fakes: set[int] = set(parameters)
        self._sources_of_fakes: dict[int, frozenset[Source]] = {}
        # for the fake of a real tensor, the real memory that it stands for
        self._real_memory: dict[int, int] = {}
        self._own_memory = set(own_memory)
        # what code outside units has made, and the batch: a unit that writes there changes what other stages have
        self._inter_unit_memory: set[int | None] = set()
        # what the step has made of nothing that it was given: the same for all batches of the same shapes
        self._constants: set[int | None] = set()
        # what depends on neither the batch nor weights: constants, and what is made of the module's buffers
        self._without_batch: set[int | None] = set(own_memory)
        self._contents_before: list[tuple[Tensor, Tensor]] = []
        self._parameters: dict[Tensor, str] = {}
        self._names_of_storages: dict[int | None, str] = {}
        self._updates: dict[str, set[str]] = {}
        self.drawn_values = DrawnValues()

    def watch_parameters(self, fake_parameters: FakeParameters) -> None:
        """From here on, what inter-unit code writes into fake parameters is noted."""
        self._parameters = {fake: name for name, fake in fake_parameters.made.items()}
        self._names_of_storages = {storage_of(fake): name for fake, name in self._parameters.items()}
        for fake, name in self._parameters.items():
            self.know_parameter(fake, name)

    def know_parameter(self, fake: Tensor, name: str) -> None:
        """Views of ``fake`` without a mark, such as ``parameter.data``, are of the parameter, in any unit."""
        storage = storage_of(fake)
        if storage is not None:
            self._sources_of_fakes[storage] = frozenset({Parameter(name)})
            self.watch.hold(fake)

    def parameter_updates(self) -> dict[str, frozenset[str]]:
        """Parameters that inter-unit code wrote into, and those that it computed their new values from."""
        for fake, name in self._parameters.items():
            storage = storage_of(fake)
            if storage not in self._names_of_storages:  # ``parameter.data = ...``
                self._note_update(name, self._sources_of_fakes.get(storage or 0, NOTHING))
        return {name: frozenset(sources) for name, sources in self._updates.items()}

    def _note_update(self, name: str, sources: Iterable[Source]) -> None:
        origins = {origin for source in sources for origin in self._origins.get(source, (source,))}
        others = {origin.name for origin in origins if isinstance(origin, Parameter)}
        self._updates.setdefault(name, set()).update(others - {name})

    def mark_output(self, tensor: Tensor, value: Value) -> None:
        """Makes ``tensor`` the source ``value``."""
        set_sources(tensor, {value})
        set_made_after(tensor, value.call)
        storage = storage_of(tensor)
        if storage is not None:
            self._output_storages[storage] = value
            self.watch.hold(tensor)

    def mark_operation(self, tensor: Tensor, value: Value) -> None:
        """Makes ``tensor``, the result of an operation between units, the source ``value`` in place of its own."""
        self._origins[value] = self.origins_of(tensor)
        set_sources(tensor, {value})
        storage = storage_of(tensor)
        if storage is not None:
            self._sources_of_fakes[storage] = frozenset({value})
            self._output_storages[storage] = value

    def keep(self, tensors: Iterable[Tensor], to: dict[int, int]) -> None:
        """Adds the memories of ``tensors`` to ``to``, number to bytes, without those that the step did not make.

        Nor real scalars: autograd makes them of Python's numbers, where nobody sees it and perhaps at the address of
        something that the step has made and freed.
        """
        for tensor in tensors:
            if is_fake(tensor) or (tensor.dim() > 0 and storage_of(tensor) in self._own_memory):
                self.watch.add(tensor, to)

    def need(self, tensors: Iterable[Tensor]) -> None:
        """Records that ``tensors`` are needed by the current stretch of code."""
        for tensor in tensors:
            self._note(self.sources_of(tensor))

    def is_missing(self, tensor: Tensor) -> bool:
        """Whether the value of ``tensor`` depends on weights, so that a stage may not have it."""
        return is_fake(tensor) or bool(self.sources_of(tensor))

    def depends_on_batch(self, tensor: Tensor) -> bool:
        """Whether the value of ``tensor`` was made of the batch, or of weights."""
        return self.is_missing(tensor) or storage_of(tensor) not in self._without_batch

    def origins_of(self, tensor: Tensor) -> frozenset[Source]:
        """The unit outputs, parameters and units' insides that the value of ``tensor`` comes from."""
        sources = self.sources_of(tensor)
        if self._origins.keys().isdisjoint(sources):
            return sources
        return frozenset().union(*(self._origins.get(source, {source}) for source in sources))

    def sources_of(self, tensor: Tensor) -> frozenset[Source]:
        """The sources of the value of ``tensor``, with those written into its memory.

        Results of operations between units stand for what they were computed from.
        """
        found = sources_of(tensor)
        storage = self._memory_of(tensor)
        if storage is None:
            return found
        # ``.data`` and tensors saved for backward lose their mark; a parameter may have been given other ``.data``
        if is_fake(tensor) and (not found or isinstance(tensor, nn.Parameter)):
            found |= self._sources_of_fakes.get(storage, NOTHING)
        return found | self._written[storage] if storage in self._written else found

    def read(self, tensor: Tensor) -> Tensor:
        """Records that Python reads the content of ``tensor``, and returns a substitute."""
        self._note(self.sources_of(tensor))
        if self.call is None:
            self.value_reads.append(ValueRead(user_line(), self.origins_of(tensor), self.num_calls))
        else:
            self.call_reads_data = True
        if not self._reads_as_fake(tensor):
            return tensor
        with without_dispatch_modes():
            if self._made_up is not None:
                return self._made_up.real(self._faked(tensor))  # type: ignore[no-any-return]
            return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def address(self, tensor: Tensor) -> int:
        """Where made-up data for a fake ``tensor`` lie: a raw kernel is about to read or write there.

        Raises:
            NotImplementedError: This run is on fakes alone. torch would give 0.
        """
        if self._made_up is None:
            raise NotImplementedError(f"{user_line()} calls data_ptr(), but a fake tensor has no address")
        return self.read(tensor).data_ptr()

    def look(self, tensor: Tensor) -> None:
        """Records that Python reads the content of ``tensor``, which is not a fake."""
        self.num_looks += self.call is None
        if storage_of(tensor) not in self._constants:
            self._note_look(is_in_python=True)

    def note_gradient_hook(self, tensor: Tensor) -> None:
        """Records that inter-unit code puts a hook on the gradient of ``tensor``; refuses one on a parameter."""
        if isinstance(tensor, nn.Parameter):
            raise SplitError(
                f"{user_line()} puts a hook on the gradient of a parameter. The step runs once for each microbatch, "
                "and each would add a hook. Add the hook before training, for example in on_fit_start."
            )
        if self.call is None:
            self.gradient_hooks.append((user_line(), made_after(tensor)))

    @contextmanager
    def made_up_data(self, data: MadeUpData) -> Iterator[None]:
        """In the block, operations on fakes run on made-up data and return real tensors."""
        before, self._made_up = self._made_up, data
        try:
            yield
        finally:
            self._made_up = before

    def restore(self) -> None:
        """Puts back what the step overwrote in memory that it did not make."""
        while self._contents_before:
            place, content = self._contents_before.pop()
            place.copy_(content)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation."""
        inputs = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
        sources: frozenset[Source] = NOTHING
        any_fake = False
        for tensor in inputs:
            any_fake = any_fake or is_fake(tensor)
            found = self.sources_of(tensor)
            if found:
                sources = sources | found if sources else found
        self._note_looks_at_given(func, args, inputs)
        if self.call is None and torch.Tag.nondeterministic_seeded in func.tags:
            self.inter_unit_draws.add(self.num_calls - 1)
        drawn = self.drawn_values.found_in(func, inputs, self.num_calls, None if self.call is None else self.call.index)
        is_mutable = schema_of(func).is_mutable
        if is_mutable:
            self._keep_contents(func, args, kwargs)
        if not any_fake and not sources:
            result = func(*args, **kwargs)
            self._note_memory(func, inputs, result)
            self._note_policy(func, args, kwargs, result, 0)
            self.branches_at_random |= func is _ITEM and drawn is not None and self.call is None
            self.drawn_values.note(drawn, result)
            if is_mutable and self.call is not None:
                self._note_edits_by_unit(func, args, kwargs)
            return result
        if self.call is not None:
            self._note(sources)
        else:
            for source in sources:  # this code reads nothing by itself: what results depend on is needed where they are
                if isinstance(source, (Inside, Parameter)) and source not in self._lines:
                    self._lines[source] = user_line()
        if func is _ITEM:
            return self.read(args[0]).item()
        self.weights_of_float32_norms |= weights_of_float32_norm(func, inputs, self._weights_of)
        given = (args, kwargs)
        there = [tensor for tensor in inputs if not is_fake(tensor)]
        is_plain = any_fake and self._made_up is None and not any(map(self._reads_as_fake, there))
        known = self._fake_mode.known(func, args, kwargs) if is_plain else NotImplemented
        result = self._run(func, args, kwargs, sources) if known is NotImplemented else known
        flops = self._count_work(func, args, kwargs, result, inputs)
        self.drawn_values.note(drawn, result)
        self._note_product(func, args, result)
        if func is _REPEAT and (storage := storage_of(result)) is not None:
            self._repeated[storage] = self.sources_of(args[0])
        produced: frozenset[Source] = frozenset({Inside(self.call.index)}) if self.call is not None else sources
        for tensor in tree_leaves(result):
            # from fakes comes something real only if it does not depend on them
            if isinstance(tensor, Tensor) and (is_fake(tensor) or is_mutable or self._made_up is not None):
                self._mark(tensor, produced)
        self._note_memory(func, inputs, result)
        self._note_policy(func, args, kwargs, result, flops)
        if is_mutable:
            self._note_writes(func, *given, produced)
        return result

    def _weights_of(self, tensor: Tensor) -> frozenset[Source]:
        """The sources of a norm's weights."""
        return self.sources_of(tensor) | self._repeated.get(self._memory_of(tensor) or 0, NOTHING)

    def _mark(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        set_sources(tensor, sources)
        set_made_after(tensor, self.num_calls)
        if is_fake(tensor):
            storage = storage_of(tensor)
            # within a unit, a view of what comes from outside (of a parameter) does not change what its memory holds
            if storage is not None and (self.call is None or storage not in self._sources_of_fakes):
                self._sources_of_fakes[storage] = sources

    def _run(self, func: Any, args: Any, kwargs: Any, sources: frozenset[Source]) -> Any:
        if self._written_with_fakes:
            args, kwargs = tree_map(self._faked, (args, kwargs))
        if self._made_up is not None:
            args, kwargs = tree_map(self._made_up_for, (args, kwargs))
        try:
            return func(*args, **kwargs)
        except NeedsDataError as error:
            if self.call is not None:
                raise
            origins = frozenset().union(*(self._origins.get(source, {source}) for source in sources))
            self.value_reads.append(ValueRead(error.line, origins, self.num_calls))
        with self._fake_mode.making_up():
            return func(*args, **kwargs)

    def _made_up_for(self, leaf: Any) -> Any:
        assert self._made_up is not None
        real = self._made_up.real(leaf)
        if real is not leaf:
            self.watch.note_fake(leaf, real)
        return real

    def _note(self, sources: Iterable[Source]) -> None:
        for source in sources:
            if isinstance(source, Value):
                if source not in self.reads.nearest:
                    self.reads.nearest.add(source)
                    self._note_origins(self._origins.get(source, (source,)))
            else:
                self._note_origins((source,))

    def _note_origins(self, sources: Iterable[Source]) -> None:
        current = self.call.index if self.call is not None else None
        for source in sources:
            if isinstance(source, Value):
                self.reads.values.add(source)
            elif isinstance(source, Inside):
                if source.call != current and source.call not in self.reads.escapes:
                    self.reads.escapes[source.call] = self._lines.get(source) or user_line()
            elif source.name not in self.own_parameters and source.name not in self.reads.parameters:
                self.reads.parameters[source.name] = self._lines.get(source) or user_line()

    def _count_work(self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Tensor]) -> int:
        """Counts an operation for the code that runs; its FLOPs."""
        weight = next((tensor for tensor in inputs if self.watch.is_weight(tensor) is not None), None)
        work = work_of(func, args, kwargs, result, inputs, weight)
        if work is None:
            return 0
        part = self.reads if self.call is None else self.call
        part.work[work] += 1
        part.flops += work.flops
        if weight is not None:
            part.weight_flops += work.flops
        return work.flops

    def _note_product(self, func: Any, args: Any, result: Any) -> None:
        product = self.watch.product(func, args, result)
        if product is not None:
            memory = self.reads.memory if self.call is None else self.call.memory
            self.keep([product[0]], memory.queued)
            memory.queued_gradients_bytes += product[1]

    def _note_looks_at_given(self, func: Any, args: Any, inputs: list[Tensor]) -> None:
        """Notes what depends on values that the step was given."""
        looked_at = values_looked_at(func, args, inputs)
        there = [tensor for tensor in looked_at if not self.is_missing(tensor)] if looked_at else []
        if any(storage_of(tensor) not in self._constants for tensor in there):
            self._note_look(torch.Tag.data_dependent_output in func.tags)
        self.num_looks += bool(there) and self.call is None

    def _note_look(self, is_in_python: bool) -> None:
        if self.call is not None:
            self.call_looks = True
        elif is_in_python:
            self.looks_in_python = True
        else:
            self.shapes_of_values.add(self.num_calls)

    def _note_memory(self, func: Any, inputs: list[Tensor], result: Any) -> None:
        """A result that is no view of an argument has its own memory."""
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        made = {storage_of(tensor) for tensor in tensors}
        given = {storage_of(tensor) for tensor in inputs}
        new = made if func is _LIFT_FRESH else made - given
        if func is _LIFT_FRESH or given <= self._constants:
            self._constants |= made
        else:
            self._constants -= made
        if func is _LIFT_FRESH or given <= self._without_batch:
            self._without_batch |= made
        else:
            self._without_batch -= made
        for tensor in tensors:
            if storage_of(tensor) in new:
                self.watch.hold(tensor)
        self._own_memory |= new
        if self.call is None:
            self._inter_unit_memory |= new

    def _note_policy(self, func: Any, args: Any, kwargs: Any, result: Any, flops: int) -> None:
        if self._policy is None or self.call is None or not saves_output(self._policy, func, args, kwargs, result):
            return
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.keep(tensors, self.call.memory.saved_by_policy)
        self.call.flops_saved_by_policy += flops

    def _keep_contents(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in _written_by(func, args, kwargs):
            storage = storage_of(tensor)
            if storage is None or is_fake(tensor) or tensor.is_meta or storage in self._own_memory:
                continue
            place = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self._contents_before.append((place, place.clone()))
            self.edits_batch = True
            if self.call is None:
                self.edits[storage] = user_line(), func.overloadpacket.__name__ not in _OVERWRITES
            self._inter_unit_memory.add(storage)
            self._own_memory.add(storage)

    def _note_edits_by_unit(self, func: Any, args: Any, kwargs: Any) -> None:
        """A unit runs on one stage only: its writes into memory that is not its own exist only there."""
        assert self.call is not None
        for tensor in _written_by(func, args, kwargs):
            storage = storage_of(tensor)
            if storage is not None and storage in self._inter_unit_memory:
                self._written[storage] = self._written.get(storage, NOTHING) | {Inside(self.call.index)}
                self.watch.hold(tensor)

    def _note_writes(self, func: Any, args: Any, kwargs: Any, produced: frozenset[Source]) -> None:
        for tensor in _written_by(func, args, kwargs):
            storage = self._memory_of(tensor)
            if storage is None:
                continue
            if self.call is None and storage in self._names_of_storages:
                self._note_update(self._names_of_storages[storage], produced)
            if storage in self._output_storages:
                self.edited.add(self._output_storages[storage])
            # other views of this memory must know what was written into it
            self._written[storage] = self._written.get(storage, NOTHING) | sources_of(tensor) | produced
            if not is_fake(tensor) and self._made_up is None:
                self._written_with_fakes.add(storage)
            self.watch.hold(tensor)

    def _memory_of(self, tensor: Tensor) -> int | None:
        storage = storage_of(tensor)
        return storage if storage is None else self._real_memory.get(storage, storage)

    def _reads_as_fake(self, leaf: Any) -> bool:
        return is_fake(leaf) or (isinstance(leaf, Tensor) and storage_of(leaf) in self._written_with_fakes)

    def _faked(self, leaf: Any) -> Any:
        """``leaf``, or a fake for a real tensor that something fake was written into."""
        if is_fake(leaf) or not self._reads_as_fake(leaf):
            return leaf
        fake = self._fake_mode.from_tensor(leaf.detach())
        set_sources(fake, self.sources_of(leaf))
        real_memory, memory = storage_of(leaf), storage_of(fake)
        if real_memory is not None and memory is not None:
            self._real_memory[memory] = real_memory
            self.watch.hold(leaf)
            self.watch.hold(fake)
        return fake


def _written_by(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors among the arguments that ``func`` writes into."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor):
                yield tensor
