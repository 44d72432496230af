"""Tensor ranks see the same batches and train what one device trains, in float64 to 1e-9."""

from __future__ import annotations

from itertools import product
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from parity_models import ResidualMLP, samples_of
from parity_run import (
    QUIET,
    Layout,
    ParityData,
    Settings,
    check_like_one_device,
    make_module,
    merged,
    train,
    train_pipelined,
)
from pool import WorkerPool
from torch import Tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy

CLIPPED: dict[str, Any] = {"clip_val": 0.05, "clip_algorithm": "norm", "optimizer": "adamw"}
# two updates, the second of one batch, a smaller one
ACCUMULATED: dict[str, Any] = {**CLIPPED, "accumulate": 2, "num_samples": 22, "max_epochs": 1, "num_val_samples": 4}
# of one size: a step of each size is recorded by itself
UPDATED: dict[str, Any] = {**ACCUMULATED, "accumulate": 1, "num_samples": 16}
SETTINGS = Settings("residual_mlp", **ACCUMULATED, only_trains=True)
SIZES = [(1, 1, 2), (2, 1, 2), (1, 2, 2)]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("schedule", ["zb_v", "1f1b"])
@pytest.mark.parametrize("sizes", SIZES[1:] + SIZES[:1], ids=str)
def test_nothing_sharded(pool: WorkerPool, schedule: str, sizes: tuple[int, int, int]) -> None:
    pipeline, replicas, tensor = sizes
    layout = Layout(schedule, pipeline, replicas, 3, tensor=tensor)
    whole: dict[str, Any] = {"tensor_parallel_plan": {}}
    outcomes = pool.run(train_pipelined, SETTINGS, layout, whole, world_size=layout.world_size, timeout=120)
    assert not merged(outcomes, layout).cut
    check_like_one_device(outcomes, SETTINGS, layout)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize(("replicas", "tensor"), [(2, 2), (1, 4)])
def test_eight_ranks(schedule: str, replicas: int, tensor: int) -> None:
    workers = WorkerPool(8)
    try:
        layout = Layout(schedule, 2, replicas, 3, tensor=tensor)
        outcomes = workers.run(train_pipelined, SETTINGS, layout, world_size=8, timeout=240)
        check_like_one_device(outcomes, SETTINGS, layout)
    finally:
        workers.close()


class OtherBatches(ParityData):
    """Each process has batches of its own, as it should not."""

    def train_dataloader(self) -> Any:
        rank = torch.distributed.get_rank()
        return self.loader(self.settings.num_samples, self.settings.batch_size, 1 + rank)


class Predicts(ResidualMLP):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        prediction: Tensor = self.blocks(batch[0])
        return prediction


def predict(layout: Layout | None) -> list[Tensor]:
    """With a strategy or, for None, a plain Trainer."""
    where = {} if layout is None else {"devices": layout.world_size, "strategy": layout.strategy()}
    trainer = L.Trainer(**QUIET, **{"devices": 1, **where}, precision="64-true", use_distributed_sampler=False)
    torch.manual_seed(11)
    loader = DataLoader(samples_of("residual_mlp", 10, 3), batch_size=4)
    found = trainer.predict(Predicts(), loader)
    assert found is not None
    return [torch.as_tensor(each) for each in found]


def test_every_tensor_rank_has_the_predictions(pool: WorkerPool) -> None:
    expected = predict(None)
    for predictions in pool.run(predict, Layout("1f1b", 2, 1, 2, tensor=2), world_size=4, timeout=120):
        assert len(predictions) == len(expected) == 3
        for found, whole in zip(predictions, expected, strict=True):
            torch.testing.assert_close(found, whole, rtol=1e-9, atol=0)


