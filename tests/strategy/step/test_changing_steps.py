"""Steps that call other units late in a training, by whatever a step may go by: each trains as on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from extra_steps import Losses
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.strategy.step.progress import reads_batch_idx

NUM_BATCHES, LATE = 7, 5


class Changing(Blocks):
    """Calls its third block in some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.held = {"count": 0}
        self.elsewhere: Any = None

    def uses_third(self, batch: Any, batch_idx: int) -> bool:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = batch["x"]
        for number, block in enumerate(self.blocks):
            if number != 2 or self.uses_third(batch, batch_idx):
                h = h + torch.tanh(block(h))
        return nn.functional.mse_loss(self.head(h).squeeze(-1), batch["y"])


class ByBit(Changing):
    def uses_third(self, batch: Any, batch_idx: int) -> bool:
        return bool(batch_idx & 1)


class InASet(Changing):
    def uses_third(self, batch: Any, batch_idx: int) -> bool:
        return batch_idx in {3, 5}


class ByDivmod(Changing):
    def uses_third(self, batch: Any, batch_idx: int) -> bool:
        return divmod(self.global_step, 3)[1] == 2


class ByEpoch(Changing):
    def uses_third(self, batch: Any, batch_idx: int) -> bool:
        return self.trainer.current_epoch in {1, 7}


class ByIndexUnderAnotherName(Changing):
    def training_step(self, batch: Any, number: int) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, number)

    def uses_third(self, batch: Any, batch_idx: int) -> bool:
        return [False, True, False][batch_idx % 3]


class ByCounter(Changing):
    def uses_third(self, batch: Any, batch_idx: int) -> bool:
        return self.count >= LATE

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1


class ByEntryOfADict(ByCounter):
    def uses_third(self, batch: Any, batch_idx: int) -> bool:
        return self.held["count"] >= LATE

    def on_train_batch_end(self, *args: Any) -> None:
        self.held["count"] += 1


class ByValue(Changing):
    def uses_third(self, batch: Any, batch_idx: int) -> bool:
        return bool((batch["number"] >= LATE).all())


class ByText(Changing):
    def uses_third(self, batch: Any, batch_idx: int) -> bool:
        return str(LATE) in batch["text"]


class UpdatesParameters(ByCounter):
    """Whose step keeps an average of a parameter in another."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.gain.data.mul_(0.9).add_(self.head.weight.data[0], alpha=0.1)
        return super().training_step({**batch, "x": batch["x"] * self.gain}, batch_idx)


class KeepsATrainer(Changing):
    """Asks a trainer that it does not get from the module, and nothing else of how far the training is."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, 0)

    def uses_third(self, batch: Any, batch_idx: int) -> bool:
        return self.elsewhere[0].global_step >= LATE  # type: ignore[no-any-return]


num_batches_ended = 0


class ByGlobal(Changing):
    def uses_third(self, batch: Any, batch_idx: int) -> bool:
        return num_batches_ended % 5 == 3

    def on_train_batch_end(self, *args: Any) -> None:
        global num_batches_ended
        num_batches_ended += 1

    def on_fit_start(self) -> None:
        global num_batches_ended
        num_batches_ended = 0


CHANGING: list[type[Changing]] = [ByBit, ByEpoch, ByCounter, ByValue, UpdatesParameters]
MORE_CHANGING: list[type[Changing]] = [InASet, ByDivmod, ByIndexUnderAnotherName, ByEntryOfADict, ByText]


def batches(*, with_text: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_BATCHES, 4, 8, generator=generator)
    held = [
        {
            "x": x[n],
            "y": x[n].sum(-1).tanh(),
            "number": torch.full((4,), n),
            **({"text": f"batch {n}"} if with_text else {}),
        }
        for n in range(NUM_BATCHES)
    ]
    return DataLoader(held, batch_size=None)  # type: ignore[arg-type]


