"""The user's step on one microbatch, with the counts of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pp.errors import SplitError
from lightning_pp.split.data.tree import map_leaves
from lightning_pp.split.record.reduction import Kind, Place
from lightning_pp.split.record.source_lines import line_text
from lightning_pp.split.reductions.estimates import follow, marked_as
from lightning_pp.split.reductions.facts import Fact, Facts
from lightning_pp.split.reductions.functions import GREATEST, REVERSED, SCATTERS, LossCall, kind_of_call
from lightning_pp.split.reductions.places import Places
from lightning_pp.split.reductions.recording import INTEGERS, READS, grown, is_number, shapes_of, tensors_given
from lightning_pp.split.unit_calls.interception import OutsideUnits, running_unit

_DEGREE = "_pp_degree"
_EXTREME = "_pp_extreme"
_OWN_COUNT = "_pp_own_count"
_KEEPS = "_pp_keeps_counts"
_CONVERSIONS = ("to", "type", "type_as", "int", "long", "short")
_EQUALITIES = ("eq", "ne", "__eq__", "__ne__")

Count = tuple[Tensor | float, ...] | None
"""What one call counts in a microbatch, in parts that are added up over the batch; None: it is not known."""


_as_they_are: list[None] = []
_running: list[ScaledStep] = []


@contextmanager
def values_as_they_are() -> Iterator[None]:
    """Within, as in the update of a metric, sums and counts are the microbatch's own, which add up by themselves."""
    _as_they_are.append(None)
    try:
        yield
    finally:
        _as_they_are.pop()


def are_values_as_they_are() -> bool:
    """Whether that is so now."""
    return bool(_as_they_are)


def of_whole_batch(tree: Any) -> Any:
    """``tree`` as :meth:`ScaledStep.of_whole_batch` makes it for the step that runs; as it is where none is scaled."""
    return _running[-1].of_whole_batch(tree) if _running else tree


class Scale(NamedTuple):
    """One microbatch beside its global batch.

    Attributes:
        share: Its share of the samples.
        totals: What the whole batch counts at each place that is counted; empty while that is being found out.
        num_samples: Of the microbatch, while it is counted.
    """

    share: float
    totals: Mapping[Place, Count]
    num_samples: int = 1


MADE_OF_A_COUNT = (
    "{} calculates with a number that Python made of a count. For a microbatch with a small count this number is "
    "larger, so it does not add up over microbatches. Keep the count a tensor (mask.sum().clamp(min=1) for "
    "max(int(mask.sum()), 1)), or set whole_batch_loss=True on the strategy."
)


