"""Models of transformers that are cut by a dry run, and a stage that has all of one: what benchmarks of costs share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
import transformers as hf
from torch import Tensor, nn

from lightning_pp.planning.stage_model import SplitModel, assign_stages, record_model
from lightning_pp.planning.steps.plans import signature_of
from lightning_pp.runtime.compilation import CompiledUnits
from lightning_pp.runtime.randomness import StepRandomness
from lightning_pp.runtime.split_backward.deferral import weight_gradients_deferrable
from lightning_pp.runtime.stage import StageRunner
from lightning_pp.schedule import Placement
from lightning_pp.split.cut.partition import partition_units

CPU = torch.device("cpu")


class HFModel(L.LightningModule):
    """A model of transformers that computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: nn.Module = model

    def training_step(self, batch: Tensor) -> Tensor:
        """Next-token loss."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


def gpt2(num_blocks: int, dim: int) -> HFModel:
    """GPT-2 of transformers."""
    return HFModel(
        hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=256, n_positions=64, n_embd=dim, n_layer=num_blocks, n_head=2, bos_token_id=0, eos_token_id=0
            )
        )
    )


def llama(num_blocks: int, dim: int) -> HFModel:
    """Llama of transformers."""
    config = hf.LlamaConfig(
        vocab_size=256,
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=num_blocks,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return HFModel(hf.LlamaForCausalLM(config))


def cut(module: L.LightningModule, batch: Tensor, num_stages: int) -> SplitModel:
    """Splits by a dry run into stages with equal costs, as the strategy does."""
    placement = Placement.interleaved(num_stages)
    recording = record_model(
        module,
        device=batch.device,
        step=lambda dry: module.training_step(batch),
        with_gradients=True,
        patterns=None,
        num_stages=num_stages,
    )
    partition = partition_units(recording.record, placement=placement, num_parameters=recording.num_parameters)
    return assign_stages(recording, placement=placement, partition=partition)


def median_ms(function: Callable[[], Any], num_runs: int) -> float:
    """CPU time of this process, in milliseconds."""
    times = []
    for _ in range(num_runs):
        start = time.process_time()
        function()
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times)


class LoneStage:
    """A stage that has all of a model, and runs microbatches one after the other.

    Args:
        module: The model.
        batch: A microbatch.
        splits: Whether the backward is I and W, or B.
        options: Of ``torch.compile``, for its units; None: uncompiled.
    """

    def __init__(
        self, module: L.LightningModule, batch: Tensor, *, splits: bool, options: dict[str, Any] | None
    ) -> None:
        self._splits, self._device = splits, batch.device
        self._step = partial(module.training_step, batch)
        split = cut(module, batch, 1)
        self._plan = split.plans.plan(signature_of(batch), lambda dry: self._step(), with_gradients=True)
        if options is not None:
            CompiledUnits(split.units, options).attach()
        self._runner = StageRunner(0, split.units)

    def microbatch(self, timed: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Runs one microbatch, each action by ``timed(its name, what it does)``; B has the name of I."""
        with weight_gradients_deferrable() if self._splits else nullcontext():
            kept, loss = timed("F", self._forward)
            kept.loss = loss
            timed("I", partial(self._runner.backward, self._plan, kept, (), 1.0, split=self._splits))
            kept.end_backward()
            timed("W", kept.run_weight_gradients if self._splits else lambda: None)

    def _forward(self) -> Any:
        return self._runner.forward(
            self._plan,
            self._step,
            tuple,
            StepRandomness(0, self._device),
            with_gradients=True,
            splits_backward=self._splits,
        )
