"""Cuts the batches of a run into microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from lightning_pp.distributed.sizes import resolve_num_microbatches
from lightning_pp.errors import BatchError, ConfigurationError, SplitError, add_note
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.split.data.microbatch import (
    BatchDim,
    Microbatch,
    batch_size_of,
    described,
    dims_of_samples,
    doubled,
    other_dims,
    placed_tensors,
    split_batch,
    split_by,
)
from lightning_pp.split.record.source_lines import UNKNOWN_LINE, innermost_user_line

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_OWN_ERRORS = (BatchError, ConfigurationError, SplitError)


class BatchCutter:
    """Cuts batches by the user's function, or along the dimension of samples.

    Args:
        options: What the user asks for.
        pipeline_size: Ranks along the pipeline, on which ``"auto"`` depends.
        module: What trains on the batches. A BatchNorm of it needs two samples of a microbatch, so ``"auto"`` leaves
            each so many.
    """

    def __init__(self, options: PipelineOptions, pipeline_size: int, module: nn.Module) -> None:
        has_norm = any(isinstance(each, _BATCH_NORMS) for each in module.modules())
        self._fewest_samples = 2 if has_norm else 1
        self._num_microbatches = options.num_microbatches
        self._pipeline_size = pipeline_size
        self._split, self._batch_dim = options.batches.split_batch, options.batches.batch_dim

    def cut(self, batch: Any, *, for_training: bool) -> list[Microbatch]:
        """The microbatches of ``batch``.

        Raises:
            BatchError: The batch cannot be cut (:func:`split_batch`, :func:`split_by`).
        """
        asks_size = self._num_microbatches == "auto" and self._split is None
        size = batch_size_of(batch, self._batch_dim) if asks_size else None
        fewest = self._fewest_samples if for_training else 1
        number = resolve_num_microbatches(self._num_microbatches, self._pipeline_size, size, fewest)
        return self.cut_into(batch, number)

    def noted(self, batch: Any, number: int) -> AbstractContextManager[None]:
        """An exception within has a note on how ``batch`` was cut, unless the user's function did."""
        return nullcontext() if self.is_users else _cut_noted(batch, number, self._batch_dim)

    @property
    def is_users(self) -> bool:
        """Whether the user's function cuts."""
        return self._split is not None

    def cut_into(self, batch: Any, number: int) -> list[Microbatch]:
        """At most ``number`` slices of ``batch``, which may be a slice itself."""
        if self._split is not None:
            return split_by(self._split, batch, number)
        return split_batch(batch, number, self._batch_dim)

    def doubled(self, part: Microbatch) -> Microbatch | None:
        """``part`` with each of its samples twice; None where only the user's function knows what a sample is."""
        return None if self.is_users else doubled(part, self._batch_dim)


@contextmanager
def _cut_noted(batch: Any, num_microbatches: int, batch_dim: BatchDim) -> Iterator[None]:
    """Adds to an exception of the user's code, or of a cut that may be the cause, how the batch was cut."""
    try:
        yield
    except Exception as error:
        if num_microbatches > 1:
            named, text = dims_of_samples(batch, batch_dim), other_dims(batch, batch_dim)
            lengths = {place: len(each) for place, each in placed_tensors(batch).items() if id(each) not in named}
            if len(set(lengths.values())) > 1:
                text = (
                    f"There its tensors differ in length: {described(lengths)}. Tensors of the most frequent length "
                    "were cut. The others went whole to every microbatch. If rows refer to each other, give "
                    f"PipelineParallelStrategy(split_batch=...).{text}"
                )
            is_users = not isinstance(error, _OWN_ERRORS) and innermost_user_line(error) != UNKNOWN_LINE
            if is_users and not text:
                text = "The step runs on one microbatch at a time. Its code must not need all samples of the batch."
            if text:
                cut = f"The batch was cut into {num_microbatches} microbatches along dimension 0."
                add_note(error, f"{cut} {text.lstrip()}")
        raise
