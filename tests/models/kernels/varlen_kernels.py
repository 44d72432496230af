"""CPU kernels of what ``torch.nn.attention.varlen`` calls, which torch has for GPUs only, in plain operations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def _by_document(starts: Tensor, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """The tokens of each document, of shape (heads, tokens, width)."""
    for start, end in itertools.pairwise(starts.tolist()):
        yield [each[start:end].transpose(0, 1) for each in tensors]


def _probabilities(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    return (
        scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if causal else scores
    ).softmax(-1)


class VarlenKernels:
    """Kernels with the arguments of torch's own; calls of the second are counted."""

    def __init__(self) -> None:
        self.num_backward = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *rest: Any, scale: float | None = None, **_: Any
    ) -> tuple[Tensor, ...]:
        causal, nothing = rest[4], q.new_empty(0)
        output = torch.cat(
            [
                (_probabilities(mine, theirs, causal, scale or q.shape[-1] ** -0.5) @ values).transpose(0, 1)
                for mine, theirs, values in _by_document(starts, q, k, v)
            ]
        )
        return output, q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32), nothing, nothing, nothing

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float | None = None, **_: Any
    ) -> tuple[Tensor, ...]:
        self.num_backward += 1
        starts, causal, scale = rest[2], rest[7], scale or q.shape[-1] ** -0.5
        parts: list[list[Tensor]] = []
        for given, mine, theirs, values in _by_document(starts, gradient, q, k, v):
            shares = _probabilities(mine, theirs, causal, scale)
            of_shares = given @ values.mT
            of_scores = shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True)) * scale
            parts.append([of_scores @ theirs, of_scores.mT @ mine, shares.mT @ given])
        return tuple(torch.cat([each.transpose(0, 1) for each in of_one]) for of_one in zip(*parts, strict=True))


@contextmanager
def varlen_on_cpus() -> Iterator[VarlenKernels]:
    """``varlen_attn`` runs on CPUs inside, with torch's own operations and formula of autograd around the kernels."""
    kernels = VarlenKernels()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", kernels.forward, "CPU")
    library.impl("_flash_attention_backward", kernels.backward, "CPU")
    try:
        yield kernels
    finally:
        del library  # takes the kernels back
