"""Outputs of the user's step: from the microbatches to the whole batch, and from the last stage to every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pp.errors import ConfigurationError, SplitError
from lightning_pp.runtime.host_copies import HostCopies
from lightning_pp.split.data.tree import children_of, leaves_of, map_children, map_leaves, named_children
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.strategy.results.learned import Learned, is_number


def merge_outputs(
    outputs: Sequence[Any],
    num_samples: Sequence[int],
    weights: Sequence[float] | None = None,
    learned: Learned | None = None,
    place: str = "",
) -> Any:
    """The step's output for the whole batch, from its outputs for each microbatch.

    By kind of value, wherever it stands in the outputs' containers (the kinds that :mod:`lightning_pp.split.data.tree`
    knows):

    ==================================================  ====================================
    numbers that are known to add up                    summed
    tensors, arrays with a sample per row               concatenated
    other tensors of one element, floats                weighted mean
    lists, tuples with a plain value (or dict) a sample concatenated
    sets                                                their union
    values that are equal everywhere                    kept
    ``None``, or no such key, in some microbatches      merged from the others
    anything else                                       a list with the value of each microbatch
    ==================================================  ====================================

    Args:
        outputs: The outputs, one per microbatch.
        num_samples: Number of samples of each microbatch.
        weights: Share of each microbatch in means; by default by samples.
        learned: What is known of numbers in the outputs.
        place: What the outputs are called there.

    Returns:
        The merged outputs, with detached tensors on the devices where they were.

    Raises:
        SplitError: The outputs hold a tensor without data, because it depends on what only another stage has.
        ValueError: The arguments differ in length, or there are no outputs.
    """
    _refuse_fakes(outputs)
    shares = [samples / sum(num_samples) for samples in num_samples] if weights is None else list(weights)
    if not outputs or not len(outputs) == len(num_samples) == len(shares):
        raise ValueError(
            f"expected one entry per microbatch, got {len(outputs)} outputs, {len(num_samples)} numbers of samples and "
            f"{len(shares)} weights"
        )
    detached = [map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, each) for each in outputs]
    return _merged(detached, num_samples, shares, Learned() if learned is None else learned, place)


def packed_outputs(outputs: Any, copies: HostCopies) -> Any:
    """``outputs`` as they can be sent in one message, whatever their size, once ``copies`` are there.

    Raises:
        SplitError: The outputs hold a tensor without data, because it depends on what only another stage has.
    """
    _refuse_fakes(outputs)
    return map_leaves(
        lambda leaf: _Packed(copies.copy(leaf), not leaf.is_cpu) if isinstance(leaf, Tensor) else leaf, outputs
    )


def unpacked_outputs(outputs: Any, device: torch.device) -> Any:
    """What :func:`packed_outputs` was given; tensors that were on an accelerator are on ``device``."""
    return map_leaves(lambda leaf: leaf.unpacked(device) if isinstance(leaf, _Packed) else leaf, outputs)


class _Packed:
    """Stands for a tensor in a message."""

    def __init__(self, tensor: Tensor, on_accelerator: bool) -> None:
        self.tensor = tensor
        self.on_accelerator = on_accelerator

    def unpacked(self, device: torch.device) -> Tensor:
        # a blocking copy would wait for all that the device has to do
        return self.tensor.to(device, non_blocking=True) if self.on_accelerator else self.tensor


def _refuse_fakes(outputs: Any) -> None:
    for leaf in leaves_of(outputs):
        if is_fake(leaf):
            raise SplitError(
                f"The step returned a tensor of shape {tuple(leaf.shape)} that depends on a tensor of another stage. "
                "Return values that the last stage computes."
            )


def _merged(
    values: Sequence[Any], num_samples: Sequence[int], weights: Sequence[float], learned: Learned, place: str
) -> Any:
    if any(value is None for value in values):
        present = [index for index, value in enumerate(values) if value is not None]
        shares = [num_samples[index] for index in present], [weights[index] for index in present]
        return _merged([values[index] for index in present], *shares, learned, place) if present else None
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return list(values)
    if is_number(first) and learned.adds_up(place, values, weights):
        return sum(values)
    if isinstance(first, (Tensor, np.ndarray)):
        return _merged_arrays(values, num_samples, weights)
    if isinstance(first, (float, np.floating)):
        return first if all_equal(values) else mean_of(values, weights)
    if isinstance(first, set):
        return first.union(*values)
    if _is_list_of_samples(values, num_samples, learned, place):
        return type(first)(sample for value in values for sample in value)
    if type(first) is dict and any(value.keys() != first.keys() for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        columns = {key: [value.get(key) for value in values] for key in keys}
        return {
            key: _merged(column, num_samples, weights, learned, f"{place}[{key!r}]") for key, column in columns.items()
        }
    names = [[name for name, _ in named_children(value) or ()] for value in values]
    children = [children_of(value) for value in values]
    if children[0] and all(other == names[0] for other in names) and len(set(map(len, children))) == 1:
        merged = (
            _merged(column, num_samples, weights, learned, place + name)
            for name, column in zip(chain(names[0], repeat("")), zip(*children, strict=True), strict=False)
        )
        return map_children(lambda _: next(merged), first)
    return first if all_equal(values) else list(values)


def _merged_arrays(arrays: Sequence[Any], num_samples: Sequence[int], weights: Sequence[float]) -> Any:
    """Of tensors, or of NumPy's arrays."""
    first = arrays[0]
    if isinstance(first, Tensor) and any(each.layout is not torch.strided or each.is_nested for each in arrays):
        return list(arrays)
    if all(each.shape[:1] == (number,) for each, number in zip(arrays, num_samples, strict=True)):
        join: Any = torch.cat if isinstance(first, Tensor) else np.concatenate
        return join(list(arrays)) if all_equal([each.shape[1:] for each in arrays]) else list(arrays)
    if all_equal([(each.shape, each.dtype, each.device if isinstance(each, Tensor) else None) for each in arrays]):
        # Looking at values waits for the device, so losses are averaged without it.
        is_mean = isinstance(first, Tensor) and first.numel() == 1 and (first.is_floating_point() or first.is_complex())
        if not is_mean and all_equal(arrays):
            return first
        if isinstance(first, Tensor) and first.numel() == 1:
            return mean_of(arrays, weights)
    return list(arrays)


