"""Python looking at values: allowed inside units and at the end of the step, refused by line in between."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_parts import VOCAB, Block, Small, batches, next_token_loss
from one_process import compare, compare_evaluation
from torch import Tensor

from lightning_pp.errors import SplitError


def branch(h: Tensor) -> None:
    if h.abs().mean() > 10:
        raise AssertionError("not with these weights")


READS = {
    "branch": branch,
    "item": lambda h: h.sum().item(),
    "float": lambda h: float(h.detach().mean()),
    "numpy": lambda h: h.detach().numpy(),
    "asarray": lambda h: np.asarray(h.detach()).sum(),
    "tolist": lambda h: h[0, 0].tolist(),
    "format": lambda h: f"{h.mean():.3f}",
    "tensor_of_tensors": lambda h: torch.tensor([h.mean(), h.sum()]),
    "mask": lambda h: h[h > 0],
    "nonzero": lambda h: h.nonzero(),
    "unique": lambda h: h.unique(),
    "equal": lambda h: torch.equal(h, h),
}


class Reading(Small):
    """Looks at a value between units."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read = READS[read]

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for block in self.blocks:
            h = block(h)
            self.read(h)
        return next_token_loss(self.head(h), batch)


@pytest.mark.parametrize("read", READS)
def test_a_read_before_the_last_unit_is_refused_with_its_line(read: str) -> None:
    with pytest.raises(SplitError) as error:
        compare(lambda: Reading(read), batches(), 2)
    message = str(error.value)
    line = READS[read].__code__.co_firstlineno + (read == "branch")
    assert f"test_split_reads.py:{line} in " in message
    assert "blocks.0" in message and "'blocks.1' is called after it" in message
    assert "Move the read into a unit or after the last unit" in message
    assert "or name the reading module in units=" in message


class ReadingAtTheEnd(Small):
    """Does everything that needs data once all units have been called."""

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        assert isinstance(f"{h}", str)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        loss = next_token_loss(logits, batch)
        guesses = logits.argmax(-1)
        assert f"{loss:.3f}" and np.isfinite(logits.detach().numpy()).all()
        if loss > 0:
            self.log("positive", float(loss))
        assert sum(Counter(guesses.flatten().tolist()).values()) == batch.numel()
        counts = torch.bincount(guesses.flatten(), minlength=VOCAB)
        parts = guesses.flatten().sort().values.split(counts.tolist())
        self.log("parts", sum(len(part) for part in parts))
        self.log("distinct", len(guesses.unique()))
        self.log("right", logits[guesses == batch].mean() if (guesses == batch).any() else 0.0)
        self.log("both", torch.tensor([loss, loss.detach()]).sum())
        return loss


def test_everything_may_be_read_after_the_last_unit() -> None:
    compare(ReadingAtTheEnd, batches(), 3)
    compare_evaluation(ReadingAtTheEnd, batches()[0], 3)


def check(logits: Tensor) -> None:
    """Made-up data lie between 0 and 1."""
    if float(logits.min()) >= 0:
        raise ValueError("not even one is negative")


class Checking(Small):
    """The end of its steps cannot run on made-up data either."""

    checked_step = "validation_step"

    def step(self, batch: Any, name: str) -> Tensor:
        h = self.embedding(batch)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        if name == self.checked_step:
            check(logits.detach())
        return next_token_loss(logits, batch)

    def training_step(self, batch: Any) -> Tensor:
        return self.step(batch, "training_step")

    def validation_step(self, batch: Any) -> Tensor:
        return self.step(batch, "validation_step")


class CheckingInTraining(Checking):
    checked_step = "training_step"


def test_an_end_of_validation_that_no_dry_run_can_follow() -> None:
    compare_evaluation(Checking, batches()[0], 3)


class CheckingEdited(Checking):
    """What a unit returned is edited in place on its own stage, and used on a later one too."""

    def step(self, batch: Any, name: str) -> Tensor:
        first = self.blocks[0](self.embedding(batch))
        first *= 0.5
        h = self.blocks[1](first)
        h = self.blocks[3](self.blocks[2](h)) + first
        logits = self.head(h)
        if name == self.checked_step:
            check(logits.detach())
        return next_token_loss(logits, batch)


