"""How the batches of a run become microbatches."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_pp.distributed.sizes import Auto, resolve_num_microbatches
from lightning_pp.split.data.microbatch import Microbatch, SplitBatch, batch_size_of, split_batch, split_by
from lightning_pp.split.data.row_references import refuse_row_references

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NUM_CHECKED = 2


class BatchCutter:
    """Cuts batches by the user's function, or along dimension 0.

    Args:
        num_microbatches: What the user asks for.
        pipeline_size: Ranks along the pipeline, on which ``"auto"`` depends.
        split: The user's function; None: along dimension 0.
        module: What trains on the batches. A BatchNorm of it needs two samples of a microbatch, so ``"auto"`` leaves
            each so many.
    """

    def __init__(
        self, num_microbatches: int | Auto, pipeline_size: int, split: SplitBatch | None, module: nn.Module
    ) -> None:
        has_norm = any(isinstance(each, _BATCH_NORMS) for each in module.modules())
        self._fewest_samples = 2 if has_norm else 1
        self._num_microbatches = num_microbatches
        self._pipeline_size = pipeline_size
        self._split = split
        self._num_cut = {True: 0, False: 0}  # training, evaluation

    def cut(self, batch: Any, *, for_training: bool) -> list[Microbatch]:
        """The microbatches of ``batch``; of the first batches, values are looked at that may refer to rows.

        Raises:
            BatchError: The batch cannot be cut (:func:`split_batch`, :func:`split_by`), or its rows refer to each other
                (:func:`refuse_row_references`).
        """
        size = batch_size_of(batch) if self._split is None else None
        fewest = self._fewest_samples if for_training else 1
        number = resolve_num_microbatches(self._num_microbatches, self._pipeline_size, size, fewest)
        microbatches = self.cut_into(batch, number)
        if self._split is not None:
            return microbatches
        self._num_cut[for_training] += 1
        if len(microbatches) > 1 and self._num_cut[for_training] <= _NUM_CHECKED:
            refuse_row_references(batch, sum(each.num_samples for each in microbatches), len(microbatches))
        return microbatches

    @property
    def is_users(self) -> bool:
        """Whether the user's function cuts."""
        return self._split is not None

    def cut_into(self, batch: Any, number: int) -> list[Microbatch]:
        """At most ``number`` slices of ``batch``, which may be a slice itself."""
        return split_batch(batch, number) if self._split is None else split_by(self._split, batch, number)
