"""Sums of many microbatches in a wider dtype than the parameters have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class WideGradients:
    """Gradients of plain parameters that accumulate in ``dtype``, and have the parameters' own dtype at the update.

    In bfloat16 a sum of many microbatches loses what is smaller than a 256th of it. Sharded parameters accumulate in
    the dtype of their reduction anyway.

    Args:
        parameters: Plain parameters; those of ``dtype`` already, and integers, are left alone.
        dtype: Of the sums.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.parameters = tuple(p for p in parameters if p.is_floating_point() and p.dtype.itemsize < dtype.itemsize)

    @torch.no_grad()
    def begin(self) -> None:
        """Before a batch."""
        for parameter in self.parameters:
            if parameter.grad_dtype == self._dtype:
                continue
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = self._dtype
            if gradient is not None:
                parameter.grad = gradient.to(self._dtype)

    @torch.no_grad()
    def end(self) -> None:
        """After the reduction, or after a step that failed."""
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            if gradient is not None:
                parameter.grad = gradient.to(parameter.dtype)
