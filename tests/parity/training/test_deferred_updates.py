"""``optimizer_sync="deferred"``: weights are bit for bit those of updates that wait for all ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError

WIDTH, BATCH, NUM_BATCHES = 8, 8, 10

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "foreach": False}),
    "sgd_foreach": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "foreach": False}),
    "adam_foreach": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
}


class Module(pl.LightningModule):
    """Blocks with dropout; some batches have larger gradients than others, and one may have none that are finite."""

    def __init__(self, optimizer: str, num_blocks: int = 4, bad_batch: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))  # noqa: E731
        self.blocks = nn.ModuleList([block() for _ in range(num_blocks)])
        self.optimizer = optimizer
        self.bad_batch = bad_batch
        self.norms: list[float] = []
        self.num_redone = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
        if batch_idx == self.bad_batch:
            x = x.clone()
            x.register_hook(lambda gradient: gradient * math.inf)
        loss = nn.functional.mse_loss(x.sum(-1), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        kind, settings = OPTIMIZERS[self.optimizer]
        optimizer = kind(self.parameters(), **settings)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Notes(pl.Callback):
    """Losses as they are logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * NUM_BATCHES, WIDTH, generator=generator)
    scale = torch.tensor([1.0, 1.0, 0.3, 3.0, 0.2, 0.2, 0.2, 4.0, 0.1, 0.1]).repeat_interleave(BATCH)
    return DataLoader(TensorDataset(x, x.sum(-1) * scale), batch_size=BATCH)


def fit(
    sync: str,
    optimizer: str = "adamw_foreach",
    *,
    schedule: str = "zb_h2",
    num_ranks: int = 2,
    clip: float | None = 20.0,
    bad_batch: int | None = None,
    settings: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    module: pl.LightningModule | None = None,
) -> dict[str, Any]:
    strategy = PipelineParallelStrategy(
        num_ranks,
        1,
        4,
        schedule=schedule,
        optimizer_sync=sync,
        **{"check_first_batches": False, **(settings or {})},  # type: ignore[arg-type]
    )
    kept: dict[str, Any] = {"callbacks": [], "enable_checkpointing": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=num_ranks, strategy=strategy, max_epochs=1, gradient_clip_val=clip,
        logger=False, enable_progress_bar=False, enable_model_summary=False, **{**kept, **(options or {})},
    )  # fmt: skip
    module = module or Module(optimizer, num_blocks=2 * num_ranks, bad_batch=bad_batch)
    trainer.fit(module, data())
    own = {name: p.detach().clone() for name, p in module.named_parameters() if type(p) is nn.Parameter}
    states = [dict(trainer.optimizers[0].state[p]) for p in trainer.optimizers[0].param_groups[0]["params"]]
    deferred = strategy.engine.deferred
    return {
        "weights": own,
        "states": states,
        "redone": None if deferred is None else deferred.num_redone,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "step": trainer.global_step,
    }


