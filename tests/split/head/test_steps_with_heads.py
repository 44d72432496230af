"""Whether the parts of a head can serve a step is found out in its dry run, before anything is cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import split_model
from model_parts import Block
from one_process import CPU, build, recorded
from torch import Tensor, nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.stage_model import RecordedModel, RecordingOptions, record_model

WORDS, WIDTH = 96, 8
BATCH = torch.arange(24).view(3, 8) % WORDS


class Model(nn.Module):
    """Blocks and a head of many words; its loss is what a subclass makes of the logits."""

    log: Callable[[str, Any], None]

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, WORDS)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))

    def loss_of(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens: Tensor) -> Any:
        return self.loss_of(self.logits(tokens), tokens)

    def validation_step(self, tokens: Tensor) -> Any:
        return self.logits(tokens).argmax(-1)


class LogsAccuracy(Model):
    def training_step(self, tokens: Tensor) -> Any:
        logits = self.logits(tokens)
        self.log("accuracy", (logits[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean())
        return self.loss_of(logits, tokens)


class LogsAccuracyLater(Model):
    def training_step(self, tokens: Tensor) -> Any:
        logits = self.logits(tokens)
        loss = self.loss_of(logits, tokens)
        self.log("largest", logits.max())
        return loss


class ReturnsLogits(Model):
    def training_step(self, tokens: Tensor) -> Any:
        logits = self.logits(tokens)
        return {"loss": self.loss_of(logits, tokens), "logits": logits}


class KeepsLogits(Model):
    def training_step(self, tokens: Tensor) -> Any:
        self.last_logits = self.logits(tokens)
        return self.loss_of(self.last_logits, tokens)


class TwoLosses(Model):
    def training_step(self, tokens: Tensor) -> Any:
        logits = self.logits(tokens)
        return self.loss_of(logits, tokens) + F.cross_entropy(logits.transpose(1, 2), tokens)


class TwoCalls(Model):
    def training_step(self, tokens: Tensor) -> Any:
        hidden = self.blocks(self.embedding(tokens))
        return self.loss_of(self.head(hidden), tokens) + self.loss_of(self.head(hidden), tokens)


class Catches(Model):
    """What a user's code catches does not hide that the logits are needed."""

    def training_step(self, tokens: Tensor) -> Any:
        logits = self.logits(tokens)
        try:
            entropy = logits.softmax(-1).square().sum()
        except Exception:
            entropy = torch.zeros(())
        return self.loss_of(logits, tokens) + 0.1 * entropy


OTHER_STEPS: Mapping[type[Model], str] = {
    LogsAccuracy: r"test_steps_with_heads.py:\d+ in .* uses the logits of 'head' in argmax",
    LogsAccuracyLater: r"test_steps_with_heads.py:\d+ in .* uses the logits of 'head' in max",
    ReturnsLogits: "the step returns, keeps or logs the logits of 'head'",
    KeepsLogits: "the step returns, keeps or logs the logits of 'head'",
    TwoLosses: "takes the cross entropy of the logits of 'head' again",
    Catches: r"test_steps_with_heads.py:\d+ in .* uses the logits of 'head' in softmax",
}


def recording_of(kind: type[Model], split_head: Any = 4) -> RecordedModel:
    module = build(kind)
    return record_model(
        module,
        device=CPU,
        step=recorded(module, BATCH),
        with_gradients=True,
        patterns=None,
        num_stages=3,
        how=RecordingOptions(split_head=split_head),
    )


def test_parts_are_units_after_the_blocks_and_share_the_weight() -> None:
    recording = recording_of(Model)
    parts = [f"head[{first}:{first + 24}]" for first in (0, 24, 48, 72)]
    assert list(recording.record.first_calls())[-4:] == parts
    assert recording.record.split_head == "head" and recording.whole is None
    split = split_model(recording, 3, ["blocks.1", "head[24:48]"])
    assert split.owners["head.weight"] == split.owners["head.bias"] == (1, 2)
    assert split.partition.stage_of_unit["head"] == 2  # where steps find it that need all logits
    crossing = [edge.spec.shape for edge in split.step_plan().edges if (edge.source, edge.target) == (1, 2)]
    assert crossing == [(3, 8, WIDTH), (24,), (24,)]


@pytest.mark.by_day(4)
@pytest.mark.parametrize(("kind", "reason"), OTHER_STEPS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_step_that_needs_logits_otherwise_calls_the_whole_head(kind: type[Model], reason: str) -> None:
    recording = recording_of(kind)
    assert list(recording.record.first_calls()) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert recording.record.split_head is None
    assert re.search(reason, recording.about_head), recording.about_head


def test_a_head_that_is_called_twice_is_not_cut() -> None:
    assert recording_of(TwoCalls).record.split_head is None


def test_a_step_of_another_kind_calls_the_whole_head_where_its_weight_is() -> None:
    split = split_model(recording_of(Model), 3, ["blocks.1", "head[24:48]"])
    plan = split.plans.plan("validation", recorded(split.module, BATCH, "validation_step"), with_gradients=False)
    assert [call.unit for call in plan.record.calls][-1] == "head"
    assert [stage.stage for stage in plan.stages if len(plan.record.calls) - 1 in stage.owned_calls] == [2]


def test_auto_cuts_heads_that_are_heavy_and_wide() -> None:
    assert recording_of(Model, "auto").record.split_head is None  # few words
    assert recording_of(Model, False).record.split_head is None


@pytest.mark.parametrize("value", [True, 1, 0, 2.5, "yes"])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="split_head="):
        CutOptions(split_head=value)