def train(kinds: list[type[Changing]], pipelined: bool, **given: Any) -> list[tuple[list[float], dict[str, Tensor]]]:
    """In a worker: for each kind of module the losses, and the weights that the rank holds."""
    runs = []
    for kind in kinds:
        module, losses = kind(), Losses()
        options: dict[str, Any] = {"precision": "64-true", "callbacks": [losses], "max_epochs": 1 + (kind is ByEpoch)}
        strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, **given)
        run = trainer(2, strategy, **options) if pipelined else trainer(1, "auto", **options)
        module.elsewhere = [run]
        run.fit(module, batches(with_text=kind is ByText))
        runs.append((losses.found, {name: weight.detach().clone() for name, weight in module.named_parameters()}))
    return runs


@pytest.mark.parametrize(
    "kinds", [CHANGING, pytest.param(MORE_CHANGING, marks=pytest.mark.nightly)], ids=["usual", "more"]
)
def test_each_trains_as_on_one_device(pool: WorkerPool, kinds: list[type[Changing]]) -> None:
    check_against_one_device(pool, kinds)


def check_against_one_device(pool: WorkerPool, kinds: list[type[Changing]], **given: Any) -> None:
    [expected] = pool.run(train, kinds, False, world_size=1, timeout=120)
    ranks = pool.run(train, kinds, True, world_size=2, timeout=280, **given)
    for number, (kind, (losses, weights)) in enumerate(zip(kinds, expected, strict=True)):
        assert len(losses) == NUM_BATCHES * (1 + (kind is ByEpoch))
        for rank in ranks:
            assert rank[number][0] == pytest.approx(losses, rel=1e-9), kind.__name__
        held = {**ranks[0][number][1], **ranks[1][number][1]}
        assert held.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(held[name], weight, rtol=1e-9, atol=1e-12, msg=f"{kind.__name__}: {name}")


def test_a_step_that_depends_on_what_is_not_seen_trains_if_each_microbatch_is_rehearsed(pool: WorkerPool) -> None:
    check_against_one_device(pool, [KeepsATrainer, ByGlobal], dynamic_step=True)


def train_with_a_hidden_trainer() -> None:
    module, run = KeepsATrainer(), trainer(precision="64-true")
    module.elsewhere = [run]
    run.fit(module, batches(with_text=False))


def test_a_trainer_that_the_module_does_not_give_is_refused_with_the_line(pool: WorkerPool) -> None:
    report = pool.run(train_with_a_hidden_trainer, world_size=2, timeout=60, expect_failure=True)
    messages = [str(failure) for failure in report.failures]
    assert any(
        "test_changing_steps.py" in message
        and "called unit 'blocks.2', but the recorded step called 'blocks.3' there" in message
        and "set dynamic_step=True on the strategy" in message
        for message in messages
    ), messages


def wrapped(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def call(self: Any, *args: Any) -> Any:
        return step(self, *args)

    return call


class Steps(pl.LightningModule):
    """Steps that may look at an index, and steps that do not."""

    def names_it(self, batch: Any, batch_idx: int) -> Any:
        return batch if batch_idx & 1 else None

    def names_it_otherwise(self, batch: Any, i: int) -> Any:
        return [i for _ in batch]

    def hands_it_on(self, batch: Any, batch_idx: int) -> Any:
        return self.names_it(batch, batch_idx)

    def has_it_in_a_closure(self, batch: Any, batch_idx: int) -> Any:
        return lambda: batch_idx

    def looks_at_locals(self, batch: Any, batch_idx: int) -> Any:
        return locals()

    def takes_anything(self, *args: Any) -> Any:
        return args[1]

    is_wrapped = wrapped(names_it)

    def ignores_it(self, batch: Any, batch_idx: int) -> Any:
        return self.ignores_it_too(batch, 0)

    def ignores_it_too(self, batch: Any, _: int) -> Any:
        batch_idx = 3
        return batch + batch_idx

    def has_none(self, batch: Any) -> Any:
        return batch


@pytest.mark.parametrize("name", [name for name, held in vars(Steps).items() if callable(held)])
def test_a_step_may_look_at_an_index_that_its_code_reads(name: str) -> None:
    assert reads_batch_idx(getattr(Steps(), name)) is not name.startswith(("ignores", "has_none"))
