"""The deferred weight gradients of one stage and microbatch, between I and W.

The autograd functions of :mod:`lightning_pp.runtime.split_backward.functions` put one entry per operation into the
queue that is being collected; :meth:`WeightGradientQueue.run` works them off. An entry holds what the gradient is made
of and nothing of the graph.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_pp.runtime._torch_private import view_base
from lightning_pp.runtime.split_backward.wide_products import add_wide_product, multiplies_into, wide_product
from lightning_pp.tensor.aside import BESIDE

GradientOf = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
# (the weight, the two factors of its gradient, how to compute it from all of these, what else that needs)
Entry = tuple[Tensor, Tensor, Tensor, GradientOf | None, Any]


@runtime_checkable
class DelaysWeightGradient(Protocol):
    """A module that defers its own weight gradients (Transformer Engine's ``delay_wgrad_compute``)."""

    def backward_dw(self) -> None:
        """Computes the oldest weight gradient kept back and adds it to the parameters' ``.grad``."""


class WeightGradientQueue:
    """The weight gradients that one (stage, microbatch) deferred in its I, in the order of the backward.

    Life cycle: collect (around the backward of I) any number of times, then :meth:`run` or :meth:`clear`, after which
    the queue can serve another microbatch.

    Attributes:
        watched: While it is a set, every W of the process adds the shapes of the parameters that it is for.
        is_for_w: Whether a W follows. If not (a B), :meth:`run_some` keeps no more than the next call can use.
    """

    watched: ClassVar[set[torch.Size] | None] = None
    __slots__ = ("_entries", "_is_owing", "_modules", "_num_collecting", "is_for_w")

    def __init__(self) -> None:
        self.is_for_w = True
        self._entries: list[Entry] = []
        self._modules: list[DelaysWeightGradient] = []
        self._num_collecting = 0
        self._is_owing = False

    def __len__(self) -> int:
        """How many operations and modules are queued."""
        return len(self._entries) + len(self._modules)

    @property
    def held_bytes(self) -> int:
        """Bytes of the storages that the queue keeps alive; what several entries share is counted once."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for _, left, right, _, _ in self._entries
            for storage in (left.untyped_storage(), right.untyped_storage())
        }
        return sum(storages.values())

    def defer_module(self, module: nn.Module) -> None:
        """Has :meth:`run` call ``module.backward_dw()``, once however often the module is given.

        Args:
            module: One that ran in this microbatch and keeps its own weight gradients back.

        Raises:
            TypeError: It has no ``backward_dw()``.
        """
        if not callable(getattr(module, "backward_dw", None)):  # isinstance takes the protocol apart each time
            raise TypeError(
                f"{type(module).__name__} has no backward_dw(), so it computes its weight gradients in its backward: "
                "defer only what delayed_weight_gradient_modules() finds"
            )
        delaying = cast(DelaysWeightGradient, module)
        if not any(queued is delaying for queued in self._modules):
            self._modules.append(delaying)
        self._is_owing = True

    def parameters(self) -> set[Parameter]:
        """The parameters whose gradients :meth:`run` will add to."""
        modules = [module for module in self._modules if isinstance(module, nn.Module)]
        found = {_parameter_of(weight) for weight, *_ in self._entries}
        return found.union(*(module.parameters() for module in modules))

    def run(self, on_complete: Callable[[Parameter], None] | None = None) -> None:
        """W: computes every queued weight gradient, adds it to its parameter's ``.grad``, and frees what was held.

        From the second microbatch on, a product is added in place (``addmm_``), without a temporary of the weight's
        size, where the gradient has the dtype of the computation. Convolutions always make one, for no kernel adds in
        place.

        Args:
            on_complete: Called with each of :meth:`parameters` when its last queued gradient has been added.

        Raises:
            RuntimeError: There is nothing to run: the I was not collected, or W has run already; or I is still running.
        """
        if self._num_collecting:
            raise RuntimeError(
                "run() inside collect_weight_gradients(): W can only run after the backward of its I has ended"
            )
        if not self._is_owing:
            raise RuntimeError(
                "no weight gradients to run: each W runs once, after its I, and this queue has collected no backward "
                "since it was made, run or cleared (a backward that raises clears it)"
            )
        if (watched := WeightGradientQueue.watched) is not None:
            watched.update(parameter.shape for parameter in self.parameters())
        entries, modules = self._entries, self._modules
        self.clear()
        if on_complete is None and entries:
            _add_all(entries)
        elif on_complete is not None:
            _add_all_and_report(entries, modules, on_complete)
        for module in modules:
            module.backward_dw()
            if on_complete is not None and isinstance(module, nn.Module):
                for parameter in module.parameters():
                    on_complete(parameter)

    def run_some(self, flops: float) -> None:
        """Computes the first of what is queued, about ``flops`` of it, while tensor ranks communicate in I."""
        costs = [  # a convolution's options are a tuple, and each number of its output takes a whole filter
            2.0 * left.numel() * (math.prod(weight.shape[1:]) if isinstance(extra, tuple) else weight.shape[-1])
            for weight, left, _, _, extra in self._entries
        ]
        middles = [end - cost / 2 for end, cost in zip(accumulate(costs), costs, strict=True)]
        number = bisect(middles, flops if self.is_for_w else max(flops, sum(costs) - flops))
        some, self._entries = self._entries[:number], self._entries[number:]
        if some:
            if (watched := WeightGradientQueue.watched) is not None:
                watched.update(_parameter_of(weight).shape for weight, *_ in some)
            _add_all(some)

    def clear(self) -> None:
        """Drops what is queued without computing it, for a microbatch whose step has failed."""
        self._entries = []
        self._modules = []
        self._is_owing = False

    def append(
        self, weight: Tensor, left: Tensor, right: Tensor, gradient_of: GradientOf | None = None, extra: Any = None
    ) -> None:
        """Queues the gradient of ``weight``, which is computed without gradients recorded.

        Args:
            weight: A Parameter or a view of one.
            left: A factor of the gradient, cut off the graph.
            right: The other factor, cut off the graph.
            gradient_of: ``gradient_of(weight, left, right, extra)`` is the gradient; None: it is ``leftᵀ @ right``, as
                :func:`add_product` adds it.
            extra: What else the operation needs.
        """
        self._entries.append((weight, left, right, gradient_of, extra))


class _Collector:
    """The queue that backward fills now.

    One for the process and not one for a thread: autograd runs the backward of each accelerator in a thread of its own.
    """

    __slots__ = ("queue", "thread_id")

    def __init__(self) -> None:
        self.queue: WeightGradientQueue | None = None
        self.thread_id = 0


COLLECTOR = _Collector()


class _Collecting:
    """A class, because a generator would cost more than the work itself."""

    __slots__ = ("_beside", "_previous", "_queue")

    def __init__(self, queue: WeightGradientQueue) -> None:
        self._queue = queue

    def __enter__(self) -> None:
        queue, thread_id = self._queue, threading.get_ident()
        self._previous = COLLECTOR.queue
        if self._previous is not None and COLLECTOR.thread_id != thread_id:
            raise RuntimeError(
                "another thread is collecting weight gradients: a process runs one split backward at a time"
            )
        COLLECTOR.thread_id = thread_id
        COLLECTOR.queue = queue
        self._beside, BESIDE.run = BESIDE.run, queue.run_some
        queue._num_collecting += 1
        queue._is_owing = True

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            self._queue.clear()
        self._queue._num_collecting -= 1
        COLLECTOR.queue, BESIDE.run = self._previous, self._beside


def collect_weight_gradients(queue: WeightGradientQueue) -> AbstractContextManager[None]:
    """Sends the weight gradients of the backward inside to ``queue`` instead of computing them; goes around I.

    The backward must be an ordinary one that accumulates into ``.grad`` (``torch.autograd.backward``). Gradients that
    ``torch.autograd.grad`` asks for are computed at once, also where a function calls it in its own backward. If the
    backward raises, the queue is cleared and the previous state restored.

    What is queued must keep its values until W: no buffer that it lives in, such as one received into, may be used
    again before then.

    Args:
        queue: Where they go. May hold some already: one microbatch may need several backward calls.

    Raises:
        RuntimeError: Another thread is collecting.
    """
    return _Collecting(queue)


def delayed_weight_gradient_modules(root: nn.Module) -> list[nn.Module]:
    """The outermost modules of ``root`` that keep their own weight gradients back, in the order of ``root.modules()``.

    A module with ``need_backward_dw()`` is asked; one without counts if it has ``backward_dw()``. Modules inside one
    that counts are left out, since it calls theirs. Such a module keeps them back in B too: call its ``backward_dw()``
    right after that backward.
    """
    if isinstance(root, DelaysWeightGradient) and getattr(root, "need_backward_dw", lambda: True)():
        return [root]
    return [module for child in root.children() for module in delayed_weight_gradient_modules(child)]


def _add_all(entries: list[Entry]) -> None:
    """Adds every entry's gradient, first to last, and empties the list on the way, so that each is freed once added."""
    entries.reverse()
    device_type = entries[0][0].device.type
    # What is queued already has the dtype to compute in; autocast would round it once more.
    has_autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    with torch.no_grad(), torch.autocast(device_type, enabled=False) if has_autocast else nullcontext():
        while entries:
            weight, left, right, gradient_of, extra = entries.pop()
            if gradient_of is None:
                add_product(weight, left, right)
            else:
                add_to_gradient(weight, gradient_of(weight, left, right, extra))


def _add_all_and_report(
    entries: list[Entry], modules: Iterable[DelaysWeightGradient], on_complete: Callable[[Parameter], None]
) -> None:
    """As :func:`_add_all`, in parts that end where a parameter's last gradient has been added."""
    last: dict[Parameter, int] = {_parameter_of(entry[0]): index for index, entry in enumerate(entries)}
    for module in modules:
        if isinstance(module, nn.Module):
            for parameter in module.parameters():
                last.pop(parameter, None)
    part: list[Entry] = []
    complete_after = {index: parameter for parameter, index in last.items()}
    entries.reverse()
    for index in range(len(entries)):
        part.append(entries.pop())
        if index in complete_after or not entries:
            _add_all(part)
            if index in complete_after:
                on_complete(complete_after[index])


def _parameter_of(weight: Tensor) -> Parameter:
    """The Parameter that ``weight`` is or is a view of."""
    parameter = weight if type(weight) is Parameter else view_base(weight)
    assert isinstance(parameter, Parameter)
    return parameter


def add_product(weight: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds ``leftᵀ @ right`` to the gradient of ``weight``.

    Args:
        weight: ``[M, N]``, or ``[B, M, N]`` for a batch of weights.
        left: ``[..., M]`` (``[B, K, M]``).
        right: ``[..., N]`` (``[B, K, N]``), with the leading sizes and the dtype of ``left``. Where the gradient has
            a wider dtype and the device can, the product is added in that dtype, and never rounded to theirs.
    """
    if weight.dim() == 2:
        left = left if left.dim() == 2 else left.flatten(0, -2)
        right = right if right.dim() == 2 else right.flatten(0, -2)
    gradient = weight.grad if type(weight) is Parameter else _gradient_part(weight)
    wide = weight.grad_dtype if gradient is None else gradient.dtype
    if gradient is not None and gradient.layout is not torch.strided:
        gradient = wide = None  # it cannot be added to in place
    if wide is not None and wide is not left.dtype:
        if multiplies_into(wide, left.dtype, left.device, weight.dim()):
            if gradient is None:
                add_to_gradient(weight, wide_product(left, right, wide))
            else:
                add_wide_product(gradient, left, right)
            return
        gradient = None
    if gradient is None:
        add_to_gradient(weight, torch.bmm(left.mT, right) if weight.dim() == 3 else torch.mm(left.t(), right))
    elif weight.dim() == 3:
        gradient.baddbmm_(left.mT, right)
    else:
        gradient.addmm_(left.t(), right)


def add_to_gradient(weight: Tensor, gradient: Tensor) -> None:
    """Adds ``gradient`` to the ``.grad`` of the Parameter that ``weight`` is or is a view of, as autograd would.

    A first gradient gets the parameter's strides and its ``grad_dtype``; a later one is added in the dtype that
    ``.grad`` has.

    Args:
        weight: A Parameter or a view of one.
        gradient: The shape of ``weight``, any floating dtype.
    """
    if type(weight) is not Parameter:
        _gradient_part(weight).add_(gradient)
    elif weight.grad is None:
        gradient_dtype = weight.grad_dtype or gradient.dtype
        if gradient.dtype is not gradient_dtype or gradient.stride() != weight.stride():
            gradient = torch.empty_like(weight, dtype=gradient_dtype).copy_(gradient)
        weight.grad = gradient
    elif weight.grad.layout is not torch.strided:  # an embedding with sparse gradients is tied to this weight
        weight.grad = gradient.add_(weight.grad)
    else:
        weight.grad.add_(gradient)


def _gradient_part(view: Tensor) -> Tensor:
    """The part of a Parameter's ``.grad`` that belongs to ``view``, a view of the Parameter, as an alias of it."""
    parameter = view_base(view)
    assert parameter is not None
    gradient = parameter.grad
    if gradient is None:
        gradient = parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    elif gradient.layout is not torch.strided:
        gradient = parameter.grad = gradient.to_dense()
    if gradient.stride() != parameter.stride():  # the view's strides count in the parameter's
        gradient = parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    offset = gradient.storage_offset() + view.storage_offset() - parameter.storage_offset()
    return gradient.as_strided(view.size(), view.stride(), offset)
