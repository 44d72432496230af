"""The end of a step on the whole batch: joins values of microbatches, runs the tail once, splits its gradients.

On the rank of the last stage, with :mod:`lightning_pp.split.record.whole_batch`'s plan::

    F of each microbatch: the user's step up to the last unit; keep what the tail needs
    after the last of them: join what was kept; run the user's step once on the whole batch, units standing in
        one backward of the loss: gradients of the joined values, and of parameters that the tail uses itself
    I or B of each microbatch: starts from its part of these gradients
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.errors import SplitError
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.runtime.stage import CallWatch, StageRunner
from lightning_pp.runtime.stage_forward import InFlight
from lightning_pp.split.data.tree import leaves_of
from lightning_pp.split.fakes.parameters import has_data
from lightning_pp.split.record.step_record import Value
from lightning_pp.split.record.whole_batch import Join, RowOrders, WholeBatchPlan, batch_only_places, find_join
from lightning_pp.split.unit_calls.interception import CallHandler

_TOLERANCE = 1e-2


@dataclass(frozen=True)
class WholeBatch:
    """The work of the tail in one step.

    Attributes:
        plan: What is kept and how it is joined.
        run_step: Runs the user's step on the whole batch.
        loss_weight: What its loss is multiplied by before backward.
    """

    plan: WholeBatchPlan
    run_step: Callable[[], Any]
    loss_weight: float


class TailRun:
    """The tail of one batch, on the last stage.

    Args:
        whole: The work.
        loss_of: Finds the loss in what the step returned; None for a step without backward.
        randomness: Seeds for random numbers that the tail draws.
    """

    def __init__(
        self, whole: WholeBatch, loss_of: Callable[[Any], Tensor | None] | None, randomness: StepRandomness
    ) -> None:
        self._whole = whole
        self._loss_of = loss_of
        self._randomness = randomness
        self._kept: list[dict[Value, Tensor] | None] = [None] * len(whole.plan.parts)
        self._gradients: list[list[tuple[Value, Tensor]]] = []
        plan = whole.plan
        self._rows = None if plan.orders.is_seen or len(plan.parts) == 1 or plan.draws_early else _RowWatch(plan)

    def watch(self, microbatch: int) -> CallWatch | None:
        """Sees what the units of that microbatch are called with, in the first batch."""
        return None if self._rows is None else self._rows.of_microbatch(microbatch)

    def add(self, microbatch: int, in_flight: InFlight) -> bool:
        """Takes what a microbatch's forward has kept; returns whether that was the last of them."""
        self._kept[microbatch] = dict(in_flight.outputs)
        in_flight.outputs.clear()
        return all(kept is not None for kept in self._kept)

    def run(self, runner: StageRunner) -> Any:
        """Runs the tail and its backward; returns what the step returned.

        Raises:
            SplitError: Rows cannot be joined in the order that they have in the whole batch.
        """
        plan, rows = self._whole.plan, self._rows
        in_flight, output = runner.forward(
            plan.tail,
            self._whole.run_step,
            self._joined,
            self._randomness,
            with_gradients=self._loss_of is not None,
            watch=None if rows is None else rows.of_whole_batch(),
        )
        plan.orders.is_seen = True
        if self._loss_of is not None:
            in_flight.loss = self._loss_of(output)
            gradients = runner.backward(plan.tail, in_flight, (), self._whole.loss_weight, split=False)
            in_flight.end_backward()
            if in_flight.queue:  # of late units that keep their weight gradients back
                in_flight.run_weight_gradients()
            self._gradients = [[] for _ in plan.parts]
            for value, gradient in gradients.items():
                for found, part in zip(self._gradients, self._split(value, gradient), strict=True):
                    found.append((value, part))
        return output

    def gradients_of(self, microbatch: int) -> list[tuple[Value, Tensor]]:
        """The gradients of what the microbatch has kept."""
        gradients, self._gradients[microbatch] = self._gradients[microbatch], []
        return gradients

    def _joined(self) -> list[tuple[Value, Tensor]]:
        """What the tail gets in the place of units' outputs; what was kept is let go."""
        if self._rows is not None:  # the calls before the first that takes a joined value have been seen by now
            self._rows.note_orders()
        parts = [kept for kept in self._kept if kept is not None]
        record, orders = self._whole.plan.tail.record, self._whole.plan.orders
        joined = []
        for value, join in sorted(self._whole.plan.joins.items()):
            if join.rows_per_sample > 1 and join.rows_per_sample not in orders.by_sample:
                call = record.calls[value.call]
                raise SplitError(
                    f"The unit {call.unit!r} ({call.line}) returns {join.rows_per_sample} rows for each sample, and "
                    "the code after the last unit needs them for the whole batch. The inputs of the units do not show "
                    "whether the rows of one sample are neighbours. Keep a dimension for the samples alone: return "
                    "[samples, rows, ...] from the unit and reshape after the last unit."
                )
            tensors = [part.pop(value).detach() for part in parts]
            if join.dim is None:
                tensor = tensors[0]
            else:
                tensor = joined_rows(tensors, join, self._whole.plan.num_samples, orders)
            joined.append((value, tensor))
        return joined

    def _split(self, value: Value, tensor: Tensor) -> Sequence[Tensor]:
        plan = self._whole.plan
        join = plan.joins[value]
        return [tensor] if join.dim is None else split_rows(tensor, join, plan.num_samples, plan.orders)


