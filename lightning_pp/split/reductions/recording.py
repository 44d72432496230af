"""What a dry run notes of the calls that matter to how the step's values grow with the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pp.split._torch_private import is_functorch_wrapped
from lightning_pp.split.data.tree import tensors_of
from lightning_pp.split.record.reduction import Kind, Place, Reduction
from lightning_pp.split.record.source_lines import line_text
from lightning_pp.split.reductions.functions import LossCall, kind_of_call
from lightning_pp.split.reductions.places import Places, is_called_by_user
from lightning_pp.split.unit_calls.interception import OutsideUnits, running_unit

_NOTED = (
    Kind.SUM, Kind.CONTRACTION, Kind.MEAN, Kind.LOSS, Kind.EXTREME,
    Kind.PRODUCT, Kind.QUOTIENT, Kind.ADDITION, Kind.NUMBER,
)  # fmt: skip


@dataclass(frozen=True)
class EarlierRun:
    """A dry run of the same step at another size, whose counts another one is shown, grown by the sizes' ratio.

    Attributes:
        reductions: What it noted.
        ratio: Samples of the other over samples of this one.
        shows_integers: Whether the other is shown integers too, which it may need as they are.
    """

    reductions: Sequence[Reduction]
    ratio: float
    shows_integers: bool = True


class ReductionRecorder(OutsideUnits):
    """Within, outside of units, calls of functions that matter are noted.

    Args:
        depends_on_weights: Whether a tensor's value does.
        depends_on_units: Whether it depends on what a unit gave.
        earlier: If given, what the batch alone decides has the values that it had there (counts: grown), so that the
            numbers which the step makes of them can be compared.

    Attributes:
        reductions: The calls so far, in order.
        makes_integers: Whether the step makes Python integers of what the batch alone decides, or reads a 0 of it.
        asks_for_rows: Whether the step asks how many rows values have selected (``len(x[mask])``), and may branch.
    """

    def __init__(
        self,
        depends_on_weights: Callable[[Tensor], bool],
        depends_on_units: Callable[[Tensor], bool],
        earlier: EarlierRun | None = None,
    ) -> None:
        super().__init__()
        self._depends_on_units = depends_on_units
        self.reductions: list[Reduction] = []
        self.makes_integers = self.asks_for_rows = self._has_marked = False
        self._depends_on_weights = depends_on_weights
        self._places = Places()
        self._earlier: dict[Place, Reduction] = {}
        self._ratio = 1.0
        if earlier is not None:
            self._earlier = {
                reduction.place: reduction
                for reduction in earlier.reductions
                if not reduction.is_integer or (earlier.shows_integers and reduction.kind is not Kind.EXTREME)
            }
            self._ratio = earlier.ratio

    def __exit__(self, *error: Any) -> None:
        """Notes nothing any more."""
        self._places.end()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        kwargs = kwargs or {}
        if running_unit():
            return func(*args, **kwargs)
        if func.__name__ in READS:
            self._places.note_read(func.__name__)
        is_noted = kind_of_call(func, args, kwargs) in _NOTED
        is_none = func.__name__ in _NUMBERS and not self._depends_on_weights(args[0]) and not bool(args[0].any())
        self.makes_integers |= func.__name__ in INTEGERS or is_none  # max(mask.sum().item(), 1) of a part without any
        if (func.__name__ in _SIZES or func == _SHAPE) and hasattr(args[0], _SELECTED):
            # Lightning asks for the size of a logged number
            self.asks_for_rows |= args[0].dim() > 0 and is_called_by_user()
        called = self._places.next(func.__name__) if is_noted else None
        result = func(*args, **kwargs)
        if called is not None:
            result = self._note(func, called, args, kwargs, result)
        self._mark(func, args, kwargs, result)
        return result

    def _mark(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Marks ``result`` if ``func`` selects rows by values, or by a number that Python may have of the batch."""
        if self._has_marked:
            pass_on_selected(tensors_given(args, kwargs), result)
        indices: Any = ()
        if func.__name__ == "__getitem__":
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        if func.__name__ in _SELECTING or any(isinstance(i, Tensor) and i.dtype is torch.bool for i in indices):
            self._has_marked = True
            _set(_SELECTED, result)
        elif indices and isinstance(indices[0], slice) and indices[0] != slice(None):
            if self._depends_on_weights(args[0]) and not self._depends_on_units(args[0]):
                return  # of weights alone
            self._has_marked, stop = True, indices[0].stop
            if self.makes_integers:
                _set(_COUNTED, result)
            if type(stop) is int and stop > len(args[0]):
                _set(_FIRST, result, (stop, len(args[0])))

    def _note(self, func: Any, called: Any, args: Any, kwargs: Any, result: Any) -> Any:
        place, frame = called
        kind = kind_of_call(func, args, kwargs)
        assert kind is not None
        tensors = list(tensors_given(args, kwargs))
        depends = any(map(self._depends_on_weights, tensors))
        is_mean, is_countable, is_counted = kind is Kind.MEAN, kind is Kind.MEAN, False
        if kind is Kind.LOSS:
            loss = LossCall(func, args, kwargs)
            if loss.reduction == "none":
                return result
            is_mean, is_countable = loss.is_mean, loss.is_mean and loss.is_countable
            is_counted = is_mean and loss.is_counted_by_target
        given = tuple(tuple(tensor.shape) for tensor in tensors)
        before = self._earlier.get(place)
        if before is not None and isinstance(result, Tensor) and not depends and before.given != given:
            result = _as_before(before, result, self._ratio)
        is_plain = isinstance(result, Tensor) and not depends and result.numel() <= _MOST_ELEMENTS
        is_plain = is_plain and not is_functorch_wrapped(result)
        reduction = Reduction(
            place,
            kind,
            line_text(frame),
            is_mean,
            is_countable,
            is_counted,
            depends,
            given,
            tuple(map(self._depends_on_units, tensors)),
            any(hasattr(tensor, _SELECTED) for tensor in tensors),
            any(hasattr(tensor, _COUNTED) for tensor in tensors),
            next((getattr(tensor, _FIRST) for tensor in tensors if hasattr(tensor, _FIRST)), None),
            shapes_of(result),
            tuple(filter(is_number, (*args, *kwargs.values()))),
            result.detach().clone() if is_plain and kind not in (Kind.PRODUCT, Kind.QUOTIENT, Kind.ADDITION) else None,
        )
        self.reductions.append(reduction)
        return result