def mean_of(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted mean of numbers, arrays or tensors of one shape, which is detached."""
    total = sum(weights)
    if not isinstance(values[0], Tensor):
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    stacked = torch.stack([value.detach() for value in values])
    exact = stacked.dtype.is_floating_point or stacked.dtype.is_complex
    dtype = torch.promote_types(stacked.dtype, torch.float32) if exact else torch.get_default_dtype()
    # numbers of the host go into operations: to make a tensor of them on the device waits for it
    weighted = [row * (weight / total) for row, weight in zip(stacked.to(dtype), weights, strict=True)]
    mean = torch.stack(weighted).sum(0)
    return mean.to(stacked.dtype) if exact else mean


def _is_list_of_samples(values: Sequence[Any], num_samples: Sequence[int], learned: Learned, place: str) -> bool:
    """Whether the values are lists with an entry per sample: plain values, dicts, or tensors unlike a batch's.

    If an entry of a list is a scalar or a tensor with a row per sample in every microbatch, the list is a container of
    outputs, even if it is as long as a microbatch. So is a tuple, unless its length follows that of uneven
    microbatches.
    """
    if type(values[0]) not in (list, tuple) or learned.is_by_sample(place, values, num_samples) is False:
        return False
    if len(set(num_samples)) > 1:
        return True
    if type(values[0]) is tuple:
        return False
    if all(isinstance(entry, dict) for value in values for entry in value):
        return True
    return not any(all(map(_is_batch_entry, entries, num_samples)) for entries in zip(*values, strict=True))


def _is_batch_entry(entry: Any, num_samples: int) -> bool:
    """Whether ``entry`` has a tensor with a row per sample, or a scalar."""
    arrays = [leaf for leaf in leaves_of(entry) if isinstance(leaf, (Tensor, np.ndarray))]
    return any(leaf.ndim == 0 or leaf.shape[0] == num_samples for leaf in arrays)


def all_equal(values: Sequence[Any]) -> bool:
    """Whether all values are of one type, and equal."""
    first, *others = values
    try:
        if isinstance(first, Tensor):
            return all(other.dtype == first.dtype and torch.equal(other, first) for other in others)
        return all(type(other) is type(first) and bool(np.all(other == first)) for other in others)
    except Exception:  # whatever a foreign __eq__ raises; a comparison that fails shows no equality
        return False


SKIPPED_IN_PART = (
    "training_step returned None for some microbatches of a batch and a loss for others. On one device it would have "
    "returned one of them for the whole batch. Decide by what all samples of the batch share."
)


class NoLossError(ConfigurationError):
    """A training step has returned None."""


@contextmanager
def none_refused(batch_idx: int) -> Iterator[None]:
    """In the block, stages run the batch; a step that only now returns None ends the run."""
    try:
        yield
    except NoLossError as error:
        raise ConfigurationError(
            f"training_step returned None for a microbatch of batch {batch_idx} after units were run, but the recorded "
            "step returned a loss. The other stages already run the batch. Decide by batch_idx or the batch's "
            "contents, and return None before the first unit is called. To skip updates where a loss or a gradient is "
            "not finite, set on_nonfinite='skip' on the strategy."
        ) from error


def loss_of(output: Any) -> Tensor:
    """The loss in what ``training_step`` returned; raises :class:`ConfigurationError` if there is none."""
    loss = output.get("loss") if hasattr(output, "get") else output
    if not isinstance(loss, Tensor):
        raise (NoLossError if output is None else ConfigurationError)(
            f"training_step returned {type(output).__name__}{' without a loss' if hasattr(output, 'get') else ''}, but "
            "in a pipeline every batch needs a loss. Return a tensor, or a dict with the key 'loss'. None skips a "
            "batch if all its microbatches return it, without replicas or accumulation, and not in the first batch."
        )
    return loss
