"""Functions that compute each element from those at its place, and questions about tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pp.tensor.cuts import Cut, CutError, cut_of, mark, whole_shape
from lightning_pp.tensor.functions import RecordedGroup
from lightning_pp.tensor.parts import TensorPart, part_of, rank_pieces
from lightning_pp.tensor.randomness import drawn_by_rank
from lightning_pp.tensor.region import Region, Rule, cuts_of, marked, words

Arguments = tuple[Any, ...]


def position_of(found: Sequence[tuple[Tensor, Cut]]) -> tuple[int, Cut]:
    """Where tensors are cut, counted from the last dimension as 1, and how, with the origins of all."""
    tensor, cut = found[0]
    origins = frozenset().union(*(each.origins for _, each in found))
    return tensor.dim() - cut.dim, replace(cut, origins=origins)


def fit_all(region: Region, args: Arguments, kwargs: dict[str, Any], position: int, cut: Cut) -> Any:
    """All tensors among arguments, for use beside one cut at ``position``."""

    def fitted(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(fitted(each) for each in value)
        return region.fitted(value, position, cut)

    return tuple(fitted(value) for value in args), {name: fitted(value) for name, value in kwargs.items()}


def elementwise(region: Region, func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]) -> Any:
    """A function of tensors that are broadcast against one another."""
    position, cut = position_of(cuts_of(args, kwargs))
    if func.__name__.endswith("_") and cut_of(args[0]) is None:
        raise CutError("writes what is sharded into a whole tensor", cut.origins)
    args, kwargs = fit_all(region, args, kwargs, position, cut)
    result = region.call(func, *args, **kwargs)
    return marked(result, cut.at(result.dim() - position))


def dropout(region: Region, func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Each rank draws a mask for its part; in compiled code all draw the whole mask, and each takes its part."""
    names = ("input", "p", "training", "inplace")
    given = {"p": 0.5, "training": True, "inplace": False, **dict(zip(names, args, strict=False)), **kwargs}
    tensor, cut = given["input"], cut_of(args[0] if args else kwargs["input"])
    if not given["p"] or not given["training"] or not region.draws:
        return marked(func(*args, **kwargs), cut)
    if isinstance(region.group, RecordedGroup) and func.__name__ == "dropout" and cut is not None:
        mask = F.dropout(torch.ones(whole_shape(tensor), dtype=tensor.dtype, device=tensor.device), given["p"])
        mask = part_of(mask, TensorPart(cut.dim, mask.shape, rank_pieces(cut.segments, region.rank, region.num_ranks)))
        return mark(tensor.mul_(mask) if given["inplace"] else tensor * mask, cut)
    with drawn_by_rank(region, tensor.device):
        return marked(func(*args, **kwargs), cut)


def of_first(region: Region, func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]) -> Any:
    """A function whose result is as its first argument, whatever the others are."""
    return marked(region.call(func, *args, **kwargs), cut_of(args[0]))


def ask(region: Region, func: Callable[..., Any], args: Arguments, kwargs: dict[str, Any]) -> Any:
    """A question whose answer is the same for a part, or a whole tensor that has only the dtype and device of one."""
    return func(*args, **kwargs)


_ELEMENTWISE = words("""
add sub rsub mul div true_divide divide multiply subtract floor_divide fmod remainder pow rpow neg negative abs exp
exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan tanh sigmoid logsigmoid erf erfc sinh cosh
asinh acosh atanh atan atan2 asin acos floor ceil round trunc sign clamp clamp_min clamp_max clip maximum minimum
where masked_fill nan_to_num eq ne lt gt le ge logical_and logical_or logical_xor logical_not bitwise_and bitwise_or
bitwise_xor bitwise_not isnan isinf isfinite lerp addcmul addcdiv relu relu6 leaky_relu elu selu celu gelu silu mish
softplus softsign hardtanh hardswish hardsigmoid tanhshrink softshrink hardshrink threshold logit sgn hypot __add__
__radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __abs__ __eq__ __ne__
__lt__ __gt__ __le__ __ge__ __and__ __or__ __xor__ __invert__ __iadd__ __isub__ __imul__ __itruediv__ float double
half bfloat16 contiguous clone detach zeros_like ones_like empty_like full_like real imag int long bool
""")
_IN_PLACE = words("""
add_ sub_ mul_ div_ neg_ exp_ sqrt_ clamp_ masked_fill_ relu_ sigmoid_ tanh_ silu_ requires_grad_ copy_ zero_ fill_
""")
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_FIRST = ["to", "type", "type_as", "data.__get__", "real.__get__", "imag.__get__", "cpu", "cuda", "detach_"]
_QUESTIONS = words("""
dim ndim.__get__ dtype.__get__ device.__get__ layout.__get__ requires_grad.__get__ is_leaf.__get__ grad_fn.__get__
is_cuda.__get__ is_cpu.__get__ is_meta.__get__ is_sparse.__get__ is_quantized.__get__ is_nested.__get__
is_mps.__get__ is_xpu.__get__ is_xla.__get__ itemsize.__get__ element_size is_floating_point is_complex
is_contiguous is_tensor get_device is_inference is_sparse_csr.__get__ new_zeros new_ones new_empty new_full
new_tensor _version.__get__ names.__get__ output_nr.__get__ __hash__ is_conj is_neg retain_grad can_cast result_type
__repr__ __format__
""")

RULES: dict[str, Rule] = {
    **dict.fromkeys([*_ELEMENTWISE, *_IN_PLACE], elementwise),
    **dict.fromkeys(DROPOUTS, dropout),
    **dict.fromkeys(_FIRST, of_first),
    **dict.fromkeys(_QUESTIONS, ask),
}
