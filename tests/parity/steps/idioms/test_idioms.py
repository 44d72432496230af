"""Every way to write a step trains as on one device, or ends in the first batch with the reason.

Of each step on a list: losses, all logged values, outputs and weights are compared with a plain Trainer on one device,
in float64 to 1e-9, on every rank and after every batch. Or the error is, with the line it names.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import idiom_refusals
import pytest
import torch
from feature_parts import assert_equal_trees
from idiom_parts import run_idiom
from idiom_refusals import REFUSED, DropsAndDraws, EqualSamples, MixesSamples, NormalisesBatches
from idiom_steps import STEPS
from parity_run import Layout
from pool import WorkerError, WorkerPool

ADDITIVE = [name for name in STEPS if name not in REFUSED]
LAYOUTS = [
    Layout("1f1b", 2, 1, 4),
    Layout("zb_h1", 3, 1, 3),
    Layout("zb_v", 2, 1, 4),
    Layout("1f1b", 2, 2, 2),
    Layout("gpipe", 1, 2, 2),
]
TURNS = (0, 1, 2, 4, 3, 0, 2, 4)  # layouts of two ranks come twice: they take half as long
ALONE = ["compiled_function", "logs_of_all_kinds", "dict_with_parts", "sum_of_torch", "masked_mean"]
ADDED = [name for name in ADDITIVE if name not in ALONE]
BY_DAY = ALONE + ["+".join(ADDED[begin : begin + 5]) for begin in range(0, len(ADDED), 5)]


def check(layout: Layout, found: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Compares what the ranks found with what one device finds."""
    weights: dict[str, Any] = {}
    for rank, outcome in enumerate(found):
        weights.update(outcome["weights"])
        for batch, reference in zip(outcome["batches"], expected["batches"], strict=True):
            if layout.replicas == 1:
                assert_equal_trees(batch, reference, path=f"rank {rank}")
            else:  # what a step returns is the replica's
                assert_equal_trees(batch["logged"], reference["logged"], path=f"rank {rank}")
    assert_equal_trees(weights, expected["weights"])


def trained(layout: Layout, names: Sequence[str]) -> list[dict[str, Any]]:
    return [run_idiom(layout, name) for name in names]


@pytest.mark.by_day(2)
@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=lambda number: str(LAYOUTS[number]))
def test_losses_that_add_up_are_those_of_one_device(pool: WorkerPool, number: int) -> None:
    """By day: most are added up in fives; each sum has one of the layouts, in turn in the same processes."""
    layout, names = LAYOUTS[number], [name for name, turn in zip(BY_DAY, cycle(TURNS)) if turn == number]
    ranks = pool.run(trained, layout, names, world_size=layout.world_size, timeout=240)
    for name, *found in zip(names, *ranks, strict=True):
        check(layout, found, run_idiom(None, name))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ADDITIVE)
def test_a_loss_that_adds_up_is_that_of_one_device(pool: WorkerPool, name: str, layout: Layout) -> None:
    found = pool.run(run_idiom, layout, name, world_size=layout.world_size, timeout=120)
    check(layout, found, run_idiom(None, name))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["masked_mean_with_item", "sum_and_mean_added", "imported_by_name"])
def test_accumulation_and_clipping(pool: WorkerPool, name: str) -> None:
    layout, options = Layout("zb_h1", 2, 1, 4), {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}
    found = pool.run(run_idiom, layout, name, world_size=layout.world_size, timeout=120, **options)
    check(layout, found, run_idiom(None, name, **options))


def refused(pool: WorkerPool, layout: Layout, step: str, make: Any = None, num_ranks: int | None = None) -> str:
    """The message with which every rank (or ``num_ranks``) ends in the first batch."""
    arguments = (layout, step) if make is None else (layout, step, make)
    with pytest.raises(WorkerError) as caught:
        pool.run(run_idiom, *arguments, world_size=layout.world_size, timeout=120)
    said = re.findall(r"^lightning_pp\.errors\.SplitError: (.*)$", str(caught.value), re.MULTILINE)
    assert len(said) == (num_ranks or layout.world_size) and len(set(said)) == 1, str(caught.value)
    return str(said[0])


