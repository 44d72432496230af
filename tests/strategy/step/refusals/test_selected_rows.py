"""Rows that values of the batch select: sums over them train as on one device, or are refused before an update."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from extra_steps import Losses, Step, fitted
from parity_run import QUIET, Layout
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

LAYOUT = Layout("zb_h1", 2, 1, 4)
SINGLE = Layout("zb_h1", 2, 1, 8)  # one sample in a microbatch


class SelectsRareRows(Step):
    """Adds up rows of which the first two batches have none."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return h[x[:, 7] > 1.4].square().sum() / h.shape[1]


class SelectsRows(Step):
    """The second step is learned anew, when its first microbatch selects a row and the second none."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        total = h[x[:, 0] > 0].square().sum() / h.shape[1]
        return total + (h.square().sum() / 64 if self.trainer.global_step >= 1 else h.abs().mean())


class SelectsByAMask(SelectsRareRows):
    """The advice of the error."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return (h.square() * (x[:, 7:] > 1.4)).sum() / h.shape[1]


class SelectsBeforeAUnit(Step):
    """The last block sees only rows of which the first two batches have none."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        h = x
        for block in self.blocks[:-1]:
            h = h + torch.tanh(block(h))
        rows = self.blocks[-1](h[x[:, 7] > 1.4])
        return h.square().mean() + rows.square().sum() / h.shape[1]


def trained(kind: type[Step], layout: Layout, **options: Any) -> list[float]:
    return fitted(kind, layout, 4, **options)[0]


class SelectsIfAny(SelectsRareRows):
    """A mean in a branch that no microbatch takes until some row is selected."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        mask = x[:, 7] > 1.4
        return h[mask].square().mean() if mask.any() else h.sum() * 0


class CutsAtACount(SelectsRareRows):
    """Adds up rows up to a number that Python has of the batch, 0 in the first two batches."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return h[: int((x[:, 7] > 1.4).sum())].square().sum() / h.shape[1]


class DividesByAtLeastOne(SelectsRareRows):
    """Divides by a number of Python, which is 1 for a microbatch of which nothing is counted."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        mask = x[:, 6] > 1.4
        return (h.square().mean(1) * mask).sum() / max(int(mask.sum()), 1)


class DividesByAtLeastOneOfMany(SelectsRareRows):
    """The same where every batch counts something."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        mask = x[:, 6] > 0.3
        return (h.square().mean(1) * mask).sum() / max(int(mask.sum()), 1)


class DividesByAtLeastOneRead(SelectsRareRows):
    """The same with ``item``: of one sample Python reads its share of the count of the batch, which may be below 1."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        mask = x[:, 6] > 0.3
        return (h.square().mean(1) * mask).sum() / max(mask.sum().item(), 1)


class DividesByLengthAndReads(SelectsRareRows):
    """Divides by the number of samples, and reads a number that is often 0."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        self.num_rare = int((x[:, 6] > 1.4).sum())
        return h.square().mean(1).sum() / len(x)


class DividesByLength(SelectsRareRows):
    """Divides by the number of samples, also where no row is selected."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return h[x[:, 6] > 1.4].square().sum() / len(x)


class ReducesTheFirst(SelectsRareRows):
    """Takes a mean over more first samples than a microbatch has, of a batch that has more."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return h[:3].square().mean()


class ReducesMost(SelectsRareRows):
    """More than the part of the batch has that is checked."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        return h[:6].square().mean()


class ReducesTheFirstBeforeAUnit(SelectsRareRows):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        first = x[:3]
        for block in self.blocks:
            first = first + torch.tanh(block(first))
        return first.square().mean()


class LooksAtTheFirst(SelectsRareRows):
    """Makes pictures of the first samples, of more than there are, and sees to all samples in the loss."""

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Tensor:
        pictures = (h[:64] - h[:64].min()) * 255 + h[:64].mean(1, keepdim=True)
        assert pictures.shape == h.shape
        return h[: len(h) + 60].square().mean() + h[: len(x)].abs().mean()


class BranchesBeforeAUnit(Step):
    """Calls a block if a row of the microbatch is selected; while the step runs, any() is that of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = x = batch[0] if isinstance(batch, (list, tuple)) else batch
        for index, block in enumerate(self.blocks):
            if index != len(self.blocks) - 2 or (x[:, 6] > 0.3).any():
                h = h + torch.tanh(block(h))
        return h.square().mean()


def cut(batch: Any, number: int) -> list[Any]:
    """The user's way to cut a batch, so nobody else can make a larger one of a microbatch."""
    return list(zip(*(tensor.chunk(number) for tensor in batch), strict=True))