def shapes_of(result: Any) -> Any:
    """The shape of a tensor, those of several (values and places), None of what is neither."""
    if isinstance(result, tuple):
        return tuple(map(shapes_of, result))
    return tuple(result.shape) if isinstance(result, Tensor) else None


def pass_on_selected(given: Iterable[Tensor], result: Any) -> None:
    """Marks what a unit or a function made of some rows, as these rows are."""
    tensors = list(given)
    for mark in (_SELECTED, _COUNTED, _FIRST):
        value = next((getattr(tensor, mark) for tensor in tensors if hasattr(tensor, mark)), None)
        if value is not None:
            _set(mark, result, value)


def _set(mark: str, result: Any, value: Any = True) -> None:
    for tensor in tensors_of(result):
        setattr(tensor, mark, value)


_SELECTED, _COUNTED, _FIRST = "_pp_selected", "_pp_counted", "_pp_first"
_SELECTING = ("masked_select", "nonzero", "argwhere", "unique")
_SIZES, _SHAPE = ("size", "numel", "nelement", "__len__"), Tensor.shape.__get__  # type: ignore[attr-defined]
INTEGERS = ("__int__", "__index__")
_NUMBERS = ("item", "tolist", "__float__")
READS = (*INTEGERS, *_NUMBERS, "__bool__")
_MOST_ELEMENTS = 1 << 16


def tensors_given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments, those in lists too."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (entry for entry in value if isinstance(entry, Tensor))


def is_number(value: object) -> bool:
    """Whether ``value`` is a Python number and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_before(before: Reduction, result: Tensor, ratio: float) -> Tensor:
    if before.value is None or before.value.shape != result.shape or before.depends_on_weights:
        return result
    grows = before.kind in (Kind.SUM, Kind.CONTRACTION)
    return grown(before.value, ratio) if grows else before.value


def grown(value: Tensor, factor: float | Tensor) -> Tensor:
    """``value`` times ``factor``; a count of samples becomes a floating-point number.

    At least float32, and float64 where that is the default: counts are exact in it.
    """
    default = torch.get_default_dtype()
    dtype = torch.promote_types(value.dtype, default) if value.is_floating_point() else default
    with torch.no_grad():
        return value.to(torch.promote_types(dtype, torch.float32)) * factor