# the function that couples the samples, and the words of the line that it stands in
COUPLED_BY = {
    "in_batch_contrastive": ("matmul", "logits = z @"),
    "root_of_a_mean": ("sqrt", 'batch["soft"]).sqrt()'),
    "batch_hard_triplets": ("sub", "z[:, None] - z[None]"),
    "dice_over_the_batch": ("div", "return 1 - (2 * (p * t)"),
    "variance_between_samples": ("var", "z.var(0)"),
    "coupled_before_the_first_unit": ("median", '["x"].median(0)'),
}


def line_with(words: str) -> int:
    """Number of the line of the refused steps that holds ``words``."""
    lines = inspect.getsource(idiom_refusals).splitlines()
    (number,) = [index for index, line in enumerate(lines, 1) if words in line]
    return number


@pytest.mark.by_day(3)
@pytest.mark.parametrize("step", COUPLED_BY)
@pytest.mark.parametrize("layout", [Layout("1f1b", 2, 1, 4), Layout("zb_v", 2, 1, 2)], ids=str)
def test_a_loss_over_the_batch_is_refused_with_its_line(pool: WorkerPool, step: str, layout: Layout) -> None:
    message = refused(pool, layout, step)
    function, words = COUPLED_BY[step]
    assert message.startswith("The loss of training_step (")
    assert f"idiom_refusals.py:{line_with(words)} in {step} by `{function}`" in message
    advice = "on_after_batch_transfer" if step == "coupled_before_the_first_unit" else "whole_batch_loss=True"
    assert advice in message and "check_first_batches=False" in message


def test_a_refusal_tells_both_numbers(pool: WorkerPool) -> None:
    """They are what the step gives on one device for the first microbatch and for its halves."""
    message = refused(pool, Layout("1f1b", 2, 1, 2), "in_batch_contrastive")
    found = re.search(r"it is ([\d.]+) for 4 samples in one piece and ([\d.]+) for the same samples as 2 \+ 2", message)
    assert found is not None
    from idiom_parts import TokenClassifier, Tokens
    from torch.utils.data import default_collate

    torch.manual_seed(5)
    module, data = TokenClassifier("in_batch_contrastive").double(), Tokens()

    def loss(*indices: int) -> float:
        return float(STEPS["in_batch_contrastive"](module, default_collate([data[index] for index in indices])))

    assert float(found[1]) == pytest.approx(loss(0, 1, 2, 3), rel=1e-5)
    assert float(found[2]) == pytest.approx((loss(0, 1) + loss(2, 3)) / 2, rel=1e-5)


def test_samples_that_a_unit_couples_are_refused_with_its_name(pool: WorkerPool) -> None:
    message = refused(pool, Layout("1f1b", 2, 1, 4), "masked_mean", MixesSamples)
    assert "The samples are coupled in the unit 'blocks.1'" in message and "GroupNorm" in message


def test_a_root_is_refused_also_where_numbers_agree(pool: WorkerPool) -> None:
    """In float32, microbatches of equal samples: the root of the mean is the mean of the roots, to the last bit."""
    message = refused(pool, Layout("1f1b", 2, 1, 4), "root_of_a_mean", EqualSamples, num_ranks=1)  # the last stage
    assert message.startswith("The loss of the step does not add up over microbatches: ")
    assert "idiom_refusals.py" in message and "calls `sqrt`" in message