def refusal(pool: WorkerPool, kind: type[Step], layout: Layout = LAYOUT, **options: Any) -> str:
    report = pool.run(trained, kind, layout, world_size=2, expect_failure=True, **options)
    return "\n".join(failure.message for failure in report.failures if failure)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize(("kind", "options"), [(SelectsRareRows, {"split_batch": cut}), (CutsAtACount, {})])
def test_as_many_rows_by_chance_are_no_proof(
    pool: WorkerPool, kind: type[Step], options: dict[str, Any], is_checked: bool
) -> None:
    text = "reduces rows that values of the batch select. It got [1, 8] now, but"
    assert text in refusal(pool, kind, check_first_batches=is_checked, **options)


def test_numbers_of_python_have_to_add_up(pool: WorkerPool) -> None:
    text = "with a small count this number is larger, so it does not add up over microbatches"
    assert text in refusal(pool, DividesByAtLeastOne)


@pytest.mark.parametrize("kind", [DividesByAtLeastOneOfMany, DividesByAtLeastOneRead])
def test_numbers_of_python_have_to_add_up_over_single_samples(pool: WorkerPool, kind: type[Step]) -> None:
    text = "with a small count this number is larger, so it does not add up over microbatches"
    assert text in refusal(pool, kind, layout=SINGLE)


def test_a_number_that_is_0_beside_the_loss_is_no_reason(pool: WorkerPool) -> None:
    expected = fitted(DividesByLengthAndReads, None, 4)[0]
    for losses in pool.run(trained, DividesByLengthAndReads, SINGLE, world_size=2):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_a_choice_of_units_by_any_of_the_batch_is_told_as_that(pool: WorkerPool) -> None:
    told = refusal(pool, BranchesBeforeAUnit, layout=SINGLE)
    assert "a sum, a count or any() over samples decides: these cover the whole batch while the step runs" in told


@pytest.mark.parametrize(("kind", "number"), [(ReducesTheFirst, 3), (ReducesTheFirstBeforeAUnit, 3), (ReducesMost, 6)])
def test_a_mean_of_the_first_samples_is_refused(pool: WorkerPool, kind: type[Step], number: int) -> None:
    text = f"reduces the first {number} samples. On one device these are {number} of the batch's"
    assert text in refusal(pool, kind)


@pytest.mark.by_day(3)
@pytest.mark.parametrize(
    "kind",
    [SelectsRows, SelectsByAMask, SelectsRareRows, SelectsBeforeAUnit, SelectsIfAny, DividesByLength, LooksAtTheFirst],
)
def test_sums_of_selected_rows_train_as_on_one_device(pool: WorkerPool, kind: type[Step]) -> None:
    expected = fitted(kind, None, 4)[0]
    for losses in pool.run(trained, kind, LAYOUT, world_size=2):
        assert losses == pytest.approx(expected, rel=1e-9)


class SelectsAmongLengths(Step):
    """Beside rows that it selects it adds up positions, as many as the batch is long."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(12, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = batch
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        rows, length = h[batch[..., 0] > 0.2], h.shape[1]
        return h.square().mean() + rows.square().sum() / 64 + 0.01 * self.positions[:length].square().sum()


def trained_on_lengths(layout: Layout | None) -> list[float]:
    generator, losses = torch.Generator().manual_seed(3), Losses()
    batches = [torch.randn(8, size, 8, generator=generator, dtype=torch.float64) for size in (5, 7, 5, 9, 12)]
    devices, strategy = (1, "auto") if layout is None else (layout.world_size, layout.strategy())
    options = {**QUIET, "devices": devices, "strategy": strategy, "precision": "64-true"}
    trainer = L.Trainer(**options, max_epochs=1, callbacks=[losses])
    trainer.fit(SelectsAmongLengths().double(), DataLoader(batches, batch_size=None))
    return losses.found


def test_what_grows_with_the_length_is_not_taken_for_selected_rows(pool: WorkerPool) -> None:
    expected = trained_on_lengths(None)
    for losses in pool.run(trained_on_lengths, LAYOUT, world_size=2):
        assert losses == pytest.approx(expected, rel=1e-9)
