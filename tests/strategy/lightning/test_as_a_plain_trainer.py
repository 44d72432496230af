"""What a user may do with a Trainer besides training, with one stage as with a plain Trainer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from parity_run import QUIET, Layout
from pipelined_fit import loader
from pool import WorkerPool
from small_models import Blocks

from lightning_pp import PipelineParallelStrategy


def trainer(strategy: Any) -> L.Trainer:
    return L.Trainer(**{**QUIET, "devices": 1, "max_epochs": 2}, strategy=strategy)


def pickled(run: L.Trainer) -> L.Trainer:
    found: L.Trainer = pickle.loads(pickle.dumps(run))
    return found


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_of_a_trainer_train_before_and_after_a_fit(copied: Any) -> None:
    found = []
    for strategy in ("auto", PipelineParallelStrategy(pipeline_parallel_size=1)):
        run, model = copied(trainer(strategy)), Blocks()
        run.fit(model, loader(), loader(seed=2))
        again = copy.deepcopy(run)  # Lightning's loops cannot be pickled after a run
        again.fit_loop.max_epochs = 3
        again.fit(again.lightning_module, loader())
        found.append((again.lightning_module.state_dict(), again.global_step, run.global_step, model.state_dict()))
    (again, *steps, weights), (expected_again, *expected_steps, expected) = found
    assert steps == expected_steps == [9, 6]
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert all(torch.equal(again[name], value) for name, value in expected_again.items())


@pytest.mark.nightly
def test_a_compiled_module_trains_with_one_stage() -> None:
    found = []
    for strategy in ("auto", PipelineParallelStrategy(pipeline_parallel_size=1)):
        model, run = Blocks(), trainer(strategy)
        torch.compiler.reset()  # no code of other tests
        compiled = torch.compile(model, backend="aot_eager")
        run.fit(compiled, loader(), loader(seed=2))
        run.validate(compiled, loader(seed=2), verbose=False)
        found.append((model.state_dict(), dict(run.callback_metrics)))
    (expected, metrics), (weights, values) = found
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert values.keys() == metrics.keys() and all(torch.equal(values[name], metrics[name]) for name in metrics)


def fit_compiled() -> str:
    with pytest.raises(RuntimeError, match="Using a compiled model is incompatible") as error:
        L.Trainer(**QUIET, devices=2, max_epochs=1, strategy=Layout("1f1b", 2, 1, 2).strategy()).fit(
            torch.compile(Blocks(), backend="aot_eager"), loader()
        )
    return str(error.value)


@pytest.mark.nightly
def test_several_stages_refuse_a_compiled_module(pool: WorkerPool) -> None:
    texts = pool.run(fit_compiled, world_size=2)
    assert len(texts) == 2 and all("avoid passing in compiled model" in text for text in texts)
