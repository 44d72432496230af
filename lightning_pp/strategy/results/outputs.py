"""What the user's step returned: from the microbatches to the whole batch, and from the last stage to every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pp.errors import ConfigurationError, SplitError
from lightning_pp.runtime.host_copies import HostCopies
from lightning_pp.split.data.tree import children_of, leaves_of, map_children, map_leaves, named_children
from lightning_pp.split.fakes.parameters import is_fake


def merge_outputs(outputs: Sequence[Any], num_samples: Sequence[int], weights: Sequence[float] | None = None) -> Any:
    """What the step would have returned for the whole batch, from what it returned for each microbatch.

    By kind of value, wherever it stands in the outputs' containers (the kinds that :mod:`lightning_pp.split.data.tree`
    knows):

    ==================================================  ====================================
    tensors, arrays with a sample per row               concatenated
    other tensors of one element, floats                weighted mean
    lists, tuples with a plain value (or dict) a sample concatenated
    values that are equal everywhere                    kept
    ``None`` in some microbatches                       merged from the others
    anything else                                       a list with the value of each microbatch
    ==================================================  ====================================

    Args:
        outputs: The outputs, one per microbatch.
        num_samples: Number of samples of each microbatch.
        weights: Share of each microbatch in means; by default by samples.

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
    parts = [
        _Part(_detached(value), samples, share)
        for value, samples, share in zip(outputs, num_samples, shares, strict=True)
    ]
    return _merged(parts)


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


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one microbatch returned, or a piece of it."""

    value: Any
    num_samples: int
    weight: float


class _Packed:
    """Stands for a tensor in a message."""

    def __init__(self, tensor: Tensor, on_accelerator: bool) -> None:
        self.tensor = tensor
        self.on_accelerator = on_accelerator

    def unpacked(self, device: torch.device) -> Tensor:
        # a blocking copy would wait for all that the device has to do
        return self.tensor.to(device, non_blocking=True) if self.on_accelerator else self.tensor


def _detached(outputs: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)


def _refuse_fakes(outputs: Any) -> None:
    for leaf in leaves_of(outputs):
        if is_fake(leaf):
            raise SplitError(
                f"The step returned a tensor of shape {tuple(leaf.shape)} that depends on what only another stage has. "
                "Return values that the last stage computes."
            )


def _merged(parts: list[_Part]) -> Any:
    present = [part for part in parts if part.value is not None]
    if not present:
        return None
    parts = present
    values = [part.value for part in parts]
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return values
    if isinstance(first, Tensor):
        return _merged_tensors(parts)
    if isinstance(first, np.ndarray):
        return _concatenated_arrays(parts)
    if isinstance(first, (float, np.floating)):
        return first if _all_equal(values) else _mean(values, parts)
    if _is_list_of_samples(parts):
        return type(first)(sample for value in values for sample in value)
    names = [[name for name, _ in named_children(value) or ()] for value in values]
    children = [children_of(value) for value in values]
    if children[0] and all(other == names[0] for other in names) and len(set(map(len, children))) == 1:
        merged = (
            _merged([dataclasses.replace(part, value=child) for part, child in zip(parts, column, strict=True)])
            for column in zip(*children, strict=True)
        )
        return map_children(lambda _: next(merged), first)
    return first if _all_equal(values) else values


def _merged_tensors(parts: list[_Part]) -> Any:
    tensors = [part.value for part in parts]
    first = tensors[0]
    if all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors):
        if _has_row_per_sample(parts):
            return torch.cat(tensors) if _all_equal([tensor.shape[1:] for tensor in tensors]) else tensors
        if _all_equal([(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]):
            # Looking at values waits for the device, so losses are averaged without it.
            is_mean = first.numel() == 1 and (first.is_floating_point() or first.is_complex())
            if not is_mean and all(torch.equal(tensor, first) for tensor in tensors[1:]):
                return first
            if first.numel() == 1:
                return _mean_tensor(parts)
    return tensors


def _mean_tensor(parts: list[_Part]) -> Tensor:
    stacked = torch.stack([part.value for part in parts])
    exact = stacked.dtype.is_floating_point or stacked.dtype.is_complex
    dtype = torch.promote_types(stacked.dtype, torch.float32) if exact else torch.get_default_dtype()
    total = sum(part.weight for part in parts)
    # numbers of the host go into operations: to make a tensor of them on the device waits for it
    weighted = [row * (part.weight / total) for row, part in zip(stacked.to(dtype), parts, strict=True)]
    mean = torch.stack(weighted).sum(0)
    return mean.to(stacked.dtype) if exact else mean


def _mean(values: Sequence[float], parts: list[_Part]) -> float:
    total = sum(part.weight for part in parts)
    return sum(value * part.weight for value, part in zip(values, parts, strict=True)) / total


def _concatenated_arrays(parts: list[_Part]) -> Any:
    arrays = [part.value for part in parts]
    if _has_row_per_sample(parts):
        return np.concatenate(arrays) if _all_equal([array.shape[1:] for array in arrays]) else arrays
    return arrays[0] if all(np.array_equal(array, arrays[0]) for array in arrays) else arrays


def _has_row_per_sample(parts: list[_Part]) -> bool:
    return all(part.value.ndim > 0 and part.value.shape[0] == part.num_samples for part in parts)


def _is_list_of_samples(parts: list[_Part]) -> bool:
    """Whether the values are lists with an entry per sample: plain values, dicts, or tensors unlike a batch's.

    A list in which some entry is, in every microbatch, a tensor with a row per sample or a scalar is a container of
    outputs, also where it happens to be as long as a microbatch; so is a tuple, unless its length follows that of
    uneven microbatches.
    """
    first = parts[0].value
    if type(first) not in (list, tuple) or any(len(part.value) != part.num_samples for part in parts):
        return False
    if len({part.num_samples for part in parts}) > 1:
        return True
    if type(first) is tuple:
        return False
    if all(isinstance(entry, dict) for part in parts for entry in part.value):
        return True
    return not any(
        all(_is_batch_entry(entry, part.num_samples) for entry, part in zip(entries, parts, strict=True))
        for entries in zip(*(part.value for part in parts), strict=True)
    )


def _is_batch_entry(entry: Any, num_samples: int) -> bool:
    """Whether ``entry`` has a tensor with a row per sample, or a scalar."""
    arrays = [leaf for leaf in leaves_of(entry) if isinstance(leaf, (Tensor, np.ndarray))]
    return any(leaf.ndim == 0 or leaf.shape[0] == num_samples for leaf in arrays)


def _all_equal(values: Sequence[Any]) -> bool:
    try:
        return all(bool(value == values[0]) for value in values[1:])
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
    """Within, stages run the batch; a step that only now returns None ends the run."""
    try:
        yield
    except NoLossError as error:
        raise ConfigurationError(
            f"training_step returned None for a microbatch of batch {batch_idx} after units were run, but the recorded "
            "step returned a loss. The other stages run the batch already. Return None before the first unit is "
            "called, by batch_idx or by what the batch holds. To skip updates where a loss or a gradient is not "
            "finite, set on_nonfinite='skip' on the strategy."
        ) from error


def loss_of(output: Any) -> Tensor:
    """The loss in what ``training_step`` returned; raises :class:`ConfigurationError` if there is none."""
    loss = output.get("loss") if hasattr(output, "get") else output
    if not isinstance(loss, Tensor):
        raise (NoLossError if output is None else ConfigurationError)(
            f"training_step returned {type(output).__name__}{' without a loss' if hasattr(output, 'get') else ''}, but "
            "in a pipeline every batch needs a loss. Return a tensor, or a dict with the key 'loss'. None may skip a "
            "batch only without replicas and accumulation, not in the first batch, and for all its microbatches."
        )
    return loss
