"""The record of one step from a dry run: every unit call, its inputs and its outputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pp.split.data.tree import replace_leaves
from lightning_pp.split.record.reduction import Reduction
from lightning_pp.split.record.unknown_numbers import UnknownNumber
from lightning_pp.split.record.work import OperationWork

OF_OPERATION = -1
"""As :attr:`Value.call`: the value is the result of an operation between units."""

LEAST_BYTES_IN_PARTS = 1 << 16  # of a message; to join the parts of a smaller one takes longer than to send it whole


class Value(NamedTuple):
    """A tensor that a unit call made for others: leaf number ``leaf`` of the outputs of call number ``call``.

    A negative ``leaf`` counts the tensors that left the unit as side effects, from -1 down. With
    :data:`OF_OPERATION` for ``call`` it is the result of the operation between units of number ``leaf``.
    """

    call: int
    leaf: int

    @property
    def made_by_unit(self) -> bool:
        """Whether a unit made it, and not an operation between units."""
        return self.call != OF_OPERATION


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype that a stage needs to receive a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def sent_bytes(self, num_ranks: int) -> int:
        """Bytes that each of ``num_ranks`` sends of it: an even part, or all of what is small or does not divide."""
        is_whole = self.num_bytes < LEAST_BYTES_IN_PARTS or math.prod(self.shape) % num_ranks
        return self.num_bytes if is_whole else self.num_bytes // num_ranks


class PassedOn(SimpleNamespace):  # no dataclass, for those are containers
    """Stands for an argument that a unit returned unchanged: leaf number ``position`` of its arguments."""

    position: int


class Handed:  # no dataclass, for those are containers
    """Stands in for a tensor that left a unit as a side effect: ``value``."""

    def __init__(self, value: Value) -> None:
        self.value = value


@dataclass(frozen=True)
class AttributePlace:
    """Attribute ``key`` of a module inside the unit: set, or (``grows``) a container that got more entries."""

    module: str
    key: str
    grows: bool

    def __str__(self) -> str:
        of_module = f" of its {self.module!r}" if self.module else ""
        return f"{'entries in ' if self.grows else ''}the attribute {self.key!r}{of_module}"


@dataclass(frozen=True)
class ArgumentPlace:
    """A list or dict in the arguments, or the attributes of an object in them, which got more entries or others.

    Attributes:
        path: The way there: a number for each container, an attribute's name for each object; ``__dict__`` at the end
            for the attributes themselves.
    """

    path: tuple[int | str, ...]

    def __str__(self) -> str:
        if self.path[-1] == "__dict__":
            return "attributes of an object that it is called with"
        return "entries in a list or dict that it is called with"


@dataclass(frozen=True)
class HookPlace:
    """The ``count``-th call of the ``number``-th forward hook (pre-hook if ``before``) on a module inside the unit."""

    module: str
    number: int
    before: bool
    count: int

    def __str__(self) -> str:
        return f"what a forward hook on its {self.module!r} sees"


@dataclass
class SideEffect:
    """Something besides its outputs that a unit call leaves behind.

    Attributes:
        place: Where.
        content: What, with a :class:`Handed` or :class:`PassedOn` in place of each tensor.
    """

    place: AttributePlace | ArgumentPlace | HookPlace
    content: Any


@dataclass
class HeldMemory:
    """The memory that a part of the code keeps for its backward, in one microbatch.

    Memories that the step makes have numbers, so that what several stretches keep is counted once. Parameters, buffers
    and the batch have none: they are there anyway.

    Attributes:
        saved: Number to bytes, for each memory that autograd keeps from the forward to the input gradient (I).
        queued: Number to bytes, for each input of a linear operation whose weight gradient can wait from I to W.
        queued_gradients_bytes: Bytes of the output gradients of these operations.
        saved_by_policy: Number to bytes, for each memory that a selective checkpoint policy saves where the code runs
            again in I; empty without a policy.
    """

    saved: dict[int, int] = field(default_factory=dict)
    queued: dict[int, int] = field(default_factory=dict)
    queued_gradients_bytes: int = 0
    saved_by_policy: dict[int, int] = field(default_factory=dict)


@dataclass
class OutputLeaf:
    """One leaf of what a unit call returned.

    Attributes:
        spec: Shape and dtype of a tensor that the unit made; None for anything else.
        fake: A detached fake of that tensor, a :class:`PassedOn`, an :class:`UnknownNumber`, or the constant.
        requires_grad: Whether autograd tracks it.
        edited_in_place: Whether code after the call writes into it.
        memory: Number of the memory it lies in, as in :class:`HeldMemory`.
    """

    spec: TensorSpec | None
    fake: Any
    requires_grad: bool = False
    edited_in_place: bool = False
    memory: int | None = None

    def for_one_step(self) -> Any:
        """The fake for one run of the step, after which it must be as it was (``x.transpose_(0, 1)``)."""
        return self.fake.detach() if self.edited_in_place else self.fake


class OperationPlace(NamedTuple):
    """An operation between units, identified by its arguments among all others of the step.

    Attributes:
        num_calls: Unit calls before it.
        name: The name of the function of torch that was called.
        given: For each tensor among its arguments the value that it is; None for what is made of the batch and of
            parameters alone, and for what is followed no further.
        num_before: How many others like it came before.
    """

    num_calls: int
    name: str
    given: tuple[Value | None, ...]
    num_before: int


@dataclass
class Operation:
    """An operation between units whose result may be sent in place of its arguments.

    Attributes:
        place: Which it is.
        line: The user's line.
        reads: The values that it was computed from, with no other value in between.
        origins: The unit outputs that it was computed from, by way of whatever lies between.
        parameters: Names of the parameters that were used on this way.
        result: What it returns.
        memory: What the code from ``reads`` to the result keeps for its backward.
        can_cross: Whether that is as it was when the code after it uses it.
    """

    place: OperationPlace
    line: str
    reads: frozenset[Value]
    origins: frozenset[Value]
    parameters: frozenset[str]
    result: OutputLeaf
    memory: HeldMemory = field(default_factory=HeldMemory)
    can_cross: bool = True


@dataclass
class Reads:
    """The values that a unit call, or the end of the step, needs from elsewhere, through any code between.

    Attributes:
        values: Outputs of earlier calls.
        nearest: These, or in their place results of operations between units: what nothing else lies in between.
        parameters: Names of parameters used outside the unit that holds them, with the line that uses each.
        escapes: Calls that made a tensor which is used here but was not among their outputs (it left through an
            attribute, a hook or a list), with the line that uses it.
        flops: Floating point operations of the code since the call before.
        weight_flops: Those of them that have a parameter as an operand.
        work: The operations on what depends on weights in that code, and how often each is there.
        memory: What that code keeps for its backward.
    """

    values: set[Value] = field(default_factory=set)
    nearest: set[Value] = field(default_factory=set)
    parameters: dict[str, str] = field(default_factory=dict)
    escapes: dict[int, str] = field(default_factory=dict)
    flops: int = 0
    weight_flops: int = 0
    work: Counter[OperationWork] = field(default_factory=Counter)
    memory: HeldMemory = field(default_factory=HeldMemory)


@dataclass
class UnitCall:
    """One call of a unit in the order of the step.

    Attributes:
        index: Its place in that order.
        unit: Name of the unit.
        reads: What it needs, with the code before it.
        line: The user's line that calls it.
        output: The containers of what it returned; None where that is a tensor.
        leaves: What is in them.
        side_effects: What else the call leaves behind.
        left: The tensors in that.
        flops: Floating point operations of its forward.
        weight_flops: Those of them that have a parameter as an operand.
        work: Its operations on what depends on weights, and how often each is there.
        flops_saved_by_policy: Those of operations whose result a selective checkpoint policy saves.
        flops_run_again: The others, until autograd keeps something for the last time: what is checkpointed is run again
            up to there.
        flops_run_again_inside: As that, of what it checkpoints itself.
        memory: What is kept of it between forward and backward.
        given: Number to bytes of the memories of its arguments.
        tracks_gradients: Whether autograd was on around it.
        differentiated: The values that its arguments depend on differentiably, with no other value between.
        activations: Places, among the leaves of its arguments, of floating-point tensors that depend on weights.
        is_cast: Whether some of these have another dtype than the unit computes in.
        region: Number of the checkpointed region (of the user's) that it is called in; None outside of one.
        num_regions_inside: Checkpointed regions that it has inside.
        shapes: Of the leaves of its arguments; None for what is no tensor.
        numbers: The integers and texts among these leaves.
        looks_at: Fingerprint of what it is given besides what depends on weights, if the shapes of its outputs may
            depend on the values in it.
    """

    index: int
    unit: str
    reads: Reads
    line: str = "an unknown line"
    output: Any = None
    leaves: list[OutputLeaf] = field(default_factory=list)
    side_effects: list[SideEffect] = field(default_factory=list)
    left: list[OutputLeaf] = field(default_factory=list)
    flops: int = 0
    weight_flops: int = 0
    work: Counter[OperationWork] = field(default_factory=Counter)
    flops_saved_by_policy: int = 0
    flops_run_again: int = 0
    flops_run_again_inside: int = 0
    memory: HeldMemory = field(default_factory=HeldMemory)
    given: dict[int, int] = field(default_factory=dict)
    tracks_gradients: bool = False
    differentiated: frozenset[Value] = frozenset()
    activations: frozenset[int] = frozenset()
    is_cast: bool = False
    region: int | None = None
    num_regions_inside: int = 0
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    numbers: tuple[int | str, ...] = ()
    looks_at: int | None = None

    def leaf(self, leaf: int) -> OutputLeaf:
        """What :attr:`Value.leaf` counts."""
        return self.leaves[leaf] if leaf >= 0 else self.left[-1 - leaf]

    def numbered_leaves(self) -> list[tuple[int, OutputLeaf]]:
        """All outputs and side effects of the call, with the numbers of :attr:`Value.leaf`."""
        return [*enumerate(self.leaves), *((-1 - number, leaf) for number, leaf in enumerate(self.left))]

    def output_of(self, tensors: Mapping[Value, Any], *, with_made_up: bool = False) -> Any:
        """The call's outputs: ``tensors`` where they are known, else fakes.

        Args:
            tensors: What is known.
            with_made_up: Whether numbers that depend on values are those that made-up data gave; else they are unknown.
        """
        leaves = []
        for place, leaf in enumerate(self.leaves):
            known = tensors.get(Value(self.index, place))
            if known is None:
                known = leaf.for_one_step()
                if with_made_up and isinstance(known, UnknownNumber):
                    known = known.made_up
            leaves.append(known)
        return leaves[0] if self.output is None else replace_leaves(self.output, leaves)


@dataclass(frozen=True)
class InterUnitDraws:
    """Where code outside units draws random numbers.

    Attributes:
        after: Indices of the calls after which it does, up to the next call; -1: before the first.
        in_python: Whether some of it draws from the generators of Python or NumPy.
    """

    after: frozenset[int] = frozenset()
    in_python: bool = False


class CarriedState(NamedTuple):
    """State that one step leaves on the module and the next one uses.

    Attributes:
        module: Name of the module.
        attribute: Name of its attribute or buffer.
        line: The user's line that uses it.
    """

    module: str
    attribute: str
    line: str


@dataclass(frozen=True)
class Failure:
    """Why a step could not be recorded to its end.

    Attributes:
        error: What it raised.
        line: The user's line.
    """

    error: Exception
    line: str

    def __str__(self) -> str:
        message = str(self.error).partition("\n")[0]
        return f"{type(self.error).__name__} at {self.line}{f': {message}' if message else ''}"


@dataclass(eq=False)  # each is a key of its own
class StepRecord:
    """One step, as a dry run recorded it.

    Attributes:
        calls: Unit calls in order.
        tail: What the code after the last call, the returned value and the logged values need.
        gradient_sources: For each value and for the loss (``None``), the values it depends on differentiably with no
            other unit's output in between. Empty for a step without gradients.
        operations: By number the operations between units whose results may cross instead of unit outputs.
        operation_numbers: Numbers of these and of all other operations on values, which lead to them.
        outputs_cross_alone: Whether outputs of units cross, and no results of ``operations``.
        nearest_gradients: As ``gradient_sources``, with the results of ``operations`` among the values.
        inter_unit_draws: Where code outside units draws random numbers.
        drawn_uses: What becomes of these: unit calls before a draw and before a use of it, and the line of the use.
        may_branch_at_random: Whether Python may look at such a number, so that another draw may call other units.
        depends_on_batch_values: Whether values that the step was given (the batch, buffers) may decide which units are
            called, or a shape.
        num_looks: How often code outside units read values that are not fakes, including constants.
        reads_progress: Whether the step may depend on how far the training is.
        value_reads_in_tail: Lines that read a weight-dependent value (``.item()``) after the last call.
        early_reads: Indices of the calls after such a line, all on the last stage, to the error where they are not.
        mutated_attributes: ``(module name, attribute)`` that the step set or whose content it changed.
        logged: Names that it logged.
        reductions: Calls, outside units, of functions that decide how values grow with the batch.
        has_dynamic_shapes: Whether values of the batch decide shapes or Python integers outside units (``loss[mask]``,
            ``int(mask.sum())``).
        carried: State, of more than a number each, that goes from one step to the next.
        edits_batch: Whether the step writes into memory that it was given, so that whoever runs it more than once
            must give it a copy each time.
        compute_dtype: Dtype of activations and parameters inside units; None: unchanged.
        weights_of_float32_norms: Parameters of norms whose input is float32, which are not in that dtype themselves.
        updates: Parameters that code outside units writes into, and those that their new values are computed from.
        recomputed_units: Units that keep their inputs, and what a policy saves, and are run again in backward.
        failure: What ended the step before its end; None for a step that was recorded whole.
        split_head: The head that this step does not call, but its parts; None for none.
        whole_head: Why a head that has parts is called whole, a sentence without its end; empty where none is.
        num_tensor_ranks: Ranks that run units on parts of matrices, and send parts of what crosses.
        is_resized: Whether it comes of a record of other sizes: memory, work and reductions are still of those.
    """

    calls: list[UnitCall] = field(default_factory=list)
    tail: Reads = field(default_factory=Reads)
    gradient_sources: dict[Value | None, frozenset[Value]] = field(default_factory=dict)
    operations: dict[int, Operation] = field(default_factory=dict)
    operation_numbers: dict[OperationPlace, int] = field(default_factory=dict)
    outputs_cross_alone: bool = False
    nearest_gradients: dict[Value | None, frozenset[Value]] = field(default_factory=dict)
    inter_unit_draws: InterUnitDraws = InterUnitDraws()
    drawn_uses: Mapping[tuple[int, int], str] = field(default_factory=dict)
    may_branch_at_random: bool = False
    depends_on_batch_values: bool = False
    num_looks: int = 0
    reads_progress: bool = False
    value_reads_in_tail: list[str] = field(default_factory=list)
    early_reads: Mapping[int, str] = field(default_factory=dict)
    mutated_attributes: tuple[tuple[str, str], ...] = ()
    logged: tuple[str, ...] = ()
    reductions: Sequence[Reduction] = ()
    has_dynamic_shapes: bool = False
    carried: tuple[CarriedState, ...] = ()
    edits_batch: bool = False
    compute_dtype: torch.dtype | None = None
    weights_of_float32_norms: frozenset[str] = frozenset()
    updates: Mapping[str, frozenset[str]] = field(default_factory=dict)
    recomputed_units: frozenset[str] = frozenset()
    failure: Failure | None = None
    split_head: str | None = None
    whole_head: str = ""
    num_tensor_ranks: int = 1
    is_resized: bool = False

    def first_calls(self) -> dict[str, int]:
        """Unit name to the index of its first call, in call order."""
        first: dict[str, int] = {}
        for call in self.calls:
            first.setdefault(call.unit, call.index)
        return first

    @cached_property
    def forward_flops(self) -> int:
        """Floating point operations of the step's forward."""
        return self.tail.flops + sum(call.flops + call.reads.flops for call in self.calls)

    @cached_property
    def sizes(self) -> Sequence[Any]:
        """All that may differ between records of one path."""
        calls = [(call.shapes, [leaf.spec or leaf.fake for leaf in call.leaves]) for call in self.calls]
        return calls, [operation.result.spec for operation in self.operations.values()]

    @cached_property
    def course(self) -> Hashable:
        """Units it calls, lines that reduce, and attributes that it changes: the same for batches of other sizes."""
        units, lines = (call.unit for call in self.calls), (each.place.site for each in self.reductions)
        return frozenset(units), frozenset(lines), frozenset(self.mutated_attributes)

    @cached_property
    def num_alike(self) -> Mapping[OperationPlace, int]:
        """Numbers of operations between units that differ only in their order, by the place of the first of them."""
        return Counter(place._replace(num_before=0) for place in self.operation_numbers)

    def parameters_used_outside(self) -> set[str]:
        """Canonical names of the parameters that are used outside the unit that holds them."""
        return set(self.tail.parameters).union(*(call.reads.parameters for call in self.calls))

    def leaf(self, value: Value) -> OutputLeaf:
        """The output leaf, or the result of an operation between units, that ``value`` names."""
        if not value.made_by_unit:
            return self.operations[value.leaf].result
        return self.calls[value.call].leaf(value.leaf)

    def spec(self, value: Value) -> TensorSpec:
        """Shape and dtype of ``value``."""
        spec = self.leaf(value).spec
        assert spec is not None  # only tensors are values
        return spec


def spec_of(tensor: Tensor) -> TensorSpec:
    """The :class:`TensorSpec` of ``tensor``."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)
