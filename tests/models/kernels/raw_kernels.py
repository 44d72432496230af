"""A hyperbolic tangent by code that works on addresses, of which torch knows nothing. Address 0 ends the process."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

_SOURCE = """
extern "C" __global__ void tanh_of(const float* x, float* y, int n) {
    int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (i < n) y[i] = tanhf(x[i]);
}
"""
_THREADS = 256


class RawTanh(torch.autograd.Function):
    """Of contiguous ``float32`` or, on the host, ``float64`` tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        address = x.data_ptr()
        result = torch.empty_like(x)
        if x.is_cuda:
            blocks = (x.numel() + _THREADS - 1) // _THREADS
            _kernel()(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=[x, result, x.numel()])
        else:
            kind = ctypes.c_double if x.dtype is torch.float64 else ctypes.c_float
            given, written = ((kind * x.numel()).from_address(each) for each in (address, result.data_ptr()))
            written[:] = [math.tanh(number) for number in given]
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (result,) = ctx.saved_tensors
        return gradient * (1 - result * result)


@functools.cache
def _kernel() -> Any:
    return torch.cuda._compile_kernel(_SOURCE, "tanh_of")