def test_edits_before_such_an_end() -> None:
    compare_evaluation(CheckingEdited, batches()[0], 2, split_points=["blocks.2"])


def test_such_an_end_of_training_is_refused_with_its_lines() -> None:
    with pytest.raises(SplitError) as error:
        compare(CheckingInTraining, batches(), 2)
    message = str(error.value)
    assert "ValueError: not even one is negative" in message
    assert "Before that, the step read values that depend on weights at" in message
    assert message.count("test_split_reads.py") == 2


def test_an_error_of_the_users_own_stays_as_it_is() -> None:
    class Mistaken(Small):
        def training_step(self, batch: Any) -> Tensor:
            return self.head(super().training_step(batch)[:, :3])

    with pytest.raises(IndexError, match="too many indices"):
        compare(Mistaken, batches(), 2)


def test_nothing_is_logged_about_attempts_that_fail(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="torch._subclasses.fake_tensor"):
        compare(ReadingAtTheEnd, batches(), 2)
    assert not caplog.records
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


class Clipping(Block):
    """Looks at its own values, and at shapes that hang on them."""

    def forward(self, x: Tensor) -> Tensor:
        norm = float(x.norm())
        x = x / norm if norm > 1.0 else x
        length = int((x.abs().mean((0, 2)) > -1).sum())
        large = x[:, :length].abs() > x.abs().mean()
        rows, columns, places = torch.where(large)
        assert len(x[large]) == len(rows)
        x = x.index_put((rows, columns, places), x[large] * 0.9)
        return super().forward(x)


class ReadingInside(Small):
    block = Clipping


def test_units_may_look_at_their_own_values() -> None:
    compare(ReadingInside, batches(), 3)


def test_units_that_need_data_are_run_on_made_up_data_and_keep_their_gradients() -> None:
    pipeline, _ = compare(ReadingInside, batches(), 3)
    record = pipeline.split.record
    assert all(call.flops > 0 and call.memory.saved for call in record.calls[1:])
    for index in range(1, len(record.calls)):
        (value,) = record.calls[index].reads.values
        assert value.call == index - 1
        assert record.gradient_sources[type(value)(index, 0)] == {value}


class Pruning(Block):
    """Drops tokens: how many hangs on their values."""

    def forward(self, x: Tensor) -> Tensor:
        score = x.abs().mean((0, 2))
        return super().forward(x[:, score > score.median()][:, : int(x[0, 0, 0] > 0.5) + 1])


def test_an_output_shape_that_depends_on_weights_is_refused() -> None:
    class ReadingPruned(Small):
        def __init__(self) -> None:
            super().__init__()
            self.pruning = Pruning()

        def training_step(self, batch: Any) -> Tensor:
            h = self.embedding(batch)
            for block in self.blocks:
                h = block(h)
            return self.head(self.pruning(h)).pow(2).mean()

    with pytest.raises(SplitError, match=r"output shapes of the unit 'pruning' depend on weights .*\(3, \d, 8\)"):
        compare(ReadingPruned, batches(), 2)


def test_a_unit_that_fails_on_made_up_data_is_named() -> None:
    class Picky(Block):
        def forward(self, x: Tensor) -> Tensor:
            if float(x.mean()) > 0.2:  # made-up data lie between 0 and 1
                raise FloatingPointError("the mean is too large")
            x = x[:, x.abs().mean((0, 2)) >= 0]
            return super().forward(x)

    class Choosy(Small):
        block = Picky

    with pytest.raises(
        SplitError, match=r"unit 'blocks.0' cannot run without the values of its inputs.*FloatingPointError"
    ):
        compare(Choosy, batches(), 2)


def test_loss_functions_of_the_batch_alone_are_no_reads() -> None:
    """Branches, sizes and prints of what comes from the batch alone work everywhere."""

    class BatchOnly(Small):
        def training_step(self, batch: Any) -> Tensor:
            lengths = (batch > 3).sum(1)
            longest = int(lengths.max())
            assert f"{lengths.float().mean():.2f}" and lengths.tolist()
            h = self.embedding(batch)
            for block in self.blocks:
                h = block(h) if longest > 0 else h
            return F.cross_entropy(self.head(h)[batch > 3], batch[batch > 3])

    compare(BatchOnly, batches(), 3)
