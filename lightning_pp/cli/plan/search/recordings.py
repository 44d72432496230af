"""Dry runs that many plans share: usually one for each size of microbatches."""

from __future__ import annotations

from dataclasses import replace

from lightning_pp.distributed.sizes import ParallelSizes
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.activation_checkpointing import ActivationCheckpointing
from lightning_pp.planning.pipeline_options import PipelineOptions
from lightning_pp.planning.stage_model import RecordedModel, with_recomputation
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.head.choice import head_to_split
from lightning_pp.split.unit_calls.units import most_units
from lightning_pp.strategy.plan_only import FirstStep


class Recordings:
    """The recorded step on one microbatch, for any number of stages.

    With more stages there may have to be more units, and a head may be cut; else the recording is the same.

    Args:
        step: The step.
        options: As configured; what is run again in backward counts for nothing, or must have a policy.
        microbatch: What the step is given.
        num_tensor_ranks: Ranks that share matrices.
        whole: For one tensor rank; None where this is.
        like: On a microbatch of another size; None for none.
    """

    def __init__(
        self,
        step: FirstStep,
        options: PipelineOptions,
        microbatch: Microbatch,
        num_tensor_ranks: int,
        whole: Recordings | None,
        like: Recordings | None = None,
    ) -> None:
        self._step = step
        self._options = options
        self._microbatch = microbatch
        self._sizes = ParallelSizes(1, 1, tensor=num_tensor_ranks)
        self._whole, self._like = whole, like
        self._most_units = most_units(step.module, options.cut.units)
        self._made: dict[tuple[int, int], RecordedModel] = {}
        self._for_stages: dict[int, RecordedModel] = {}
        self._recomputing: dict[tuple[int, str], RecordedModel] = {}

    def of(self, num_stages: int, activation_checkpointing: ActivationCheckpointing) -> RecordedModel:
        """What training would record for so many stages.

        Raises:
            ConfigurationError: There are fewer units, or nothing that can be run again in backward.
            SplitError: The step cannot be cut.
        """
        if num_stages > (number := self._num_units(num_stages)):
            raise ConfigurationError(f"{num_stages} stages need as many units, but the step has {number}")
        made = self._for_stages[num_stages]
        if self._options.activation_checkpointing is not False:
            return made
        return self._recomputed(made, activation_checkpointing)

    def _recomputed(self, made: RecordedModel, activation_checkpointing: ActivationCheckpointing) -> RecordedModel:
        key = id(made), repr(activation_checkpointing)
        if key not in self._recomputing:
            found = with_recomputation(replace(made, whole=None), activation_checkpointing)
            whole = None if made.whole is None else self._recomputed(made.whole, activation_checkpointing)
            self._recomputing[key] = replace(found, whole=whole)
        return self._recomputing[key]

    def _num_units(self, num_stages: int) -> int:
        """Units that there are for so many stages; the step is recorded only where the recordings before had enough."""
        for one in filter(None, (self._whole, self._like)):
            if (number := one._num_units(num_stages)) < num_stages:
                return number
        if num_stages <= self._most_units and num_stages not in self._for_stages:
            self._for_stages[num_stages] = self._without_recomputation(num_stages)
        made = self._for_stages.get(num_stages)
        return self._most_units if made is None else len(made.record.first_calls())

    def _without_recomputation(self, num_stages: int) -> RecordedModel:
        whole = self._recorded((1, 0), 1)
        if num_stages > len(whole.record.first_calls()):
            return self._recorded((num_stages, 0), num_stages)
        head = head_to_split(whole.units, whole.record, whole.num_parameters, self._options.split_head, num_stages)
        return whole if head is None else self._recorded((1, head[1]), num_stages)

    def _recorded(self, key: tuple[int, int], num_stages: int) -> RecordedModel:
        """The recording with the least stages that it serves, and with so many parts of its head."""
        if key not in self._made:
            options = replace(self._options, device_memory_gib=None)
            cutter = self._step.cutter(options, self._sizes, [self._microbatch])
            whole = None if self._whole is None else self._whole._recorded(key, num_stages)
            like = None if self._like is None else self._like._recorded(key, num_stages)
            if key[1]:  # with its head whole it is a recording of its own
                whole, like = (one and replace(one, whole=None) for one in (whole, like))
            made = cutter.recording(num_stages, like) if whole is None else cutter.on_tensor_ranks(whole, like)
            if key[1] and made.num_head_parts and self._options.split_head == "auto":
                made = replace(made, whole=self._recorded((1, 0), 1))
            self._made[key] = made
        made = self._made[key]
        if made.on_parts is not None and made.on_parts.num_parameters == made.num_parameters:
            raise ConfigurationError(f"no matrix can be cut over {self._sizes.tensor} tensor ranks")
        return made