def fit(
    layout: Layout, settings: Settings, *callbacks: L.Callback, data: type[ParityData] = ParityData, **options: Any
) -> None:
    """In a worker: trains without validation."""
    trainer = L.Trainer(
        **QUIET,
        devices=layout.world_size,
        strategy=layout.strategy(check_first_batches=False, **options),
        max_epochs=1,
        limit_val_batches=0,
        precision="64-true",
        use_distributed_sampler=False,
        callbacks=list(callbacks),
    )
    trainer.fit(make_module(settings), data(settings))


TWO_PARTS = Layout("1f1b", 1, 1, 2, tensor=2)


def test_tensor_ranks_with_other_batches_are_told(pool: WorkerPool) -> None:
    report = pool.run(fit, TWO_PARTS, SETTINGS, data=OtherBatches, timeout=120, expect_failure=True)
    assert [failure and failure.type for failure in report.failures] == ["BatchError"] * 2
    assert all(failure and "rank 0 and rank 1" in failure.message for failure in report.failures)


class FailsOnOne(L.Callback):
    """The second of the tensor ranks of a stage raises in the middle of the training."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.tensor_parallel_rank == 1 and batch_idx == 1:  # type: ignore[attr-defined]
            raise KeyError("lost")


@pytest.mark.parametrize("pipeline", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_failure_of_one_tensor_rank_ends_all(pool: WorkerPool, pipeline: int) -> None:
    layout = Layout("1f1b", pipeline, 1, 2, tensor=2)
    report = pool.run(fit, layout, SETTINGS, FailsOnOne(), world_size=2 * pipeline, timeout=120, expect_failure=True)
    types = [failure and failure.type for failure in report.failures]
    assert types[1::2] == ["KeyError"] * pipeline and None not in types
    assert report.seconds < 60


# matrices that "auto" finds, of a model's first block
CUT = {
    "gpt2_float64_loss": {
        *(f"attn.{name}.weight" for name in ("c_attn", "c_proj")),
        *(f"mlp.{name}.weight" for name in ("c_fc", "c_proj")),
        "wte.weight",  # to which the head is tied
    },
    "llama_float64_loss": {
        *("embed_tokens.weight", "lm_head.weight"),
        *(f"self_attn.{name}_proj.weight" for name in "qo"),  # there is one head of keys
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    },
    "mixtral_float64_loss": {
        *("embed_tokens.weight", "lm_head.weight", "self_attn.q_proj.weight", "self_attn.o_proj.weight"),
        *("experts.gate_up_proj", "experts.down_proj"),
    },
    "t5": {
        *("SelfAttention.q.weight", "SelfAttention.o.weight", "EncDecAttention.k.weight", "DenseReluDense.wi.weight"),
        "shared.weight",  # of both embeddings and the head
    },
    "demo_transformer": {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"},
    "vit": {"self_attn.in_proj_weight", "linear1.weight", "linear2.weight"},
}
# GPT-2 and Llama have their own cases below
CASES = [
    ("mixtral_float64_loss", Layout("zb_h1", 1, 1, 2, tensor=2)),
    ("demo_transformer", Layout("1f1b", 2, 1, 2, tensor=2)),
]


NIGHTLY = [
    (model, Layout(schedule, pipeline, replicas, 3, tensor=tensor))
    for model, schedule, (pipeline, replicas, tensor) in product(CUT, ("1f1b", "zb_h1", "zb_v"), SIZES)
]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("model", "layout"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY if case not in CASES)],
    ids=str,
)
def test_sharded_models(pool: WorkerPool, model: str, layout: Layout) -> None:
    settings = Settings(model, **UPDATED, only_trains=model != "demo_transformer")
    outcomes = pool.run(train_pipelined, settings, layout, world_size=layout.world_size, timeout=120)
    cut = merged(outcomes, layout).cut
    assert {ending for ending in CUT[model] if not any(name.endswith(ending) for name in cut)} == set(), sorted(cut)
    check_like_one_device(outcomes, settings, layout)


OPTIONS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "replicate": (Layout("1f1b", 1, 2, 2, tensor=2), {"sharding": "replicate"}),
    "full_shard": (Layout("zb_v", 1, 2, 2, tensor=2), {"sharding": "full_shard"}),
    "hsdp": (Layout("zb_v", 1, 2, 2, tensor=2), {"sharding": "full_shard", "data_parallel_replicate_size": 2}),
    "whole_batch_loss": (Layout("zb_h1", 2, 1, 2, tensor=2), {"whole_batch_loss": True}),
    "cpu_offload": (Layout("1f1b", 1, 1, 2, tensor=2), {"cpu_offload": True}),
    "activation_checkpointing": (Layout("zb_h1", 1, 1, 2, tensor=2), {"activation_checkpointing": True}),
    "plan": (
        Layout("zb_h1", 2, 1, 2, tensor=2),
        {"tensor_parallel_plan": {"*.mlp.c_fc": "colwise", "*.mlp.c_proj": "rowwise"}},
    ),
}
OPTIONS["plan, cpu_offload"] = (OPTIONS["plan"][0], OPTIONS["plan"][1] | OPTIONS["cpu_offload"][1])
BY_DAY = "activation_checkpointing"  # shards have a vocabulary that does not divide, below


@pytest.mark.parametrize(
    "name", [BY_DAY, *(pytest.param(name, marks=pytest.mark.nightly) for name in OPTIONS if name != BY_DAY)]
)
def test_options_beside_tensor_ranks(pool: WorkerPool, name: str) -> None:
    layout, options = OPTIONS[name]
    settings = Settings("gpt2_float64_loss", **ACCUMULATED, only_trains=True)
    outcomes = pool.run(train_pipelined, settings, layout, options, world_size=layout.world_size, timeout=120)
    cut = merged(outcomes, layout).cut
    found = {name.rpartition("h.")[2][2:] for name in cut}
    assert found >= {"mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight"}
    lacks = {ending for ending in CUT["gpt2_float64_loss"] if not any(each.endswith(ending) for each in cut)}
    assert bool(lacks) == name.startswith("plan"), lacks
    assert any("attn" in each for each in cut) == (not name.startswith("plan"))
    check_like_one_device(outcomes, settings, layout)


ODD_WORDS: list[Any] = [
    ("odd_gpt2", Layout("zb_v", 1, 2, 2, tensor=2), {"sharding": "full_shard"}),
    ("odd_llama", Layout("1f1b", 2, 1, 2, tensor=2), {}),
    pytest.param("odd_gpt2", Layout("zb_h1", 2, 1, 3, tensor=2), {}, marks=pytest.mark.nightly),
    pytest.param(
        "odd_llama", Layout("zb_v", 1, 1, 3, tensor=2), {"sequence_parallel": True}, marks=pytest.mark.nightly
    ),
    pytest.param("odd_llama", Layout("1f1b", 1, 2, 2, tensor=2), {"sharding": "full_shard"}, marks=pytest.mark.nightly),
]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("model", "layout", "options"), ODD_WORDS, ids=str)
def test_vocabularies_that_do_not_divide(pool: WorkerPool, model: str, layout: Layout, options: dict[str, Any]) -> None:
    settings = Settings(model, **UPDATED, only_trains=True)
    outcomes = pool.run(train_pipelined, settings, layout, options, world_size=layout.world_size, timeout=300)
    endings = CUT[model.replace("odd_", "") + "_float64_loss"]  # with the embeddings
    cut = merged(outcomes, layout).cut
    assert all(any(name.endswith(ending) for name in cut) for ending in endings), sorted(cut)
    check_like_one_device(outcomes, settings, layout)


ON_PARTS_OF_THE_SEQUENCE = [("gpt2_float64_loss", Layout("zb_v", 1, 1, 3, tensor=2))]
AT_NIGHT = [case for case in NIGHTLY if case not in ON_PARTS_OF_THE_SEQUENCE]


@pytest.mark.parametrize(
    ("model", "layout"),
    [*ON_PARTS_OF_THE_SEQUENCE, *(pytest.param(*case, marks=pytest.mark.nightly) for case in AT_NIGHT)],
    ids=str,
)
def test_sequence_parallel(pool: WorkerPool, model: str, layout: Layout) -> None:
    settings = Settings(model, **UPDATED, only_trains=model != "demo_transformer")
    options = {"sequence_parallel": True}
    # every sum over the ranks waits for all of them, which takes its time where they share few cores
    outcomes = pool.run(train_pipelined, settings, layout, options, world_size=layout.world_size, timeout=300)
    check_like_one_device(outcomes, settings, layout)


class Overflows(L.Callback):
    """In the second step one entry of a gradient overflows: of a matrix that is cut, on the last tensor rank."""

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, PipelineParallelStrategy) and strategy.engine is not None
        before = [parameter.detach().clone() for parameter in module.parameters()]
        if trainer.global_step == 1:
            cut = strategy.engine.gradients.cut
            assert cut
            if strategy.tensor_parallel_rank == strategy.sizes.tensor - 1:
                gradient = next(iter(cut.values())).grad
                assert gradient is not None
                gradient.view(-1)[0] = float("inf")
        self.before, self.module = before, module

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        same = [torch.equal(a, b) for a, b in zip(self.before, module.parameters(), strict=True)]
        self.skipped = [*getattr(self, "skipped", ()), all(same)]


def train_with_overflow() -> list[bool]:
    """Whether each batch left all parameters of this rank as they were."""
    note, settings = Overflows(), Settings("gpt2_float64_loss", num_samples=24)
    fit(TWO_PARTS, settings, note, on_nonfinite="skip", sharding="replicate")
    return note.skipped


def test_an_overflow_in_one_part_skips_the_update_on_all(pool: WorkerPool) -> None:
    for skipped in pool.run(train_with_overflow, timeout=120):
        assert skipped == [False, True, False]


def test_mixed_precision_is_that_of_one_device_to_its_rounding(pool: WorkerPool) -> None:
    layout = Layout("zb_h1", 1, 1, 2, tensor=2)
    settings = Settings("gpt2", precision="bf16-mixed", max_epochs=1, num_samples=16, num_val_samples=4)
    found = merged(pool.run(train_pipelined, settings, layout, {"check_first_batches": False}, timeout=120), layout)
    expected = train(settings)
    assert len(found.cut) >= 8
    assert found.losses == pytest.approx(expected.losses, rel=5e-3)
    assert found.val_losses == pytest.approx(expected.val_losses, rel=5e-3)


def train_wrongly(plan: dict[str, str]) -> None:
    train(Settings("gpt2_float64_loss"), TWO_PARTS.strategy(tensor_parallel_plan=plan), 2)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"*.mlp.c_fc": "colwise"}, ("mlp.c_fc", "model.transformer.h.0")),
        ({"*.no_such_layer": "rowwise"}, ("*.no_such_layer", "fits no weight")),
        ({"*.mlp.c_fc": "diagonal"}, ("diagonal", "'colwise'")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_plan_ends_the_run_before_an_update(
    pool: WorkerPool, plan: dict[str, str], words: tuple[str, ...]
) -> None:
    report = pool.run(train_wrongly, plan, timeout=120, expect_failure=True)
    for failure in report.failures:
        assert failure is not None and failure.type in ("ConfigurationError", "SplitError")
        assert all(word in failure.message for word in words), failure.message


class Parallelized(ResidualMLP):
    """Cuts itself, as for Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        parallelize_module(self.blocks, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel()})


def train_parallelized() -> None:
    L.Trainer(**QUIET, devices=2, strategy=TWO_PARTS.strategy(), max_epochs=1).fit(Parallelized(), ParityData(SETTINGS))


def test_modules_that_cut_themselves_are_refused_by_name(pool: WorkerPool) -> None:
    for message in pool.refusals("ConfigurationError", train_parallelized, timeout=120):
        assert "blocks.0.weight of Parallelized is a DTensor" in message
