"""Split backward without keeping the graph: weight gradients are deferred at the operation.

::

    queue = WeightGradientQueue()
    with weight_gradients_deferrable():  # around F and I of microbatches whose backward is split
        output = stage(input)  # F
        with collect_weight_gradients(queue):
            torch.autograd.backward(output, grad_output)  # I: gradients of inputs, biases, norms, embeddings
    queue.run()  # W: everything else, into the parameters' .grad

Inside :func:`weight_gradients_deferrable` the linear operations with a Parameter as weight (``F.linear``; ``matmul``,
``@``, ``mm``, ``bmm``, ``addmm`` and ``grouped_mm`` with the weight on the right; ``conv1d`` to ``conv3d`` and their
transposes; torchao's float8 linears) run as autograd functions whose backward can queue ``(weight, input,
grad_output)`` instead of multiplying them. A view of a Parameter, such as ``weight.t()`` or a chunk, counts as one.
Autograd runs one ordinary backward and frees the graph, so what may run backward only once may, checkpointed blocks
re-run once, and what is held until W is inputs and output gradients of linear operations.

Units that this package compiles do the same by inputs of the compiled code (:mod:`.compiled`).

Whatever cannot be deferred gets its whole gradient in I: regions that the user has compiled, functions not in the
table, functorch transforms, tensor subclasses, weights with gradient hooks. Modules that keep their own weight
gradients back are found by :func:`delayed_weight_gradient_modules` and handed to
:meth:`WeightGradientQueue.defer_module`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from lightning_pp.runtime.split_backward.queue import (
    WeightGradientQueue,
    collect_weight_gradients,
    delayed_weight_gradient_modules,
)
from lightning_pp.runtime.split_backward.replacements import INSTALLATION

__all__ = [
    "WeightGradientQueue",
    "collect_weight_gradients",
    "delayed_weight_gradient_modules",
    "weight_gradients_deferrable",
    "weight_gradients_deferrable_if",
    "weight_gradients_may_wait",
    "weight_gradients_not_deferrable",
]


class _Scope:
    """A class: a generator would cost more than the work itself. Without state, so one instance serves all."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *_: object) -> None:
        self._leave()


_DEFERRABLE = _Scope(INSTALLATION.enter, INSTALLATION.leave)
_NOT_DEFERRABLE = _Scope(INSTALLATION.pause, INSTALLATION.resume)


def weight_gradients_deferrable() -> AbstractContextManager[None]:
    """Makes linear operations run so that their weight gradients can be deferred. Goes around F and I.

    It has to be active in I as well as in F, for checkpointed blocks run again there. A backward inside it, but outside
    of :func:`collect_weight_gradients`, computes weight gradients at once (B): with the results of plain autograd, at
    the price of one call to Python per linear operation. A microbatch known in F to get a B is better run inside
    :func:`weight_gradients_not_deferrable`.

    Works on the process, not on the thread, for autograd has threads of its own; may be nested; puts back what it found
    when the outermost is left. Entering and leaving the outermost cost some ten microseconds, the inner ones hardly
    anything: let one scope go around a whole step.
    """
    return _DEFERRABLE


def weight_gradients_may_wait() -> bool:
    """Whether a linear operation that is run here has a weight gradient that can be deferred."""
    return INSTALLATION.num_scopes > 0 and not INSTALLATION.num_pauses and torch.is_grad_enabled()


def weight_gradients_not_deferrable() -> AbstractContextManager[None]:
    """Makes linear operations run as outside of :func:`weight_gradients_deferrable`, though it is within it."""
    return _NOT_DEFERRABLE


def weight_gradients_deferrable_if(is_split: bool) -> AbstractContextManager[None] | None:
    """What goes around F and the backward of a microbatch with I and W, or with B; None where nothing has to."""
    if (INSTALLATION.num_scopes > 0) == is_split:
        return None
    return _DEFERRABLE if is_split else _NOT_DEFERRABLE
