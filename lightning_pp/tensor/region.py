"""Runs a unit on this rank's parts of its parameters, with code that knows only whole sizes.

While a unit runs, a function mode sees every function of torch that it calls. A tensor of which a rank holds a part
carries a :class:`~lightning_pp.tensor.cuts.Cut`. Code that asks for its shape gets that of the whole tensor, and sizes
that code names are those of whole tensors: ``x.view(batch, length, self.num_heads, -1)`` and ``qkv.split(width)`` mean
what they mean on one device. The rules of :mod:`~lightning_pp.tensor.rules` run each function on the parts and say how
its result is cut. A function without a rule raises :class:`~lightning_pp.tensor.cuts.CutError`. Whole tensors are not
looked at, so a unit that shards nothing runs as ever.

What is whole has the whole gradient, the same on all tensor ranks. What is cut has the gradient of its part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pp.split._torch_private import version_of
from lightning_pp.split.data.tree import map_leaves
from lightning_pp.split.record.products import PRODUCTS
from lightning_pp.tensor.cuts import Cut, CutError, cut_of, mark
from lightning_pp.tensor.functions import move
from lightning_pp.tensor.parts import rank_pieces

Rule = Callable[["Region", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _OpenRegions:
    """Whether code of a unit runs whose functions a region still has to intercept."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


# Deferral of weight gradients leaves functions alone while this counts one: the region calls them again.
OPEN = _OpenRegions()

# torch's own function: where it is looked up, since deferral replaces it there
_PRODUCTS = {getattr(owner, product.name): (owner, product.name) for product in PRODUCTS for owner in product.owners}


