"""The logits of a head that is cut into parts: they only note operations, until a cross entropy takes them.

What may be done with them before that is what keeps rows of logits whole (views, ``contiguous``), or works on each
logit by itself (casts, products with numbers, ``tanh``). Which of the head's rows a view has is not derived from its
arguments: a tensor of row numbers goes along, with the classes as a dimension of stride 0, and afterwards there must
still be one such dimension of as many classes.

Shape letters: N rows (tokens), D features, V classes (words).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pp.split._torch_private import make_wrapper, without_dispatch_modes
from lightning_pp.split.head.cross_entropy import Loss, RunningSums, check_classes, loss_of
from lightning_pp.split.head.parts import HeadPart, Pointwise
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.split.record.sources import Source, set_sources

_SIGNATURE = inspect.signature(F.cross_entropy)
_PROPERTIES = frozenset(
    {
        *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "names", "itemsize", "is_nested"),
        *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_mps", "is_xla", "is_xpu"),
    }
)
_FACTS = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "__len__", "__hash__"),
        *("is_floating_point", "is_complex", "is_contiguous"),
    }
)
_VIEWS = frozenset(
    {
        *("__getitem__", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "narrow", "select"),
        *("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"),
    }
)
_COPIES = frozenset({"contiguous", "clone"})
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_POINTWISE = frozenset(
    {"mul", "__mul__", "__rmul__", "multiply", "div", "divide", "true_divide", "__truediv__", "tanh"}
)


class WholeHeadError(BaseException):
    """The logits are used in a way that parts of a head cannot serve; no Exception, so that no user's code catches it.

    ``str()`` of it says how.
    """


@dataclass(frozen=True)
class DeferredHead:
    """One call of a head, of which no stage has all logits.

    Attributes:
        name, num_classes: Of the head.
        hidden: What the head was called with, or a share of its logits: [..., D] with N rows.
        sources: Sources of the logits.
    """

    name: str
    num_classes: int
    hidden: Tensor
    sources: frozenset[Source]

    def sums(self, target: Tensor, pointwise: Pointwise, with_total: bool) -> RunningSums:
        """The sums over all classes of each row, whose class is ``target``, [N]."""
        raise NotImplementedError

    def used(self, how: str, func: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
        """The result of ``func`` on the logits, named ``how`` in errors; None: a use outside torch's functions."""
        raise WholeHeadError(how)

    @property
    def num_rows(self) -> int:
        """Rows of the logits."""
        return self.hidden.numel() // self.hidden.shape[-1]

    def logits(self) -> DeferredLogits:
        """Its logits."""
        num_classes = self.num_classes
        with without_dispatch_modes():
            numbers = _row_numbers(self.num_rows)
            rows = numbers.view(*self.hidden.shape[:-1], 1).expand(*self.hidden.shape[:-1], num_classes)
        return _logits(self, rows, (), _product_dtype(self.hidden))

    def cross_entropy(self, rows: Tensor, pointwise: Pointwise, target: Tensor, loss: Loss) -> Tensor:
        """The loss of int64 classes ``target``, for which ``rows``, on the host, has the number of the row of each."""
        num_classes, with_total = self.num_classes, loss.label_smoothing > 0
        check_classes(target, num_classes, loss.ignore_index)
        flat, places = target.flatten(), None
        if _is_all_rows(rows, self.num_rows):
            of_rows = flat
        else:  # rows that have no target count nothing
            places = rows.flatten().to(target.device)
            of_rows = torch.full((self.num_rows,), loss.ignore_index, device=target.device)
            of_rows = of_rows.index_copy(0, places, flat)
        sums = self.sums(of_rows, pointwise, with_total)
        if places is not None:
            sums = RunningSums(*(None if each is None else each.index_select(0, places) for each in sums))  # type: ignore[arg-type]
        value = loss_of(sums, flat, num_classes, loss)
        return value.view(target.shape) if loss.reduction == "none" else value


