"""The work of one operation of a step: FLOPs, and bytes from and to the memory of the device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class OperationWork(NamedTuple):
    """One operation; equal ones take the same time.

    Attributes:
        name: Of the operation, as torch has it.
        operands: Shape and dtype of each argument tensor.
        flops: Floating point operations of its forward.
        has_weight: Whether an operand is a parameter.
        num_bytes: Read and written in F.
        input_bytes: Read and written for its input gradients, in I.
        weight_bytes: Read and written for the gradient of the parameter, in W.
    """

    name: str
    operands: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    flops: int
    has_weight: bool
    num_bytes: int
    input_bytes: int
    weight_bytes: int

    def times(self, flops_per_byte: float) -> tuple[float, float, float]:
        """F, I and W, each the longer of computing and of moving, in FLOPs.

        That is the roofline model (Williams, Waterman and Patterson, "Roofline: an insightful visual performance model
        for multicore architectures", CACM 52(4), 2009).

        Args:
            flops_per_byte: FLOPs that the device computes in the time of moving a byte.
        """
        return (
            max(self.flops, flops_per_byte * self.num_bytes),
            max(self.flops if self.has_weight else 2 * self.flops, flops_per_byte * self.input_bytes),
            max(self.flops if self.has_weight else 0, flops_per_byte * self.weight_bytes),
        )
