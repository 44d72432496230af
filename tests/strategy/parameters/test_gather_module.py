"""A module that was trained as a pipeline is an ordinary module again after ``gather_module``."""

from __future__ import annotations

import copy
import io
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from feature_parts import check_on_every_rank
from parity_run import QUIET, Layout, ParityData, Settings, make_module
from pipelined_fit import loader
from pool import WorkerPool
from small_models import WIDTH, Blocks
from torch import nn

from lightning_pp import PipelineParallelStrategy


class Recurrent(nn.Module):
    """A unit with a buffer, an extra state and parameters that torch also keeps in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("scale", torch.ones(()))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.lstm(x[:, None])[0][:, 0]

    def get_extra_state(self) -> dict[str, int]:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_calls = state["num_calls"]


class Rnns(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recurrent() for _ in range(4))
        self.double()


def fit(module: L.LightningModule, data: Any, strategy: Any, devices: int) -> L.Trainer:
    options: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0, "use_distributed_sampler": False}
    trainer = L.Trainer(**QUIET, **options, devices=devices, strategy=strategy, precision="64-true")
    trainer.fit(module, data)
    return trainer


def tree_of(module: nn.Module) -> dict[str, Any]:
    """What classes, attributes and hooks there are, and whether all names of a parameter mean one object."""
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    tied = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    of_trainer = {"_trainer", "_fabric", "_device_mesh", "_log_hyperparams"}
    children = {
        name: (
            type(child).__qualname__,
            sorted(set(vars(child)) - of_trainer),
            list(dict(child.named_parameters(recurse=False))),
            {key: len(value) for key, value in vars(child).items() if key.endswith("_hooks")},
        )
        for name, child in module.named_modules()
    }
    return {"tied": tied, "children": children}


def made(model: str) -> tuple[L.LightningModule, Any]:
    if model == "rnns":
        torch.manual_seed(3)
        return Rnns(), loader()
    settings = Settings(model, num_samples=16, two_groups=True)
    return make_module(settings), ParityData(settings)


def two_fits(layout: Layout | None, options: dict[str, Any], model: str, then: Layout | None) -> Any:
    """Fits one module in a Trainer, then in another; what it is like in between, and its weights."""
    module, data = made(model)
    strategy = "auto" if layout is None else layout.strategy(**options, check_first_batches=False)
    world_size = 1 if layout is None else layout.world_size
    fit(module, data, strategy, world_size)
    if isinstance(strategy, PipelineParallelStrategy):
        strategy.gather_module()
    tree = tree_of(module)
    copied = copy.deepcopy(module).state_dict()
    torch.save(module, io.BytesIO())
    between = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    second = "auto" if layout is None or then is None else then.strategy(**options, check_first_batches=False)
    trainer = fit(module, data, second, world_size)
    if isinstance(trainer.strategy, PipelineParallelStrategy):
        trainer.strategy.gather_module()
    assert list(copied) == list(module.state_dict())
    return {
        "tree": tree,
        "between": between,
        "after": {n: v for n, v in module.state_dict().items() if torch.is_tensor(v)},
    }


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("model", "layout", "then", "options"),
    [
        ("gpt2", Layout("1f1b", 2, 1, 2), Layout("zb_v", 2, 1, 2), {}),
        ("gpt2", Layout("zb_h1", 2, 2, 2), Layout("1f1b", 2, 2, 2), {"sharding": "full_shard"}),
        ("rnns", Layout("zb_h1", 2, 1, 2), Layout("1f1b", 2, 1, 2), {}),
        ("unet", Layout("1f1b", 2, 1, 2), Layout("1f1b", 2, 1, 2), {}),
    ],
    ids=str,
)
def test_a_second_trainer_goes_on_where_the_first_ended(
    pool: WorkerPool, model: str, layout: Layout, then: Layout, options: dict[str, Any]
) -> None:
    expected = check_on_every_rank(pool, two_fits, layout, options, model, then)
    assert any(not torch.equal(expected["between"][name], value) for name, value in expected["after"].items())


def refused_gathers(layout: Layout) -> list[str]:
    """What is said where there is nothing to gather, while a run goes on, and by a second Trainer without it."""
    said: list[str] = []
    (module, data), strategy = made("residual_mlp"), layout.strategy(check_first_batches=False)

    def told(action: Any) -> None:
        try:
            action()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    class Early(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            told(strategy.gather_module)

    trainer = L.Trainer(**QUIET, devices=2, strategy=strategy, max_epochs=1, callbacks=[Early()])
    told(strategy.gather_module)
    trainer.fit(module, data)
    told(lambda: fit(module, data, layout.strategy(check_first_batches=False), 2))
    strategy.gather_module()
    told(strategy.gather_module)
    return said


def test_what_cannot_be_gathered_is_told(pool: WorkerPool) -> None:
    for said in pool.run(refused_gathers, Layout("1f1b", 2, 1, 2), world_size=2):
        before, running, second, after = said
        assert before == after and "Strategy.setup builds it before training starts" in before
        assert running == "RuntimeError: gather_module() is for after a run, but this trainer is running."
        assert "call gather_module() of its strategy on every rank" in second