def warned(layout: Layout, step: str, make: Any = None) -> tuple[dict[str, Any], list[str]]:
    """A run, and the warnings of this package."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = run_idiom(layout, step) if make is None else run_idiom(layout, step, make)
    said = [str(warning.message) for warning in caught]
    about = ("check_first_batches", "BatchNorm", "has another value after microbatches")
    return outcome, [text for text in said if any(words in text for words in about)]


def test_an_attribute_that_does_not_add_up_is_told_by_name(pool: WorkerPool) -> None:
    told = pool.run(warned, Layout("1f1b", 2, 1, 4), "largest_batch_on_the_module", world_size=2)[0][1]
    assert len(told) == 1 and "The attribute 'largest' that training_step changes" in told[0]
    assert "2 after the samples in two parts, 4 after the same samples in one piece" in told[0]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", [Layout("1f1b", 2, 1, 4), Layout("zb_h1", 2, 2, 2)], ids=str)
def test_a_logged_quotient_of_numbers_of_python_is_told_with_its_line(pool: WorkerPool, layout: Layout) -> None:
    (_, (text,)), *_ = pool.run(warned, layout, "quotient_by_a_number_in_a_log", world_size=layout.world_size)
    assert text.startswith("The value that training_step logs as 'share' (")
    line = line_with('log("share"')
    assert f"idiom_refusals.py:{line} in quotient_by_a_number_in_a_log) depends on how" in text
    assert "no int(), no .item(), and mask.sum().clamp(min=1) for max(int(mask.sum()), 1)" in text


def test_a_logged_value_that_does_not_add_up_is_told_and_training_goes_on(pool: WorkerPool) -> None:
    layout = Layout("1f1b", 2, 1, 4)
    found = pool.run(warned, layout, "deviation_in_a_log", world_size=2, timeout=120)
    outcome, (text,) = found[0]  # once, though two batches are checked
    assert "The value that training_step logs as 'spread'" in text
    assert f"idiom_refusals.py:{line_with('values.detach().std()')} in deviation_in_a_log by `std`" in text
    expected = run_idiom(None, "deviation_in_a_log")
    losses = [batch["outputs"] for batch in outcome["batches"]]
    assert_equal_trees(losses, [batch["outputs"] for batch in expected["batches"]])


def test_batch_norm_is_told_once_by_name_and_trains(pool: WorkerPool) -> None:
    outcome, said = pool.run(warned, Layout("1f1b", 2, 1, 4), "masked_mean", NormalisesBatches, world_size=2)[0]
    assert len(outcome["batches"]) == 2
    assert len(set(said)) == 1 and "'blocks.1.norm'" in said[0] and "microbatches of 2 samples" in said[0]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_drawn_numbers_raise_no_false_alarm(pool: WorkerPool, layout: Layout) -> None:
    """Dropout in units, noise and masks drawn in the step: nothing is said, and losses stay finite."""
    found = pool.run(warned, layout, "masked_mean", DropsAndDraws, world_size=layout.world_size, timeout=120)
    for outcome, said in found:
        assert not said
        assert all(0 < batch["outputs"]["loss"] < 10 for batch in outcome["batches"])


def unchecked(layout: Layout, step: str) -> list[Any]:
    from idiom_parts import Notes, TokenClassifier
    from lightning.pytorch import Trainer
    from parity_run import QUIET

    torch.manual_seed(5)
    notes = Notes()
    strategy = replace(layout).strategy(check_first_batches=False)
    trainer = Trainer(
        **QUIET, precision="64-true", max_epochs=1, devices=layout.world_size, strategy=strategy,
        callbacks=[notes], use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(TokenClassifier(step))
    return notes.batches


def test_the_check_can_be_turned_off(pool: WorkerPool) -> None:
    found = pool.run(unchecked, Layout("1f1b", 2, 1, 4), "in_batch_contrastive", world_size=2, timeout=120)
    assert len(found[0]) == 2
    expected = run_idiom(None, "in_batch_contrastive")["batches"]
    assert abs(found[0][0]["outputs"]["loss"] - expected[0]["outputs"]["loss"]) > 0.1  # what the check is there for
