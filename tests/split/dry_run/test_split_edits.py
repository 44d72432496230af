"""Code between units that edits what units return: fakes are as they were in the next microbatch."""

from __future__ import annotations

from typing import Any

import torch
from model_parts import WIDTH, Small, batches, next_token_loss
from one_process import compare
from torch import Tensor, nn


class TurnsInPlace(Small):
    """What units return is turned in place, and a parameter is added to it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.shapes: list[tuple[int, ...]] = []
        self.histories: list[int] = []

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for block in self.blocks:
            h = block(h).transpose_(0, 1)
            h += self.position
            self.shapes.append(tuple(h.shape))
            self.histories.append(length_of_history(h))
            h = h.transpose(0, 1).clone()
        return next_token_loss(self.head(h), batch)


def length_of_history(tensor: Tensor) -> int:
    node, length = tensor.grad_fn, 0
    while node is not None and length < 100:
        node = next((before for before, _ in node.next_functions if before is not None), None)
        length += 1
    return length


def test_fakes_are_as_they_were_in_the_next_microbatch() -> None:
    given = batches(2, 2, 2, 2)
    pipeline, _ = compare(TurnsInPlace, given, 3, split_points=["blocks.1", "blocks.3"])
    for stage, num_blocks in zip(pipeline.stages, (0, 2, 4), strict=True):
        module: Any = stage.module
        assert module.shapes == [(given[0].shape[1], 2, WIDTH)] * num_blocks * len(given)
        assert module.histories == module.histories[:num_blocks] * len(given)
