"""Objects of the user's that go from unit to unit and hold the tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pipelined_fit import fit
from pool import WorkerPool
from small_models import Descends
from torch import Tensor, nn


class State:
    def __init__(self, h: Tensor) -> None:
        self.h = h


class Block(nn.Module):
    """Returns the object that it was given, with another tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, state: State) -> State:
        state.h = torch.tanh(self.linear(state.h))
        return state


class PassesAnObject(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state = State(batch[0])
        for block in self.blocks:
            state = block(state)
        return F.mse_loss(state.h.mean(1), batch[1])


def train() -> None:
    fit(PassesAnObject())


def test_the_size_of_a_tensor_in_an_object_is_not_said_to_be_that_of_the_inputs(pool: WorkerPool) -> None:
    told = pool.refusals(None, train, world_size=2, timeout=60)
    for message in told:
        assert "By the sizes of the unit's inputs it should have (2, 8)" in message, message
        assert "Return it from the unit." in message and "on inputs of the same shapes" not in message
