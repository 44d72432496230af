"""What a tensor rank computes, holds and communicates: against Megatron's formulas, and against what ranks do hold."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from layouts import recorded_training
from live_memory import LiveMemory
from parity_models import LlamaFloat64Loss, samples_of
from parity_run import QUIET
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.memory.model import MemoryModel
from lightning_pp.planning.stage_model import RecordedModel, RecordingOptions, with_recomputation
from lightning_pp.planning.tensor_parts import OnParts, TensorRanks
from lightning_pp.split.memory.state_memory import StepDtypes

LENGTH, BATCH, WIDTH, HEADS = 8, 2, 32, 8
ONE_ACTIVATION = LENGTH * BATCH * WIDTH * 2  # bytes in bfloat16


class MegatronLayer(nn.Module):
    """The layer of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).split(WIDTH, dim=-1)
        q, k, v = (each.view(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for each in qkv)
        weights = self.drop(torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(WIDTH / HEADS), -1))
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Megatron(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MegatronLayer() for _ in range(3))

    def training_step(self, x: Tensor, batch_idx: int = 0) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def recorded(size: int, plan: Any = "auto") -> RecordedModel:
    module, x = Megatron().bfloat16(), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16)
    return recorded_training(module, x, RecordingOptions(tensor=TensorRanks(size, plan)))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_layer_is_as_megatrons_formulas_say(size: int) -> None:
    counted = recorded(size).counted
    call = counted.record.calls[1]
    # the formula is for dropout masks of one byte; on CPU they have the dtype of activations, of two
    mask, of_norms = 2, 2 * 2 * LENGTH * BATCH * 2
    attention = HEADS * LENGTH / WIDTH
    per_token = 8 + 2 * mask + 24 / size + (4 + mask) * attention / size
    assert sum(call.memory.saved.values()) == LENGTH * BATCH * WIDTH * per_token + of_norms
    matrices, biases = 12 * WIDTH * WIDTH, 3 * WIDTH + 4 * WIDTH
    assert counted.num_parameters["layers.1"] == (matrices + biases) / size + 2 * WIDTH + 4 * WIDTH
    products = 2 * LENGTH * BATCH * matrices + 2 * 2 * LENGTH * LENGTH * BATCH * WIDTH
    assert call.flops == products / size


@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_sums_twice_in_forward_and_twice_in_backward(size: int) -> None:
    recording = recorded(size)
    on_parts = recording.counted
    assert isinstance(on_parts, OnParts)
    one_sum = 2 * ONE_ACTIVATION * (size - 1) / size  # bytes that a rank receives in a ring
    # the input of the first layer needs no gradient, but its output of a norm does
    for unit in ("layers.0", "layers.1", "layers.2"):
        assert on_parts.count_traffic(unit) == ((2, 2 * one_sum), (2, 2 * one_sum), (0, 0.0))
    again = with_recomputation(recording, True).counted
    assert isinstance(again, OnParts)
    # up to the input of the last product, which is the last tensor that autograd keeps
    assert again.count_traffic("layers.1") == ((2, 2 * one_sum), (2, 2 * one_sum), (1, one_sum))


def test_what_is_left_whole_is_told() -> None:
    on_parts = recorded(3).on_parts
    assert on_parts is not None and "leaves 100.0% of the parameters whole on all 3 ranks" in on_parts.about
    assert on_parts.count_traffic("layers.0") == ((0, 0.0),) * 3


def test_sizes_of_a_plan_that_do_not_divide_are_told() -> None:
    with pytest.raises(
        ConfigurationError, match=r"tensor_parallel_size=3 does not divide .*layers\.0\.up\.weight has 128"
    ):
        recorded(3, {"*.up": "colwise", "*.down": "rowwise"})


class WithHead(pl.LightningModule):
    """Ends with logits of 64 words for 16 tokens."""

    def __init__(self, takes_cross_entropy: bool) -> None:
        super().__init__()
        self.takes_cross_entropy = takes_cross_entropy
        self.embed, self.norm, self.head = (
            nn.Embedding(64, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 64, bias=False),
        )

    def training_step(self, tokens: Tensor, batch_idx: int = 0) -> Tensor:
        logits = self.head(self.norm(self.embed(tokens))).float()[:, :-1]
        if not self.takes_cross_entropy:
            return torch.logsumexp(logits, -1).mean() - logits.mean()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("takes_cross_entropy", [True, False])
@pytest.mark.parametrize("defers", [True, False])
def test_a_rank_keeps_the_logits_of_its_words_for_a_cross_entropy(takes_cross_entropy: bool, defers: bool) -> None:
    module, tokens = WithHead(takes_cross_entropy).bfloat16(), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    whole, on_parts = (
        recorded_training(
            module, tokens, RecordingOptions(tensor=TensorRanks(size, defers_logits=defers))
        ).counted.record.tail.memory.saved.values()
        for size in (1, 4)
    )
    of_all_words = max(whole)
    assert of_all_words >= BATCH * (LENGTH - 1) * 64 * 4  # in float32
    assert max(on_parts) == (of_all_words // 4 if takes_cross_entropy and defers else of_all_words)


class Noted(LlamaFloat64Loss):
    """Notes what a forward leaves in memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with LiveMemory() as live:
            loss = super().training_step(batch, batch_idx)
        self.num_bytes = live.live_bytes
        return loss


def train_and_count() -> tuple[dict[str, int], dict[str, int]]:
    """In a worker: what this tensor rank was thought to hold, and what it does."""
    strategy = PipelineParallelStrategy(
        pipeline_parallel_size=1, tensor_parallel_size=2, num_microbatches=1, device_memory_gib=1.0
    )
    module = Noted()
    run = pl.Trainer(**QUIET, devices=2, strategy=strategy, max_epochs=1, precision="64-true")
    run.fit(module, DataLoader(samples_of("llama_float64_loss", 4, 1), batch_size=4))
    engine = strategy.engine
    assert engine is not None
    split, own = engine.split, list(module.parameters())
    assert len(split.tensor_parts) > 4
    model = MemoryModel.of(strategy.options.sharding, 1, StepDtypes(), optimizer=run.optimizers[0])
    estimate = model.estimate(split.counted.record, split.partition, split.placement, split.parameter_sizes)
    state = estimate.stages[0].state
    thought = {
        "parameters": state.parameters_bytes,
        "gradients": state.gradients_bytes,
        "optimizer": state.optimizer_state_bytes,
        "activations": estimate.stages[0].held_after_forward_bytes,
    }
    kept = [value for p in own for value in run.optimizers[0].state[p].values() if value.dim() > 0]
    held = {
        "parameters": sum(p.nbytes for p in own),
        "gradients": sum(p.grad.nbytes for p in own if p.grad is not None),
        "optimizer": sum(value.nbytes for value in kept),
        "activations": module.num_bytes,
    }
    return thought, held


def test_training_holds_what_was_counted(pool: WorkerPool) -> None:
    for thought, held in pool.run(train_and_count, world_size=2, timeout=120):
        assert thought.pop("activations") == pytest.approx(held.pop("activations"), rel=0.05)
        assert thought == held