def joined_rows(parts: Sequence[Tensor], join: Join, num_samples: Sequence[int], orders: RowOrders) -> Tensor:
    """The parts of all microbatches as one tensor, with memory of its own."""
    dim = join.dim
    assert dim is not None
    if join.rows_per_sample == 1 or orders.by_sample[join.rows_per_sample]:
        return torch.cat(list(parts), dim)
    rows = join.rows_per_sample
    blocks = [_opened(part, dim, rows, number) for part, number in zip(parts, num_samples, strict=True)]
    return torch.cat(blocks, dim + 1).flatten(dim, dim + 1)


def split_rows(tensor: Tensor, join: Join, num_samples: Sequence[int], orders: RowOrders) -> list[Tensor]:
    """The part of each microbatch in ``tensor``, where :func:`joined_rows` puts it."""
    dim, rows = join.dim, join.rows_per_sample
    assert dim is not None
    if rows == 1 or orders.by_sample[rows]:
        return list(torch.split(tensor, [rows * number for number in num_samples], dim))
    blocks = torch.split(_opened(tensor, dim, rows, sum(num_samples)), list(num_samples), dim + 1)
    return [block.flatten(dim, dim + 1) for block in blocks]


def _opened(tensor: Tensor, dim: int, rows: int, num_samples: int) -> Tensor:
    return tensor.reshape(*tensor.shape[:dim], rows, num_samples, *tensor.shape[dim + 1 :])


class _RowWatch:
    """Compares the inputs that units get from the batch alone, in microbatches and in the whole batch.

    This shows the order of rows if there are several for each sample, and finds code before the tail that works across
    samples (a sort, a mean over the batch): its results for a microbatch are not a part of those for the batch.

    Args:
        plan: The batch's.
    """

    def __init__(self, plan: WholeBatchPlan) -> None:
        self._plan = plan
        self._given: dict[tuple[int, int], dict[int, Tensor]] = {}  # call and place, then microbatch
        self._by_sample: dict[int, set[bool]] = {}
        self._calls = plan.tail.record.calls[: plan.first_late]

    def of_microbatch(self, microbatch: int) -> CallWatch:
        """Sees the calls of a microbatch."""
        return self._watching(lambda place, tensor: self._given.setdefault(place, {}).update({microbatch: tensor}))

    def of_whole_batch(self) -> CallWatch:
        """Sees the calls of the run on the whole batch."""
        return self._watching(self._compare)

    def note_orders(self) -> None:
        """Notes the orders that all inputs agree on."""
        for rows, found in self._by_sample.items():
            if len(found) == 1:
                self._plan.orders.by_sample[rows] = next(iter(found))

    def _watching(self, note: Callable[[tuple[int, int], Tensor], None]) -> CallWatch:
        def watch(handler: CallHandler) -> CallHandler:
            index = 0

            def on_call(unit: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                nonlocal index
                if index < len(self._calls):
                    leaves = leaves_of((args, kwargs))
                    for place in batch_only_places(self._calls[index]):
                        leaf = leaves[place] if place < len(leaves) else None
                        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and has_data(leaf):
                            note((index, place), leaf.detach())
                index += 1
                return handler(unit, original, args, kwargs)

            return on_call

        return watch

    def _compare(self, place: tuple[int, int], tensor: Tensor) -> None:
        given: Mapping[int, Tensor] = self._given.pop(place, {})
        numbers = self._plan.num_samples
        if len(given) < len(numbers):
            return
        parts = [given[index] for index in range(len(numbers))]
        join = find_join([tuple(part.shape) for part in parts], tuple(tensor.shape), numbers)
        if join is None:
            return
        rows = join.rows_per_sample
        orders = [True] if rows == 1 else [True, False]
        fitting = [
            order
            for order in orders
            if _are_close(joined_rows(parts, join, numbers, RowOrders(by_sample={rows: order})), tensor)
        ]
        if not fitting:
            call = self._calls[place[0]]
            raise SplitError(
                f"An argument of shape {tuple(tensor.shape)} of the unit {call.unit!r} ({call.line}) has other values "
                f"for the whole batch than for its {len(numbers)} microbatches. Code before the unit works across "
                "samples, as a sort or a mean over the batch does. With whole_batch_loss=True only the code after the "
                "last unit sees the whole batch. Move the code there, or into the dataloader."
            )
        if len(orders) > len(fitting) == 1:
            self._by_sample.setdefault(rows, set()).add(fitting[0])


def _are_close(joined: Tensor, tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return torch.equal(joined, tensor)
    return torch.allclose(joined, tensor, rtol=_TOLERANCE, atol=1e-6, equal_nan=True)