@dataclass(frozen=True)
class _HeadInParts(DeferredHead):
    """A head that is replaced by units, in order."""

    parts: Sequence[HeadPart]

    def sums(self, target: Tensor, pointwise: Pointwise, with_total: bool) -> RunningSums:
        """By one call of each part."""
        known: list[Tensor | None] = [None, None, None]
        hidden = self.hidden
        for part in self.parts:
            hidden, *sums = part(hidden, target, *known, pointwise, with_total)
            known = [*sums, *[None] * (3 - len(sums))]
        return RunningSums(*known)  # type: ignore[arg-type]


class DeferredLogits(Tensor):
    """Logits that are not computed, as a tensor of their shape, dtype and device.

    Attributes:
        head: Where they come from.
        rows: For each of them the number of its row, int64 on the host.
        pointwise: What was done with each of them.
    """

    head: DeferredHead
    rows: Tensor
    pointwise: Pointwise

    def untyped_storage(self) -> Any:
        """Raises :class:`NotImplementedError`: there is no memory."""
        raise NotImplementedError("Logits of a head that is cut into parts are not stored.")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the operation, or computes the loss."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (name == "__get__" and getattr(func.__self__, "__name__", "") in _PROPERTIES) or name in _FACTS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func is F.cross_entropy:
            return _cross_entropy(func, args, kwargs)
        given = args[0] if args and isinstance(args[0], DeferredLogits) else None
        if given is not None:
            done = _done(given, func, name, args[1:], kwargs)
            if done is not None:
                return done
        return _used(name, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What comes here was called past :meth:`__torch_function__`."""
        return _used(str(func), None, args, kwargs or {})


def deferred(
    parts: tuple[HeadPart, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    sources: frozenset[Source] = frozenset(),
) -> DeferredLogits:
    """The logits of a head that is called with ``args`` and ``kwargs``.

    Raises:
        WholeHeadError: These are no tensor with a dimension of rows; or later, when the logits are used otherwise.
    """
    given = (*args, *kwargs.values())
    if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].dim() < 2 or not given[0].numel():
        raise WholeHeadError(f"{user_line()} calls {parts[0].head_name!r} with an input that is not rows of features")
    return _HeadInParts(parts[0].head_name, parts[0].num_classes, given[0], sources, parts).logits()


def _logits(head: DeferredHead, rows: Tensor, pointwise: Pointwise, dtype: torch.dtype) -> DeferredLogits:
    with without_dispatch_modes():
        requires_grad = torch.is_grad_enabled() and dtype.is_floating_point
        found: DeferredLogits = make_wrapper(
            DeferredLogits, rows.shape, dtype=dtype, device=head.hidden.device, requires_grad=requires_grad
        )
    found.head, found.rows, found.pointwise = head, rows, pointwise
    if head.sources:
        set_sources(found, head.sources)
    return found


def _done(given: DeferredLogits, func: Any, name: str, args: Any, kwargs: Any) -> DeferredLogits | None:
    """What ``func`` makes of ``given``; None where that is not known."""
    head = given.head
    if name in _COPIES and not args:
        return _logits(head, given.rows, given.pointwise, given.dtype)
    if name in _VIEWS:
        rows = _viewed(given, func, args, kwargs)
        return None if rows is None else _logits(head, rows, given.pointwise, given.dtype)
    dtype = _CASTS.get(name) if not args and not kwargs else None
    if name == "to":
        dtype = _dtype_given(given, args, kwargs)
    if dtype is not None:
        step = () if dtype is given.dtype else (("to", (dtype,)),)
        return _logits(head, given.rows, (*given.pointwise, *step), dtype)
    if name in _POINTWISE and not kwargs and all(type(value) in (int, float) for value in args):
        with without_dispatch_modes():
            dtype = getattr(torch.empty((), dtype=given.dtype, device="meta"), name)(*args).dtype
        return _logits(head, given.rows, (*given.pointwise, (name, tuple(args))), dtype)
    return None


def _viewed(given: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The row numbers of a view of ``given``; None where rows would not stay whole."""
    num_classes, rows = given.head.num_classes, given.rows
    with without_dispatch_modes():
        try:
            if func.__name__ in ("reshape", "flatten"):
                shape = func(torch.empty(rows.shape, device="meta"), *args, **kwargs).shape
                if rows.stride(-1) == 0 and shape[-1:] == (num_classes,):  # may copy, but the numbers of rows alone
                    return rows.select(-1, 0).reshape(shape[:-1]).unsqueeze(-1).expand(shape)
                view = rows.view(shape)
            elif func.__name__ == "__getitem__" and not _is_plain_index(*args):
                return None
            else:
                view = func(rows, *args, **kwargs)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None
        return view if _class_dimension(view, num_classes) is not None else None


def _is_plain_index(index: Any) -> bool:
    """Whether indexing by it returns a view: numbers, slices, None and dots."""
    entries = index if isinstance(index, tuple) else (index,)
    return all(entry is None or entry is ... or type(entry) in (int, slice) for entry in entries)


def _class_dimension(rows: Tensor, num_classes: int) -> int | None:
    """The dimension of the classes; None unless there is one, with all of them."""
    found = [place for place in range(rows.dim()) if rows.stride(place) == 0 and rows.shape[place] != 1]
    return found[0] if len(found) == 1 and rows.shape[found[0]] == num_classes else None


def _dtype_given(given: DeferredLogits, args: Any, kwargs: Any) -> torch.dtype | None:
    """The dtype argument of ``to``; None if it has other arguments."""
    asked = {**kwargs}
    for value in args:
        if isinstance(value, torch.dtype):
            asked["dtype"] = value
        elif isinstance(value, (str, torch.device)):
            asked["device"] = value
        else:
            return None
    if asked.keys() - {"dtype", "device", "non_blocking", "copy"}:
        return None
    device = torch.device(asked.get("device") or given.device)
    if device.type != given.device.type or device.index not in (None, given.device.index):
        return None
    found: torch.dtype = asked.get("dtype") or given.dtype
    return found if found.is_floating_point else None


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    asked = _SIGNATURE.bind(*args, **kwargs)
    asked.apply_defaults()
    given = asked.arguments
    logits, target = given["input"], given["target"]
    if not isinstance(logits, DeferredLogits) or type(target) is not Tensor or target.dtype is not torch.int64:
        return _used("cross_entropy with targets that are not class indices", func, args, kwargs)
    if given["weight"] is not None or given["size_average"] is not None or given["reduce"] is not None:
        return _used("cross_entropy with class weights", func, args, kwargs)
    place = _class_dimension(logits.rows, logits.head.num_classes)
    with without_dispatch_modes():
        rows = logits.rows.select(min(1, logits.dim() - 1), 0)
    if place != min(1, logits.dim() - 1) or rows.shape != target.shape:
        return _used("cross_entropy over a dimension that is not the one of the classes", func, args, kwargs)
    loss = Loss(given["ignore_index"], given["reduction"], given["label_smoothing"])
    if loss.reduction not in ("none", "sum", "mean"):
        return _used(f"cross_entropy with reduction={loss.reduction!r}", func, args, kwargs)
    value = logits.head.cross_entropy(rows, logits.pointwise, target, loss)
    is_wide = torch.is_autocast_enabled(logits.device.type) and logits.dtype.itemsize < 4
    return value.to(torch.float32 if is_wide else logits.dtype)


def _used(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    head = next(each.head for each in _all_in((args, kwargs)) if isinstance(each, DeferredLogits))
    return head.used(f"{user_line()} uses the logits of {head.name!r} in {name}", func, args, kwargs)


def _all_in(tree: Any) -> Any:
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        yield tree
        return
    for child in tree:
        yield from _all_in(child)


@lru_cache(maxsize=64)
def _row_numbers(number: int) -> Tensor:
    return torch.arange(number, device="cpu")


def _is_all_rows(rows: Tensor, number: int) -> bool:
    """Whether ``rows`` are all rows in order, found without reading the numbers."""
    is_own = rows.untyped_storage().data_ptr() == _row_numbers(number).untyped_storage().data_ptr()
    return is_own and rows.is_contiguous() and rows.storage_offset() == 0 and rows.numel() == number


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of a linear layer's output for that input."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
