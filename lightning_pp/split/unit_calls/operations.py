"""The operations between units, identified by their arguments: the same ones in every run of a step.

On one stage a value is a tensor with data, on another a fake. What tells an operation from all others is the same on
both: the function of torch that is called, between which unit calls, on which values (outputs of units, and results of
operations that are known themselves), and how many others like it came before. So a stage can take what it has received
instead of what an operation returns there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lightning_pp.split._torch_private import tree_leaves
from lightning_pp.split.data.tree import leaves_of
from lightning_pp.split.record import products
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.record.step_record import OF_OPERATION, OperationPlace, StepRecord, UnitCall, Value
from lightning_pp.split.unit_calls.interception import OutsideUnits, gives_value

_VALUE = "_pp_value"
# Whether these give another tensor than they are given depends on how it lies in memory, on its dtype or its device.
_PASS_ON = frozenset({"contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda"})

OnOperation = Callable[[int, OperationPlace, list[Tensor], Tensor], Tensor]
"""Gets the number of an operation, its place, the tensors in its arguments and its result; returns the result to
use."""
NoteFunction = Callable[[str, Tensor | None], None]
"""As :meth:`lightning_pp.split.unit_calls.checkpointed_regions.CheckpointedRegions.note_function`."""


class OperationCalls(OutsideUnits):
    """A context that follows the operations between units; a new one for each run of a step.

    Args:
        number_of: Returns the number of an operation; None for an unknown one.
        on_operation: Called with each known one.
        note_function: Gets the name of each function that returns a tensor, and what is taken in its place, if that
            is another; what backward runs again has to be given the same.
        on_other: Called with each operation on values that is not known.

    Attributes:
        counts: How often each operation has run, by the place of the first of those that differ in their order only.
    """

    def __init__(
        self,
        number_of: Callable[[OperationPlace], int | None],
        on_operation: OnOperation,
        note_function: NoteFunction,
        on_other: Callable[[OperationPlace], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._number_of = number_of
        self._on_operation = on_operation
        self._note_function = note_function
        self._num_calls = 0
        self._on_other = on_other
        self.counts: Counter[OperationPlace] = Counter()
        self._run = object()  # values of other runs mean nothing

    def note_call(self, call: UnitCall, output: Any) -> None:
        """A unit call returns ``output``: the tensors that the unit made are values now."""
        self._num_calls = call.index + 1
        for position, (leaf, recorded) in enumerate(zip(leaves_of(output), call.leaves, strict=False)):
            if recorded.spec is not None and isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                setattr(leaf, _VALUE, (self._run, Value(call.index, position)))

    def have_run(self, record: StepRecord, numbers: Iterable[int]) -> bool:
        """Whether this step has run the operations ``numbers``, each as often as the record."""
        places = [record.operations[number].place._replace(num_before=0) for number in numbers]
        return all(self.counts[place] == record.num_alike[place] for place in places)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not gives_value(result):
            return result
        name = getattr(func, "__name__", "")
        given = self._followed(name, args, kwargs, result)
        self._note_function(name, None if given is result else given)
        return given

    def _followed(self, name: str, args: Any, kwargs: Any, result: Tensor) -> Tensor:
        """What the function ``name``, which has given ``result``, is to give."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = tuple(map(self._value_of, tensors))
        if not any(given) or name in products.NAMES:  # a split backward replaces these
            return result
        if name in _PASS_ON:
            if given[0] is not None:
                setattr(result, _VALUE, (self._run, given[0]))
            return result
        alike = OperationPlace(self._num_calls, name, given, 0)
        place = alike._replace(num_before=self.counts[alike])
        self.counts[alike] += 1
        number = self._number_of(place)
        if number is None:
            self._on_other(place)
            return result
        result = self._on_operation(number, place, tensors, result)
        setattr(result, _VALUE, (self._run, Value(OF_OPERATION, number)))
        return result

    def _value_of(self, tensor: Tensor) -> Value | None:
        found = getattr(tensor, _VALUE, None)
        return found[1] if found is not None and found[0] is self._run else None


def lost_operation(place: OperationPlace, line: str) -> str:
    """The error if a step has not run an operation as the recorded step did."""
    return (
        f"In the recorded step {line} computed a tensor that crosses between stages ({place.name}), but this step did "
        f"not run that line in the same way (seen at {user_line()}). Every stage must run the same code between units. "
        "That code may depend on the batch, on what the module reads from its trainer, and on plain attributes of the "
        "module. If it depends on something else, set dynamic_step=True on the strategy, make the choice inside a "
        "unit, or name a larger module with units=."
    )