class ScaledStep(OutsideUnits):
    """Within, one run of the step: the degrees of its values are followed, and what it counts is the global batch's.

    A count that the batch alone decides becomes the microbatch's share of the global batch's: the numbers that Python
    makes of it go with ``len(x)``, which is a microbatch's too. A mean is divided by its share of the global batch's
    count. Wherever a value meets one of another degree, or a function that is not in :mod:`functions`, it first becomes
    what stands for the whole batch.

    Args:
        facts: What is known of the step's calls.
        scale: The microbatch beside its batch.
        counted: If given, gets what the microbatch counts, by place.
        refuses_unknown: Whether a sum that no dry run has seen is an error, unless it is only compared for equality.
        follows_estimates: Whether it is followed which values add up over microbatches.
        read_for_none: What Python reads where a tensor holds 0.
    """

    def __init__(
        self,
        facts: Facts,
        scale: Scale,
        counted: dict[Place, Count] | None = None,
        *,
        refuses_unknown: bool = False,
        follows_estimates: bool = False,
        read_for_none: int = 0,
    ) -> None:
        super().__init__()
        self._facts = facts
        self._read_for_none = read_for_none
        self._share, self._totals, self._num_samples = scale
        self._counted = counted
        self._refuses_unknown = refuses_unknown
        self._follows = follows_estimates
        self._places = Places()
        self._is_paused = False
        self._seen: set[Place] = set()
        self._unknown: dict[Tensor, str] = {}
        self._reads: set[Any] = set()  # numbers that Python read; 0 for no rows too

    def __enter__(self) -> ScaledStep:
        """Follows what runs from here on."""
        super().__enter__()  # type: ignore[no-untyped-call]
        _running.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        """Follows nothing any more."""
        _running.remove(self)
        self._places.end()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def of_whole_batch(self, tree: Any) -> Any:
        """``tree`` with tensors that stand for the whole batch: their weighted mean over microbatches is its value."""
        before, self._is_paused = self._is_paused, True
        try:
            return map_leaves(lambda leaf: self._normal(leaf) if isinstance(leaf, Tensor) else leaf, tree)
        finally:
            self._is_paused = before

    def check_complete(self, counted: Iterable[Place]) -> None:
        """After a step: raises :class:`SplitError` if it did not reach all that was counted for it beforehand."""
        for place in counted:
            fact = self._facts.find(place)
            if place not in self._seen and fact is not None:
                raise SplitError(
                    f"A rehearsal that counts what the loss divides by reached {fact.call.line}, but the step did not. "
                    "A branch by weights or compiled code can cause this. Make the branch depend on the batch only, "
                    "or set whole_batch_loss=True on the strategy."
                )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        kwargs = kwargs or {}
        if self._is_paused or _as_they_are or running_unit():
            return func(*args, **kwargs)
        kind = kind_of_call(func, args, kwargs)
        if func.__name__ in READS:
            self._places.note_read(func.__name__)
        if func.__name__ in INTEGERS or (func.__name__ in _EQUALITIES and any(type(n) is int and n for n in args)):
            args = tuple(getattr(each, _OWN_COUNT, each) for each in args)  # as mask.sum() == mask.numel() has it
            return self._noted(func(*args, **kwargs))
        if self._unknown:  # to ask whether such a count equals a number, as above, is harmless
            self._refuse_unknown(tensors_given(args, kwargs))
        if kind is Kind.READING:
            return self._noted(func(*args, **kwargs))
        if kind is None or kind is Kind.LINEAR:
            result = self._other(kind, func, args, kwargs)
            if self._follows and not _of_each_row(func, args):
                given = list(map(self._normal, tensors_given(args, kwargs)))
                follow(kind, func, given, (), result, reduces=False)
            return result
        called = self._places.next(func.__name__)
        if called is None:
            return func(*args, **kwargs)
        place, frame = called
        fact = self._facts.find(place)
        if fact is None:
            result = func(*self._all_normal(args), **self._all_normal(kwargs))
            loss = LossCall(func, args, kwargs) if kind is Kind.LOSS else None
            if loss is None or not loss.is_mean or loss.is_counted_by_target:
                self._check_known(kind, line_text(frame), result)
            return result
        in_place = func.__name__.startswith("__i") or _writes_in_place(func.__name__)
        if in_place and getattr(args[0], _KEEPS, False):
            self._seen.add(place)
            return func(*(getattr(each, _OWN_COUNT, each) for each in args), **kwargs)
        result = _HANDLERS[kind](self, place, fact, func, args, kwargs)
        shapes = tuple(tuple(each.shape) for each in tensors_given(args, kwargs))
        if any(0 in shape for shape in shapes):
            self._reads.add(0)
        if fact.alike:
            _check_alike(fact, shapes, shapes_of(result))
        if self._follows:
            reduces = fact.over_rows and fact.call.depends_on_weights
            given = list(tensors_given(args, kwargs))
            follow(kind, func, given, fact.call.of_samples, result, reduces=reduces)
        return result

    def _noted(self, read: Any) -> Any:
        """``read``, a number that Python makes of a tensor; whether it is 0 is kept."""
        if is_number(read):
            self._reads.add(read)
            return read or type(read)(self._read_for_none)
        return read

    @property
    def reads_nothing(self) -> bool:
        """Whether all numbers that Python has read were 0, and there was one."""
        return self._reads == {0}

    # ---------------------------------------------------------------- kinds of functions

    def _other(self, kind: Kind | None, func: Any, args: Any, kwargs: Any) -> Any:
        degrees = {degree_of(tensor) for tensor in tensors_given(args, kwargs)}
        if _of_each_row(func, args):
            return func(*args, **kwargs)
        if not any(degrees):
            result = func(*args, **kwargs)
            for mark in (_EXTREME, _KEEPS) if func.__name__ == "__getitem__" else (_EXTREME,):
                if kind is Kind.LINEAR and args and hasattr(args[0], mark) and isinstance(result, Tensor):
                    setattr(result, mark, getattr(args[0], mark))
            return result
        name = func.__name__
        if name in _CONVERSIONS and isinstance(args[0], Tensor):
            own = func(getattr(args[0], _OWN_COUNT, args[0]), *args[1:], **kwargs)
            if not _is_real(own):
                if not args[0].is_floating_point():
                    return set_degree(own, degree_of(args[0]))
                # a share of a count would be cut off, and so would 19.999999 of 20
                whole = self._normal(args[0])
                is_near = torch.isclose(whole, whole.round(), rtol=8 * torch.finfo(whole.dtype).eps, atol=0)
                result = func(torch.where(is_near, whole.round(), whole), *args[1:], **kwargs)
                setattr(result, _OWN_COUNT, own)
                return result
        if kind is Kind.LINEAR and len(degrees) == 1:
            return set_degree(func(*args, **kwargs), degrees.pop())
        if _writes_in_place(name) and isinstance(args[0], Tensor):
            self._make_normal(args[0])
        return func(*self._all_normal(args), **self._all_normal(kwargs))

    def _sum(self, place: Place, fact: Fact, func: Any, args: Any, kwargs: Any) -> Any:
        if func.__name__ in SCATTERS:
            return self._scatter(place, fact, func, args, kwargs)
        return self._as_sum(place, fact, func(*args, **kwargs), args, kwargs)

    def _scatter(self, place: Place, fact: Fact, func: Any, args: Any, kwargs: Any) -> Any:
        if not fact.over_rows:
            return self._other(None, func, args, kwargs)
        into, others = args[0], args[1:]
        added = getattr(torch, func.__name__.rstrip("_"))(torch.zeros_like(into), *others, **kwargs)
        added = self._normal(self._as_sum(place, fact, added, others, kwargs))
        if not func.__name__.endswith("_"):
            return self._normal(into) + added
        self._make_normal(into)
        return into.add_(added)

    def _as_sum(self, place: Place, fact: Fact, result: Any, args: Any, kwargs: Any) -> Any:
        degree = sum(map(degree_of, tensors_given(args, kwargs))) + fact.over_rows
        if fact.is_counted and isinstance(result, Tensor):
            whole = result if degree == 1 else grown(result, self._share ** (1 - degree))
            total = self._total(place, (whole,))
            if total is not None:
                own, result = result, _like(result, total[0], self._share**degree)
                if result is not own:
                    setattr(result, _OWN_COUNT, own)
        return set_degree(result, degree)

    def _mean(self, place: Place, fact: Fact, func: Any, args: Any, kwargs: Any) -> Any:
        if not fact.is_counted:
            return self._other(Kind.LINEAR, func, args, kwargs)
        args = self._all_normal(args)
        given = next(tensors_given(args, kwargs))
        summed = torch.sum(*args, **kwargs)
        count = given.numel() / max(summed.numel(), 1)
        if fact.call.depends_on_weights:
            total = self._total(place, (count,))
            return func(*args, **kwargs) if total is None else summed / (total[0] * self._share)
        total = self._total(place, (summed.detach(), count))
        return func(*args, **kwargs) if total is None else _like(summed, total[0], 1 / max(float(total[1]), 1.0))

    def _loss(self, place: Place, fact: Fact, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = self._all_normal(args), self._all_normal(kwargs)
        loss = LossCall(func, args, kwargs)
        if loss.reduction == "none" or not fact.over_rows:
            return func(*args, **kwargs)
        if not loss.is_mean:
            return self._sum(place, fact, func, args, kwargs)
        if not fact.is_counted:
            return func(*args, **kwargs)
        denominator = loss.denominator()
        total = self._total(place, None if denominator is None else (denominator,))
        return func(*args, **kwargs) if total is None else loss.summed() / (total[0] * self._share)

    def _extreme(self, place: Place, fact: Fact, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*self._all_normal(args), **self._all_normal(kwargs))
        if not isinstance(result, Tensor):
            return result
        if not fact.is_counted:
            if fact.over_rows:
                setattr(result, _EXTREME, "max" if func.__name__ in GREATEST else "min")
            return result
        total = self._total(place, (result,))
        return result if total is None else _beside(result, total[0])

    def _product(self, place: Place, fact: Fact, func: Any, args: Any, kwargs: Any) -> Any:
        args, degrees = self._with_degrees(place, fact, args)
        if not any(degrees):
            return func(*args, **kwargs)
        if len(degrees) != 2:
            return func(*self._all_normal(args, degrees), **self._all_normal(kwargs))
        left, right = reversed(degrees) if func.__name__ in REVERSED else degrees
        is_quotient = fact.call.kind is Kind.QUOTIENT
        if is_quotient and kwargs.get("rounding_mode") is not None:
            return func(*self._all_normal(args, degrees), **kwargs)
        return set_degree(func(*args, **kwargs), left - right if is_quotient else left + right)

    def _addition(self, place: Place, fact: Fact, func: Any, args: Any, kwargs: Any) -> Any:
        args, degrees = self._with_degrees(place, fact, args)
        counting = [degree for degree, it in zip(degrees, args, strict=True) if not (is_number(it) and it == 0)]
        if fact.adds_samples and getattr(args[0], _KEEPS, None) is False:  # an attribute had something before the batch
            return keeping_counts(func(args[0], args[1] * self._share ** -(1 + degrees[1]), **kwargs))
        if fact.adds_samples:
            return set_degree(func(*args, **kwargs), min(counting, default=0) + 1)
        if not any(counting):
            return func(*args, **kwargs)
        if len(set(counting)) == 1:
            return set_degree(func(*args, **kwargs), counting[0])
        if _writes_in_place(func.__name__):
            self._make_normal(args[0])
            degrees = [0.0, *degrees[1:]]
        return set_degree(func(*self._all_normal(args, degrees), **kwargs), 0)

    def _tensor_of_number(self, place: Place, fact: Fact, func: Any, args: Any, kwargs: Any) -> Any:
        if sum(map(is_number, args)) != 1 or len(fact.degrees) != 1:
            return func(*args, **kwargs)
        args, degrees = self._with_degrees(place, fact, args, of_any_tensor=True)
        return set_degree(func(*args, **kwargs), max(degrees, key=abs, default=0))

    # ---------------------------------------------------------------- degrees and totals

    def _with_degrees(
        self, place: Place, fact: Fact, args: tuple[Any, ...], *, of_any_tensor: bool = False
    ) -> tuple[tuple[Any, ...], list[float]]:
        """The arguments, with numbers that are counted in the microbatch's share of the total, and their degrees."""
        degrees = [degree_of(value) for value in args]
        if not any(fact.degrees) and None not in fact.degrees:
            return args, degrees
        tensors = [value for value in args if isinstance(value, Tensor)]
        if not (of_any_tensor or any(tensor.is_floating_point() or degree_of(tensor) for tensor in tensors)):
            return args, degrees  # places in a batch, and not amounts
        values, of_numbers = list(args), iter(fact.degrees)
        where = [(index, next(of_numbers, 0.0)) for index, value in enumerate(args) if is_number(value)]
        counted = [index for index, degree in where if degree is None]
        numbers = tuple(float(values[index]) for index in counted)
        # what stands where the microbatch counts nothing, but for multiples of its samples, as len(x) is
        of_none = tuple(n if self.reads_nothing and n % self._num_samples else 0.0 for n in numbers)
        total = self._total(place, (*numbers, *of_none)) if counted else ()
        is_off = any(0 != n != whole for whole, n in zip(total or (), (total or ())[len(counted) :], strict=False))
        if 1 not in self._reads and any(0 < read < 1 for read in self._reads):
            # max(mask.sum().item(), 1): it reads the share of a small count, and takes 1
            is_off |= any(degree == 1 and values[index] == 1 for index, degree in where)
        if is_off and self._counted is None:  # a rehearsal has totals of earlier rounds
            raise SplitError(MADE_OF_A_COUNT.format(fact.call.line))
        for index, degree in where:
            degrees[index] = 1.0 if degree is None else degree
        for index, whole in zip(counted, total or (), strict=False):
            values[index] = float(whole) * self._share
        return tuple(values), degrees

    def _total(self, place: Place, count: Count) -> Count:
        """Notes what the microbatch counts; what the whole batch does, if that is known."""
        self._seen.add(place)
        if self._counted is not None:
            self._counted[place] = count
        return self._totals.get(place)

    def _normal(self, tensor: Tensor) -> Tensor:
        degree = degree_of(tensor)
        return tensor if degree == 0 else marked_as(tensor, tensor * self._share**-degree)

    def _make_normal(self, tensor: Tensor) -> None:
        degree = degree_of(tensor)
        if hasattr(tensor, _OWN_COUNT):
            delattr(tensor, _OWN_COUNT)
        if degree != 0:
            factor = self._share**-degree
            tensor.mul_(factor) if _is_real(tensor) else tensor.copy_((tensor * factor).round())
            set_degree(tensor, 0)

    def _all_normal(self, arguments: Any, degrees: list[float] | None = None) -> Any:
        if isinstance(arguments, dict):
            return {key: self._normal_argument(value) for key, value in arguments.items()}
        if degrees is not None:
            return tuple(
                value * self._share**-degree if is_number(value) and degree else self._normal_argument(value)
                for value, degree in zip(arguments, degrees, strict=True)
            )
        return tuple(map(self._normal_argument, arguments))

    def _normal_argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._normal(value)
        if type(value) in (list, tuple) and any(isinstance(entry, Tensor) for entry in value):
            return type(value)(map(self._normal_argument, value))
        return value

    def _check_known(self, kind: Kind, line: str, result: Any) -> None:
        is_sum = kind in (Kind.SUM, Kind.CONTRACTION, Kind.LOSS)
        if self._refuses_unknown and is_sum and isinstance(result, Tensor) and result.dim() == 0:
            self._unknown[result] = line
            self._refuse_unknown([result] if result.is_floating_point() else ())

    def _refuse_unknown(self, used: Iterable[Tensor]) -> None:
        for line in (self._unknown[tensor] for tensor in used if tensor in self._unknown):
            raise SplitError(
                f"{line} adds up samples in a branch that the recorded step did not take, so it is not known whether "
                "this is a sum or part of a mean. Make the branch depend on the batch's shape or on "
                "trainer.global_step, or set whole_batch_loss=True on the strategy."
            )


def _check_alike(fact: Fact, given: tuple[tuple[int, ...], ...], result: Any) -> None:
    """Raises if a call reduces other rows than it was given when the step was learned."""
    of_this_result = [shapes for shapes, other in fact.alike if other == result]
    if of_this_result and given not in of_this_result:
        raise SplitError(
            f"{fact.call.line} reduces rows that values of the batch select. It got {_listed(given)} now, but "
            f"{_listed(of_this_result[0])} in every part of the batch on which the step was recorded. So it is not "
            "known whether this is a sum over samples. Multiply by a mask instead ((x * mask).sum()), or set "
            "whole_batch_loss=True on the strategy."
        )


def _listed(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def _of_each_row(func: Any, args: Any) -> bool:
    """Whether this call takes the gradient of a sum for each of the samples that it adds up."""
    is_of_sum = func is torch.autograd.grad and all(degree_of(output) == 1 for output in args[0])
    return is_of_sum and all(given.is_leaf and not isinstance(given, nn.Parameter) for given in args[1])


def extreme_of(tensor: Tensor) -> str | None:
    """``min`` or ``max`` where ``tensor`` is the least or greatest of something over a microbatch's samples."""
    found: str | None = getattr(tensor, _EXTREME, None)
    return found


def keeping_counts(tensor: Tensor) -> Tensor:
    """``tensor``; if it has whole numbers, what is added to it in place is a microbatch's own count."""
    setattr(tensor, _KEEPS, not _is_real(tensor))
    return tensor


def _writes_in_place(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _is_real(tensor: Tensor) -> bool:
    """Whether it can hold fractions."""
    return tensor.is_floating_point() or tensor.is_complex()


def degree_of(value: Any) -> float:
    """The power of the number of samples that ``value`` grows with; 0 for what is no tensor."""
    return getattr(value, _DEGREE, 0.0) if isinstance(value, Tensor) else 0.0


def set_degree(result: Any, degree: float) -> Any:
    """Notes that ``result``, or each tensor in it, grows with that power of the number of samples; returns it."""
    if isinstance(result, Tensor):
        if degree != 0 or hasattr(result, _DEGREE):
            setattr(result, _DEGREE, float(degree))
    elif isinstance(result, (list, tuple)):
        for entry in result:
            set_degree(entry, degree)
    return result


def _like(result: Tensor, total: Tensor | float, factor: float | Tensor) -> Tensor:
    """``total`` times ``factor``; ``result`` itself if that is equal and looking costs nothing."""
    whole = grown(_beside(result, total), factor)
    if result.is_cpu and bool((whole == result).all()):
        return result
    return whole


def _beside(result: Tensor, total: Tensor | float) -> Tensor:
    """``total`` where ``result`` is; the host waits for no device, since a single number goes with the call.

    What has several numbers is copied without waiting: up to 64 KiB, CUDA keeps them before the copy returns.
    """
    if not isinstance(total, Tensor):
        return torch.full((), total, device=result.device)
    if total.device == result.device:
        return total
    if total.dim() == 0:  # was exchanged between replicas, on the host
        return torch.full((), total.item(), dtype=total.dtype, device=result.device)
    return total.to(result.device, non_blocking=True)


# no bound methods in the step itself: what they hold would live until the next collection of garbage
_HANDLERS: Mapping[Kind, Callable[..., Any]] = {
    Kind.SUM: ScaledStep._sum,
    Kind.CONTRACTION: ScaledStep._sum,
    Kind.MEAN: ScaledStep._mean,
    Kind.LOSS: ScaledStep._loss,
    Kind.EXTREME: ScaledStep._extreme,
    Kind.PRODUCT: ScaledStep._product,
    Kind.QUOTIENT: ScaledStep._product,
    Kind.ADDITION: ScaledStep._addition,
    Kind.NUMBER: ScaledStep._tensor_of_number,
}
