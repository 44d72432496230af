"""``lightning_pp.verify``: equal trainings are told to be equal, and of others the first difference."""

from __future__ import annotations

import re
from functools import partial

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor
from verified_modules import (
    Contrastive,
    Counting,
    CountsProcesses,
    Data,
    Double,
    Net,
    Normalised,
    NotesProcesses,
    NumPyRate,
    OwnGenerator,
    ReadsWorldSize,
    Sampling,
    ShuffledInPlace,
    UsesLogger,
    make_strategy,
)

import lightning_pp
from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError


def test_a_plain_module_is_equal_through_a_checkpoint_and_with_states_of_callbacks() -> None:
    result = lightning_pp.verify(Net(), Data(), make_strategy(), steps=3, callbacks=[Counting()])
    assert result.equal and result.differences == [] and result.failure == "", str(result)
    # three batches before the checkpoint and three after it, on two ranks; weights are those of the whole module
    num_parameters = len(list(Net().parameters()))
    assert result.compared["loss"] == 2 * 3 * 2
    assert result.compared["gradient"] == result.compared["weight"] == 2 * 3 * num_parameters
    # Adam keeps a step and two averages of each
    assert result.compared["optimizer state"] == 3 * 2 * 3 * num_parameters
    assert result.compared["state of a callback"] == 2 * 2 and result.compared["buffer"] == 2 * 3
    assert result.compared["checkpoint"] >= 2 * (num_parameters + 1 + 3 * num_parameters)
    assert max(result.largest.values()) < 1e-12
    text = str(result)
    assert "note: dropout is 0 in 4 modules" in text and text.endswith("EQUAL: the pipeline trains as one device does.")


def test_what_needs_a_logger_finds_one_and_a_loader_with_a_generator_of_its_own_resumes_alike() -> None:
    result = lightning_pp.verify(UsesLogger, OwnGenerator, make_strategy, steps=2, callbacks=[LearningRateMonitor()])
    assert result.equal, str(result)
    assert result.compared["buffer"] == 2 * 2 * (2 + 4)  # also those that are not saved


def test_other_batches_of_a_resumed_training_are_told_as_the_cause() -> None:
    result = lightning_pp.verify(Net, ShuffledInPlace, make_strategy, steps=2)
    first = result.differences[0]
    assert (first.place, first.kind) == ("resumed training, batch_idx=0", "batch")
    assert result.causes[0].startswith("Known cause: the two trainings read other batches.")


def test_the_first_difference_is_told_with_both_numbers() -> None:
    result = lightning_pp.verify(ReadsWorldSize, Data, make_strategy, steps=3)
    assert not result.equal and result.failure == ""
    first = result.differences[0]
    assert (first.place, first.kind, first.name) == ("training, batch_idx=2", "loss", "loss")
    assert float(first.found) == pytest.approx(2 * float(first.expected), rel=1e-9)
    gradients = [each for each in result.differences if each.kind == "gradient"]
    assert {each.stage for each in gradients} == {"0", "1"}
    assert gradients[0].place == first.place and gradients[0].name.startswith("first.weight[")
    told = r"DIFFERENT, first in training, batch_idx=2: loss loss: [\d.]+ on one device, [\d.]+ in the pipeline"
    assert re.search(told, str(result)), str(result)
    assert "No cause is known" in str(result)


def test_numbers_of_numpy_are_compared() -> None:
    result = lightning_pp.verify(NumPyRate, Data, make_strategy, steps=1)
    rate = next(each for each in result.differences if each.kind == "learning rate")
    assert (float(rate.expected), float(rate.found)) == (0.01, 0.02), str(result)


def test_draws_in_validation_are_told_as_a_cause() -> None:
    result = lightning_pp.verify(Sampling, Data, make_strategy, steps=2)
    assert {each.name for each in result.differences} == {"val_loss"}
    assert "Known cause: a step draws random numbers" in str(result), str(result)


def test_an_optimizer_state_that_differs_alone_is_told_by_name() -> None:
    result = lightning_pp.verify(NotesProcesses, Data, make_strategy, steps=3)
    assert {each.kind for each in result.differences} == {"optimizer state", "checkpoint"}
    first = result.differences[0]
    assert (first.place, first.kind, first.stage) == ("training, batch_idx=2", "optimizer state", "0")
    assert first.name == "first.weight.noted[0]" and (float(first.expected), float(first.found)) == (1.0, 2.0)
    last = [each for each in result.differences if each.name.startswith("last.weight.noted")]
    assert last and all(each.stage == "1" for each in last)
    told = "optimizer state first.weight.noted[0] (stage 0): 1 on one device, 2 in the pipeline, relative difference 1"
    assert f"DIFFERENT, first in training, batch_idx=2: {told}" in str(result)
    # momentum_buffer, steps and noted of each weight; the last for one batch of the training, all of the resumed one
    num_parameters = len(list(Net().parameters()))
    assert result.compared["optimizer state"] == (2 * 6 + 4) * num_parameters


def test_buffers_that_are_not_saved_are_compared_where_they_are_used() -> None:
    other = lightning_pp.verify(CountsProcesses, Data, make_strategy, steps=2)
    assert {each.kind for each in other.differences} == {"buffer"}
    first = other.differences[0]
    # the module's hook of the first batch runs after the callbacks that write down
    assert (first.place, first.name, first.stage) == ("training, batch_idx=1", "blocks.0.seen[1]", "0")
    assert (float(first.expected), float(first.found)) == (1.0, 2.0)
    assert next(each for each in other.differences if each.name == "blocks.3.seen[1]").stage == "1"


def test_what_the_strategy_refuses_is_told() -> None:
    result = lightning_pp.verify(Contrastive(), Data(), make_strategy(), steps=2)
    assert not result.equal and result.differences == []
    assert "the pipeline ends with SplitError: The loss of training_step" in result.failure
    assert "whole_batch_loss=True" in str(result)


def test_a_module_that_float64_fails_in_is_compared_as_the_run_would_train_it() -> None:
    result = lightning_pp.verify(Double(), Data(), make_strategy(), steps=2, trainer={"precision": "32-true"})
    assert result.equal, str(result)
    assert any(
        note.startswith("precision=32-true, since float64 fails on one device: RuntimeError") for note in result.notes
    )
    assert any("relative differences up to 0.0001 count as equal" in note for note in result.notes)


def test_what_cannot_be_sent_to_the_processes_is_refused() -> None:
    class Local(Net):
        pass

    with pytest.raises(
        ConfigurationError, match=r"module=Local cannot be sent .* verify\(\.\.\., make_module, \.\.\.\)"
    ):
        lightning_pp.verify(Local(), Data(), make_strategy())
    with pytest.raises(ConfigurationError, match="devices=1 must be 2 or more"):
        lightning_pp.verify(Net(), Data(), make_strategy(), devices=1)


def test_a_known_cause_is_told() -> None:
    result = lightning_pp.verify(Normalised(), Data(), partial(PipelineParallelStrategy, 3, 1, 4), devices=3, steps=2)
    first = result.differences[0]
    assert (first.place, first.kind) == ("training, batch_idx=0", "loss")
    assert {each.stage for each in result.differences if each.kind == "gradient"} == {"0", "1", "2"}
    assert any(each.kind == "buffer" and each.name.startswith("norm.running_mean") for each in result.differences)
    told = "The pipeline warned: BatchNorm normalises over microbatches of 2 samples, not over the batch"
    assert len(result.causes) == 1 and told in str(result)