class Region(TorchFunctionMode):
    """The function mode under which a unit runs.

    Args:
        group: The tensor ranks.
        rules: What to do with functions of cut tensors, by name.
        sequence_parallel: Whether a sum over the ranks is scattered along the sequence, so that norms, dropout and
            sums between two sharded products are computed on parts.
        adopt: Called with weight, bias, input and the weight's output dimension before each product, for planning. It
            returns the weight and the bias to use, cut or whole.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rules: Mapping[str, Rule],
        sequence_parallel: bool = False,
        adopt: Callable[..., tuple[Tensor, Tensor | None]] | None = None,
    ) -> None:
        super().__init__()
        self.group, self.num_ranks, self.rank = group, group.size(), group.rank()
        self.adopt, self.sequence_parallel = adopt, sequence_parallel
        self._is_open = False
        self.draws = True  # whether dropout draws; not while a unit is checked
        self._rules = rules
        self._found: dict[Any, tuple[str, Rule | None]] = {}
        self._copies: dict[tuple[int, str], tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def __deepcopy__(self, memo: Any) -> Region:
        """For a copy of the unit, over the same ranks."""
        return Region(self.group, self._rules, self.sequence_parallel, self.adopt)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """In the block, functions pass through here."""
        self._is_open = True
        try:
            with self.entered_again():
                yield
        finally:
            self._is_open = False
            self._copies.clear()

    @contextmanager
    def entered_again(self) -> Iterator[None]:
        """Within a rule, has the functions that it calls pass through here as well."""
        OPEN.count += 1
        try:
            with self:
                yield
        finally:
            OPEN.count -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        kwargs = kwargs or {}
        OPEN.count -= 1
        try:
            found = self._found.get(func)
            if found is None:
                found = self._found[func] = self._rule_of(func)
            name, rule = found
            if not _has_cut(args, kwargs) and not (self.adopt and name in PRODUCT_NAMES):
                return self.call(func, *args, **kwargs)
            try:
                if rule is None:
                    raise CutError("has no rule for sharded tensors", origins_of(args, kwargs))
                return rule(self, func, args, kwargs)
            except CutError as error:
                writes = name.endswith("_") and not name.endswith("__") and cut_of(args[0]) is not None
                if not writes and any(cut.tokens for _, cut in cuts_of(args, kwargs)):
                    return self._rerun(func, name, rule, *self.whole_again((args, kwargs)))
                error.name = error.name or name
                raise
        finally:
            OPEN.count += 1

    def _rerun(self, func: Any, name: str, rule: Rule | None, args: Any, kwargs: Any) -> Any:
        """Runs one function again, on tensors that were gathered."""
        if rule is None or not (_has_cut(args, kwargs) or (self.adopt and name in PRODUCT_NAMES)):
            return self.call(func, *args, **kwargs)
        return rule(self, func, args, kwargs)

    def _rule_of(self, func: Any) -> tuple[str, Rule | None]:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = f"{func.__self__.__name__}.{name}"
        return name, self._rules.get(name)

    @staticmethod
    def call(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``func``, or what stands in its place while weight gradients are deferred."""
        place = _PRODUCTS.get(func)
        return (func if place is None else getattr(*place))(*args, **kwargs)

    def copied(self, whole: Tensor) -> Tensor:
        """A whole tensor for use on parts: its gradient is summed over the ranks, once for all uses in a unit's run."""
        if cut_of(whole) is not None or not (torch.is_grad_enabled() and whole.requires_grad):
            return whole
        return self._once(whole, "copied", lambda: move(whole, "keep", "sum", self.group))

    def gathered(self, part: Tensor, *, sums: bool) -> Tensor:
        """The whole of a tensor that is cut, gathered once for all uses of one kind."""
        cut = cut_of(part)
        assert cut is not None
        sums = sums and len(cut.segments) == 1
        kind = "for products" if sums else "whole"
        back = "scatter" if sums else "take"
        return self._once(part, kind, lambda: move(part, "join", back, self.group, cut.dim, cut.segments))

    def _once(self, tensor: Tensor, kind: str, function: Callable[[], Tensor]) -> Tensor:
        if not self._is_open:  # of a result, after the unit has run
            return function()
        version = 0 if tensor.is_inference() else version_of(tensor)
        found = self._copies.get((id(tensor), kind))
        if found is None or found[0]() is not tensor or found[1] != version:
            found = self._copies[id(tensor), kind] = weakref.ref(tensor), version, function()
        return found[2]

    def whole_again(self, tree: Any, others: bool = False) -> Any:
        """Containers and tensors with those gathered that are cut along tokens, and ``others``."""

        def whole(leaf: Any) -> Any:
            cut = cut_of(leaf)
            return self.gathered(leaf, sums=False) if cut is not None and (cut.tokens or others) else leaf

        return map_leaves(whole, tree) if self.sequence_parallel or others else tree

    def token_dim(self, partial: Tensor) -> int | None:
        """The dimension in which a sum is scattered: the second, or the first where it is not divisible."""
        if not self.sequence_parallel:
            return None
        dims = [dim for dim in (1, 0) if dim < partial.dim() - 1]
        return next((dim for dim in dims if partial.shape[dim] and not partial.shape[dim] % self.num_ranks), None)

    def summed(self, partial: Tensor) -> Tensor:
        """The sum of what the ranks have computed."""
        return move(partial, "sum", "keep", self.group)

    def first_of(self, segments: Sequence[int]) -> int:
        """Where in a dimension this rank's part begins."""
        return rank_pieces(segments, self.rank, self.num_ranks)[0][0]

    def part(self, whole: Tensor, dim: int, segments: Sequence[int], origins: frozenset[str] = frozenset()) -> Tensor:
        """This rank's part of a whole tensor, in segments of ``dim``."""
        if any(length % self.num_ranks for length in segments):
            raise CutError(f"needs segments {list(segments)} in {self.num_ranks} equal parts", origins)
        return move(whole, "take", "join", self.group, dim, tuple(segments))

    def fitted(self, tensor: Any, position: int, cut: Cut) -> Any:
        """``tensor`` for use beside one that is cut at ``position``, counted from its last dimension as 1.

        A whole tensor of that size there is cut; one that is broadcast there is copied.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        own, dim = cut_of(tensor), tensor.dim() - position
        if own is not None:
            if own.dim != dim or own.segments != cut.segments:
                raise CutError(
                    f"meets tensors sharded in dimension {-position} (segments {list(cut.segments)}) and in dimension "
                    f"{own.dim - tensor.dim()} (segments {list(own.segments)})",
                    # a cut of heads is kept rather than one inside of heads
                    own.origins if own.dim > dim else cut.origins if own.dim < dim else own.origins | cut.origins,
                )
            return tensor
        if dim < 0 or tensor.shape[dim] == 1:
            return self.copied(tensor)
        if tensor.shape[dim] != cut.size:
            raise CutError(
                f"meets a tensor of shape {list(tensor.shape)} and one sharded in dimension {-position} of {cut.size}",
                cut.origins,
            )
        return self.part(tensor, dim, cut.segments)


PRODUCT_NAMES = frozenset(
    {"linear", "addmm", "matmul", "__matmul__", "mm", "multi_head_attention_forward", "embedding"}
)


def _has_cut(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    for value in args:
        if isinstance(value, Tensor):
            if cut_of(value) is not None:
                return True
        elif isinstance(value, (list, tuple)) and _has_cut(value, {}):
            return True
    return bool(kwargs) and _has_cut(tuple(kwargs.values()), {})


def cuts_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Tensor, Cut]]:
    """The cut tensors among arguments."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            found += cuts_of(value, {})
        elif isinstance(value, Tensor) and (cut := cut_of(value)) is not None:
            found.append((value, cut))
    return found


def origins_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[str]:
    """The parameters whose cuts reach these arguments."""
    return frozenset().union(*(cut.origins for _, cut in cuts_of(args, kwargs)))


def marked(result: Any, cut: Cut | None) -> Any:
    """``result``, each tensor of it noted as cut so."""
    if isinstance(result, Tensor):
        return mark(result, cut)
    if isinstance(result, (list, tuple)):
        for each in result:
            marked(each, cut)
    return result


def words(text: str) -> list[str]:
    """Names between spaces."""
    return text.split()
