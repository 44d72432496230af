"""Counts the FLOPs and bytes of an operation, from the shapes of its arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_pp.split._torch_private import overload_packet, running_autograd_function, schema_of, tree_leaves
from lightning_pp.split.record.sources import storage_of
from lightning_pp.split.record.work import OperationWork

_aten = torch.ops.aten


def _grouped_product_flops(first: Tensor, second: Tensor, *_: Any, **__: Any) -> int:
    """Of a product whose rows go to one of several matrices each, as in layers of experts."""
    rows = first[0] if first.ndim > second.ndim else first  # a column goes to one matrix of the first
    return 2 * rows.numel() * second.shape[-1]


# what torch's registry leaves out: the CPU's attention, whose operands are those of the GPU's, and grouped products
_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    _aten._grouped_mm: _grouped_product_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
}
# These read of their largest operand as many elements as they give, or as they have indices.
_PICKING = frozenset(
    {_aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten.nll_loss_forward, _aten.nll_loss2d_forward}
)
# Their input gradient is the output's, copied or cast at most.
_PASSING = frozenset(
    {_aten.add, _aten.sub, _aten.clone, _aten._to_copy, _aten.copy_, _aten.add_, _aten.cat, _aten.stack, _aten.sum}
)


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating point operations of one operation, which gave ``result``."""
    packet = overload_packet(func)
    formula = flop_registry.get(packet) or _MORE_FLOPS.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def work_of(
    func: Any, args: Any, kwargs: Any, result: Any, inputs: Sequence[Tensor], weight: Tensor | None
) -> OperationWork | None:
    """The work of one operation; None for a view.

    Bytes are those of its arguments and results, each once. In backward, as for most operations, autograd reads the
    output's gradient and the saved tensors, about as many bytes as the inputs, and writes the inputs' gradients. A
    product adds its weight's gradient in place. The gradient of a lookup in a table is a table of zeros with the rows
    that were picked, added to the parameter's gradient.

    ``weight`` is the one of its tensors ``inputs`` that is a parameter.
    """
    packet, flops = overload_packet(func), flops_of(func, args, kwargs, result)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    given = {storage_of(tensor) for tensor in inputs}
    if not flops and not schema_of(func).is_mutable and all(storage_of(output) in given for output in outputs):
        return None
    name = str(packet)
    written, read = sum(map(_bytes_of, outputs)), sum(map(_bytes_of, inputs))
    if packet in _PICKING and inputs:
        largest = max(map(_bytes_of, inputs))
        indices = read - largest
        read = indices + min(largest, max(written, indices))
        backward = largest + written
    else:
        if name.rpartition(".")[2].startswith(("empty", "new_")) or name.endswith("_like"):
            read, written = 0, written * ("empty" not in name)
        backward = written + read * (1 if packet in _PASSING else 2)
    if torch.is_grad_enabled():
        learns = any(tensor.requires_grad for tensor in inputs)
    else:  # in the forward of a function of the user's autograd looks away, and its backward does much the same again
        learns = running_autograd_function()
    input_bytes = backward if learns else 0
    weight_bytes = 0
    if weight is not None and learns and packet in _PICKING:
        # zeros, the rows, and the sum with what is there
        input_bytes, weight_bytes = (4 * _bytes_of(weight) + 2 * written, 0) if weight.requires_grad else (0, 0)
    elif weight is not None and flops:
        others = any(tensor.requires_grad for tensor in inputs if tensor is not weight)
        input_bytes = read + written if learns and others else 0
        weight_bytes = read + written + _bytes_of(weight) if learns and weight.requires_grad else 0
    operands = tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)
    return OperationWork(name, operands, flops, weight is not None, read + written, input_bytes, weight_bytes)


def _bytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor in memory: an expanded one has fewer than its shape says."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.itemsize
    size = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride or length == 0 else 1
    return size * tensor.itemsize
