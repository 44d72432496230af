"""Products of 16-bit matrices that are added to a 32-bit gradient without being rounded to 16 bits in between.

Matrix units multiply bfloat16 and float16 and add up in float32; only what they write is rounded. Where torch can have
them write float32 (``out_dtype``, on CUDA devices), a weight gradient costs one pass less over the weight's memory.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from torch import Tensor


@cache
def multiplies_into(wide: torch.dtype, narrow: torch.dtype, device: torch.device, num_dims: int = 2) -> bool:
    """Whether ``device`` adds a product of ``narrow`` matrices (with 3 dimensions: of batches) to a ``wide`` one.

    Tried once, on small ones.
    """
    if device.type == "meta":
        return False
    # (1 + 2⁻⁷)² takes 15 bits, more than both 16-bit dtypes have; on a diagonal every sum is exact
    shape = (2, 16, 16)[-num_dims:]
    matrices = (torch.eye(16, device=device) * (1 + 2**-7)).to(narrow).expand(shape).contiguous()
    sums = torch.zeros(shape, device=device, dtype=wide)
    try:
        add_wide_product(sums, matrices, matrices)
        sums += wide_product(matrices, matrices, wide)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    twice = torch.eye(16, dtype=torch.float64) * 2 * (1 + 2**-7) ** 2
    return torch.equal(sums.cpu().double(), twice.expand(shape))


def try_products(device: torch.device) -> None:
    """Calls :func:`multiplies_into` before the first step, in which no code should wait for the device."""
    for narrow, num_dims in product((torch.bfloat16, torch.float16), (2, 3)):
        multiplies_into(torch.float32, narrow, device, num_dims)


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``leftᵀ @ right`` in ``dtype``; the arguments are those of :func:`add_wide_product`."""
    if left.dim() == 3:
        return torch.bmm(left.mT, right, out_dtype=dtype)
    return torch.mm(left.t(), right, out_dtype=dtype)


def add_wide_product(gradient: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds ``leftᵀ @ right`` to ``gradient`` in the gradient's dtype.

    Args:
        gradient: ``[M, N]`` or ``[B, M, N]``.
        left: ``[K, M]`` or ``[B, K, M]``, of a dtype that :func:`multiplies_into` was asked about.
        right: ``[K, N]`` or ``[B, K, N]``, of the same dtype.
    """
    if left.dim() == 3:
        torch.baddbmm(gradient, left.mT, right, out_dtype=gradient.dtype, out=gradient)
    else:
        torch.addmm(gradient, left.t(), right, out_dtype=gradient.dtype, out=gradient)