def both(optimizer: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return fit("immediate", optimizer, **arguments), fit("deferred", optimizer, **arguments)


def check_equal(ranks: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for immediate, deferred in ranks:
        assert immediate["weights"].keys() == deferred["weights"].keys()
        assert immediate["weights"]
        for name, weight in immediate["weights"].items():
            assert torch.equal(weight, deferred["weights"][name]), name
        for mine, theirs in zip(immediate["states"], deferred["states"], strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)
        assert immediate["lr"] == deferred["lr"]
        assert immediate["step"] == deferred["step"]


@pytest.mark.by_day(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipped_at_some_steps_and_not_at_others(pool: WorkerPool, optimizer: str) -> None:
    ranks = pool.run(both, optimizer, {}, world_size=2)
    check_equal(ranks)
    redone = {deferred["redone"] for _, deferred in ranks}
    assert len(redone) == 1
    assert 0 < redone.pop() < NUM_BATCHES - 2  # some updates were undone, and others were not


@pytest.mark.by_day(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v", "interleaved_zb", "auto"])
def test_schedules(pool: WorkerPool, schedule: str) -> None:
    settings = {"num_profiled_batches": 1000}  # what `auto` begins with stays, so that both run the same
    ranks = pool.run(both, "adam", {"schedule": schedule, "settings": settings}, world_size=2)
    check_equal(ranks)
    assert all(deferred["redone"] > 0 for _, deferred in ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["zb_h2", pytest.param("zb_v", marks=pytest.mark.nightly)])
def test_four_ranks(pool: WorkerPool, schedule: str) -> None:
    """The first rank runs several forwards before an update is settled, and runs them again."""
    ranks = pool.run(both, "adam", {"schedule": schedule, "num_ranks": 4, "clip": 40.0}, world_size=4)
    check_equal(ranks)
    assert all(0 < deferred["redone"] < NUM_BATCHES - 2 for _, deferred in ranks)


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.nightly), 20.0])
def test_updates_that_are_skipped(pool: WorkerPool, clip: float | None) -> None:
    arguments = {"bad_batch": 5, "clip": clip, "settings": {"on_nonfinite": "skip"}}
    ranks = pool.run(both, "adamw_foreach", arguments, world_size=2)
    check_equal(ranks)
    assert all(weight.isfinite().all() for _, deferred in ranks for weight in deferred["weights"].values())
    assert all(deferred["redone"] > 0 for _, deferred in ranks)


@pytest.mark.nightly
def test_accumulated_batches(pool: WorkerPool) -> None:
    ranks = pool.run(both, "adam", {"options": {"accumulate_grad_batches": 2}, "clip": 10.0}, world_size=2)
    check_equal(ranks)
    assert {deferred["step"] for _, deferred in ranks} == {NUM_BATCHES // 2}


class Tied(Module):
    """The first block's weight is also the last one's."""

    def __init__(self, optimizer: str, num_blocks: int = 4, bad_batch: int | None = None) -> None:
        super().__init__(optimizer, num_blocks, bad_batch)
        self.blocks[-1][0].weight = self.blocks[0][0].weight  # type: ignore[index]


def both_tied() -> tuple[dict[str, Any], dict[str, Any]]:
    return fit("immediate", module=Tied("adam")), fit("deferred", module=Tied("adam"))


def test_shared_parameters(pool: WorkerPool) -> None:
    check_equal(pool.run(both_tied, world_size=2))


class Normed(Module):
    """Its first blocks keep averages of what they have seen."""

    def __init__(self) -> None:
        super().__init__("adam")
        for place in (0, 1):
            self.blocks[place].append(nn.BatchNorm1d(WIDTH))  # type: ignore[operator]


def both_normed() -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    immediate, deferred = Normed(), Normed()
    outcomes = fit("immediate", module=immediate), fit("deferred", module=deferred)
    return outcomes, dict(immediate.named_buffers()), dict(deferred.named_buffers())


def test_buffers_see_each_batch_once(pool: WorkerPool) -> None:
    ranks = pool.run(both_normed, world_size=2)
    check_equal([outcomes for outcomes, *_ in ranks])
    for (_, deferred), expected, buffers in ranks:
        assert deferred["redone"] > 0
        assert expected.keys() == buffers.keys()
        assert len(buffers) == 6
        assert all(torch.equal(buffer, expected[name]) for name, buffer in buffers.items())


class ClipsItself(Module):
    """Clips in a hook, and notes what it has clipped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.gradient_clip_val is None:
            self.clip_gradients(optimizer, gradient_clip_val=5.0, gradient_clip_algorithm="norm")
        else:  # Lightning clips as well, later
            nn.utils.clip_grad_norm_(self.parameters(), 5.0)
        squares = [float(p.grad.square().sum()) for p in self.parameters() if p.grad is not None]
        self.norms.append(sum(squares))


def both_clip_themselves(clip: float | None) -> tuple[list[float], list[float], Any]:
    immediate, deferred = ClipsItself("adam"), ClipsItself("adam")
    outcomes = fit("immediate", module=immediate, clip=clip), fit("deferred", module=deferred, clip=clip)
    return immediate.norms, deferred.norms, outcomes


@pytest.mark.nightly
@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.nightly), 4.0])
def test_hooks_that_clip_see_clipped_gradients(pool: WorkerPool, clip: float | None) -> None:
    ranks = pool.run(both_clip_themselves, clip, world_size=2)
    check_equal([outcomes for *_, outcomes in ranks])
    for immediate, deferred, _ in ranks:
        assert immediate == deferred
        assert max(immediate) <= 25.1


# ---------------------------------------------------------------- what looks at weights sees settled ones


class Looks(pl.Callback):
    """Keeps a weight and a gradient after each batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        parameter = trainer.optimizers[0].param_groups[0]["params"][0]
        self.seen.append((parameter.detach().clone(), parameter.grad.clone()))


def looked_at() -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    immediate, deferred = Looks(), Looks()
    fit("immediate", options={"callbacks": [immediate]})
    fit("deferred", options={"callbacks": [deferred]})
    return immediate.seen, deferred.seen


def test_a_callback_sees_settled_weights(pool: WorkerPool) -> None:
    for immediate, deferred in pool.run(looked_at, world_size=2):
        assert len(immediate) == len(deferred) == NUM_BATCHES
        for mine, theirs in zip(immediate, deferred, strict=True):
            assert all(map(torch.equal, mine, theirs))


class Validates(Module):
    """Its validation loss depends on the weights."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
        self.log("val", nn.functional.mse_loss(x.sum(-1), y))

    def val_dataloader(self) -> Any:
        return DataLoader(data().dataset, batch_size=BATCH)


def saved_and_validated(folder: Path, sync: str) -> tuple[list[float], dict[int, list[Tensor]]]:
    """Validation losses after every two batches, and the weights in a checkpoint of every batch."""
    losses: list[float] = []

    class Module(Validates):
        def on_validation_epoch_end(self) -> None:
            losses.append(float(self.trainer.callback_metrics["val"]))

    saves = pl.callbacks.ModelCheckpoint(folder / sync, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    fit(
        sync,
        module=Module("adam"),
        settings={"save_distributed_checkpoint": False},
        options={
            "callbacks": [saves],
            "enable_checkpointing": True,
            "val_check_interval": 2,
            "num_sanity_val_steps": 0,
        },
    )
    saved = {}
    for step in range(1, NUM_BATCHES + 1):
        content = torch.load(folder / sync / f"step={step}.ckpt", weights_only=False)
        saved[step] = list(content["state_dict"].values())
    return losses, saved


def both_saved(folder: Path) -> tuple[Any, Any]:
    return saved_and_validated(folder, "immediate"), saved_and_validated(folder, "deferred")


def test_checkpoints_and_validation_have_settled_weights(pool: WorkerPool, tmp_path: Path) -> None:
    for (losses, saved), (deferred_losses, deferred_saved) in pool.run(both_saved, tmp_path, world_size=2):
        assert losses == deferred_losses
        assert len(losses) == NUM_BATCHES // 2
        for step, weights in saved.items():
            assert all(map(torch.equal, weights, deferred_saved[step])), step


# ---------------------------------------------------------------- what ends a run


def ended_by(sync: str, arguments: dict[str, Any]) -> str:
    try:
        fit(sync, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("clip", [20.0])
def test_an_error_names_the_batch_of_the_update(pool: WorkerPool, clip: float) -> None:
    arguments = {"bad_batch": 5, "clip": clip, "settings": {"on_nonfinite": "error"}}
    immediate = pool.run(ended_by, "immediate", arguments, world_size=2)
    deferred = pool.run(ended_by, "deferred", arguments, world_size=2)
    assert immediate == deferred
    assert all("batch 5 of epoch 0 (step 5)" in message for message in deferred)


class CountsForwards(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards = getattr(self, "num_forwards", 0) + 1
        return super().forward(x)


class Renormalised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.999)
        return super().forward(x)


class Steps(Module):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class Own(torch.optim.SGD):
    pass


def refused(what: str) -> str:
    module: Module = Module("sgd")
    options: dict[str, Any] = {}
    if what == "state":
        module.blocks[0] = CountsForwards(WIDTH, WIDTH)
    elif what == "parameter":
        module.blocks[0] = Renormalised(WIDTH, WIDTH)
    elif what == "optimizer_step":
        module = Steps("sgd")
    elif what == "optimizer":
        module.configure_optimizers = lambda: Own(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    elif what == "tensor":
        module.configure_optimizers = lambda: torch.optim.Adam(  # type: ignore[method-assign]
            module.parameters(), lr=torch.tensor(0.1), foreach=False
        )
    elif what == "hook":
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    elif what == "precision":
        options["precision"] = "bf16-mixed"
    arguments = {"module": module, "options": options, "settings": {"check_first_batches": what != "parameter"}}
    return ended_by("deferred", {**arguments, "clip": 1e6})


@pytest.mark.by_day(4)
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("state", "A forward has changed blocks.0.num_forwards"),
        ("parameter", "A forward has changed blocks.0.weight"),
        ("optimizer_step", "Steps overrides optimizer_step"),
        ("optimizer", "Own is none of torch.optim"),
        ("tensor", "a setting of Adam is a tensor"),
        ("hook", "its step has a hook of yours"),
        ("precision", "sharded, replicated or cast inside units"),
    ],
)
def test_what_cannot_be_deferred_is_refused(pool: WorkerPool, what: str, told: str) -> None:
    messages = pool.run(refused, what, world_size=2)
    assert any(told in message for message in messages), messages
    assert any("optimizer_sync='immediate'" in message for message in messages), messages


class Fails(Module):
    """The last stage raises while the first has an update that is not settled."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 5:
            raise ArithmeticError("batch 5")
        return loss


def fails() -> str:
    return ended_by("deferred", {"module": Fails("sgd"), "clip": 1e6, "settings": {"check_first_batches": False}})


def test_a_rank_that_fails_leaves_nobody_waiting(pool: WorkerPool) -> None:
    messages = pool.run(fails, world_size=2, timeout=60)
    assert all("batch 5" in message for message in messages), messages


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="optimizer_sync='later' is unknown; it is one of immediate, deferred"):
        PipelineParallelStrategy(2, optimizer_sync="later")  # type: ignore[arg-type]
