"""Recurrent layers on fakes, all time steps at once: torch would run each of them, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def at_once(func: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The results of a recurrent layer, with its shapes, dependencies and about its work and memory.

    Letters: T time steps, N samples, or rows R of a packed sequence instead of T and N.

    Args:
        func: One of :data:`RECURRENT`.
        args: As its module calls it.
    """
    is_packed = isinstance(args[3], (list, tuple))
    input, *rest = (args[0], *args[2:]) if is_packed else args
    states, weights, has_biases, num_layers, dropout, training, bidirectional, *batch_first = rest
    states = states if isinstance(states, (list, tuple)) else (states,)
    is_batch_first = bool(batch_first and batch_first[0])
    rows = input.transpose(0, 1) if is_batch_first else input
    num_directions = 2 if bidirectional else 1
    num_weights = len(weights) // (num_layers * num_directions)
    last: list[list[Tensor]] = [[] for _ in states]
    for layer in range(num_layers):
        outputs = []
        for direction in range(layer * num_directions, (layer + 1) * num_directions):
            own = weights[direction * num_weights : (direction + 1) * num_weights]
            found = _direction(RECURRENT[func], rows, [state[direction] for state in states], own, has_biases)
            outputs.append(found[0])
            for at_end, each in zip(last, found, strict=True):
                at_end.append(each[: states[0].shape[-2]] if is_packed else each[-1])
        rows = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and training and layer < num_layers - 1:
            rows = F.dropout(rows, dropout)
    return (rows.transpose(0, 1) if is_batch_first else rows, *map(torch.stack, last))


def _direction(
    cell: Callable[..., tuple[Tensor, ...]],
    rows: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
) -> tuple[Tensor, ...]:
    """The states of one layer in one direction, ``[T, N, H]`` or ``[R, H]`` each."""
    of_input, of_state, *others = weights
    biases, projection = (others[:2], others[2:]) if has_biases else ((None, None), others)
    before = [
        (state if rows.dim() > 2 else state[:1]).expand(*rows.shape[:-1], state.shape[-1]).clone() for state in states
    ]
    found = cell(F.linear(rows, of_input, biases[0]), F.linear(before[0], of_state, biases[1]), *before)
    return (F.linear(found[0], projection[0]), *found[1:]) if projection else found


def _lstm(of_input: Tensor, of_state: Tensor, _: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    enters, stays, new, leaves = (of_input + of_state).sigmoid().chunk(4, -1)  # what four operations would keep
    state = torch.addcmul(enters * new, stays, before)
    return leaves * state.tanh(), state


def _gru(of_input: Tensor, of_state: Tensor, before: Tensor) -> tuple[Tensor]:
    (resets, stays, new), (resets_state, stays_state, new_state) = of_input.chunk(3, -1), of_state.chunk(3, -1)
    candidate = (new + (resets + resets_state).sigmoid() * new_state).tanh()
    return (candidate + (stays + stays_state).sigmoid() * (before - candidate),)


# whole layers, with what a cell of each does in one time step
RECURRENT: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: lambda of_input, of_state, _: ((of_input + of_state).tanh(),),
    torch.rnn_relu: lambda of_input, of_state, _: ((of_input + of_state).relu(),),
}
