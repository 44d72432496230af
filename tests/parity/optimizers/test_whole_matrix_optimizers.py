"""Optimizers that need whole matrices, or keep odd states, train as on one device under every way of sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from feature_parts import Data, make, make_unchecked_trainer
from parity_run import Layout, whole_weights
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor
from whole_optimizers import Derived, GlobalScale, Normalized, Preconditioned, Quantized, ScheduleFree

KINDS: dict[str, Any] = {
    "adafactor": torch.optim.Adafactor,
    "derived": Derived,
    "muon": torch.optim.Muon,
    "normalized": Normalized,
    "preconditioned": Preconditioned,
    "quantized": Quantized,
    "schedule free": ScheduleFree,
    "global": GlobalScale,
}
# Muon's iterations are in bfloat16: a gradient that differs in its last bit may move an update by a 256th.
# Bytes may be rounded the other way by the same bit.
TOLERANCES = {"muon": 2e-3, "quantized": 1e-4}
CHECKPOINTED = ("adafactor", "preconditioned", "quantized", "schedule free")


class Trains(Classifier):
    """Groups of its first layers and of its last one, which most stages hold nothing of."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        held = [p for p in self.parameters() if self.kind != "muon" or p.ndim == 2]
        last = self.layers[6].weight
        return KINDS[self.kind](
            [{"params": [p for p in held if p is not last]}, {"params": [last], "lr": 0.02}], lr=0.1
        )

    def optimizer(self) -> Any:
        return self.optimizers(use_pl_optimizer=False)

    def on_train_epoch_start(self) -> None:
        if self.kind == "schedule free":
            self.optimizer().train()

    def on_train_epoch_end(self) -> None:
        if self.kind == "schedule free":
            self.optimizer().eval()


def train(layout: Layout | None, kind: str, num_epochs: int, path: Path | None = None, **options: Any) -> Trains:
    saves, kwargs = options.pop("saves", False), {}
    if layout is not None:
        kwargs = {"devices": layout.world_size, "strategy": layout.strategy(check_first_batches=False, **options)}
    module = make(Trains, kind=kind).double()  # Lightning loads a checkpoint before it converts the module
    trainer = make_unchecked_trainer(None, max_epochs=num_epochs, limit_val_batches=0, **kwargs)
    trainer.fit(module, datamodule=Data(num_train=16), ckpt_path=None if saves else path)
    if saves:
        trainer.save_checkpoint(path)
    return module


def trained(layout: Layout | None, kinds: tuple[str, ...], options: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """In a worker: what this rank holds after two epochs with each optimizer."""
    found = {}
    for kind in kinds:
        weights = whole_weights(train(layout, kind, 2, **options))
        found[kind] = {name: value for name, value in weights.items() if value.device.type == "cpu"}
    return found


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any], kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        tolerance, seen = TOLERANCES.get(kind, 1e-9), set()
        for weights in found:
            for name, value in weights[kind].items():
                message = f"{kind} {name}"
                torch.testing.assert_close(
                    value,
                    expected[kind][name],
                    rtol=tolerance,
                    atol=tolerance,
                    msg=lambda text, m=message: f"{m}: {text}",
                )
                seen.add(name)
        assert seen == set(expected[kind])


FULL_SHARD, REPLICAS = {"sharding": "full_shard"}, {"sharding": "full_shard", "data_parallel_replicate_size": 2}
EVERY = tuple(kind for kind in KINDS if kind != "global")
# by day each kind once, and each way of sharding
WAYS: dict[str, tuple[Layout, dict[str, Any], tuple[str, ...]]] = {
    "full_shard": (
        Layout("zb_v", 2, replicas=2, num_microbatches=4),
        FULL_SHARD,
        ("adafactor", "muon", "normalized", "preconditioned"),
    ),
    "hsdp": (Layout("1f1b", 1, replicas=4, num_microbatches=2), REPLICAS, ("derived",)),
    "offloaded": (
        Layout("1f1b", 2, replicas=2, num_microbatches=2),
        {"sharding": "shard_grad_op", "cpu_offload": True},
        ("quantized", "schedule free"),
    ),
    "replicate": (Layout("zb_h1", 2, replicas=2, num_microbatches=2), {"sharding": "replicate"}, ()),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("layout", "options", "kinds"),
    [
        *(pytest.param(*way, id=name) for name, way in WAYS.items() if way[2]),
        *(pytest.param(*way[:2], EVERY, id=f"all, {name}", marks=pytest.mark.nightly) for name, way in WAYS.items()),
    ],
)
def test_as_one_device(pool: WorkerPool, layout: Layout, options: dict[str, Any], kinds: tuple[str, ...]) -> None:
    expected = pool.run(trained, None, kinds, {}, world_size=1, timeout=120)[0]
    found = pool.run(trained, layout, kinds, options, world_size=4, timeout=200)
    assert_same(found, expected, kinds)


def saved(layout: Layout, path: Path, kinds: tuple[str, ...], options: dict[str, Any]) -> None:
    """In a worker: trains one epoch with each optimizer, and saves."""
    for kind in kinds:
        train(layout, kind, 1, path / kind, saves=True, **options)


def resumed(
    layout: Layout | None, path: Path, kinds: tuple[str, ...], options: dict[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """In a worker: trains the second epoch."""
    found = {}
    for kind in kinds:
        weights = whole_weights(train(layout, kind, 2, path / kind, **options))
        found[kind] = {name: value for name, value in weights.items() if value.device.type == "cpu"}
    return found


# by day each kind once
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("is_folder", "kinds"),
    [
        pytest.param(False, CHECKPOINTED[1:3], id="file"),
        pytest.param(True, CHECKPOINTED[::3], id="folder"),
        pytest.param(False, CHECKPOINTED, id="all, file", marks=pytest.mark.nightly),
        pytest.param(True, CHECKPOINTED, id="all, folder", marks=pytest.mark.nightly),
    ],
)
def test_resumed_under_another_layout(
    pool: WorkerPool, tmp_path: Path, is_folder: bool, kinds: tuple[str, ...]
) -> None:
    first = Layout("zb_h1", 2, replicas=2, num_microbatches=2)
    other = Layout("1f1b", 1, replicas=2, num_microbatches=2) if is_folder else None
    options = {**FULL_SHARD, "save_distributed_checkpoint": is_folder}
    pool.run(saved, first, tmp_path, kinds, options, world_size=4, timeout=200)
    expected = pool.run(trained, None, kinds, {}, world_size=1, timeout=120)[0]
    found = pool.run(
        resumed, other, tmp_path, kinds, FULL_SHARD if is_folder else {}, world_size=2 if is_folder else 1, timeout=200
    )
    assert_same(found, expected, kinds)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "layout", [Layout("1f1b", 2, num_microbatches=2), Layout("1f1b", 1, replicas=2, num_microbatches=2)], ids=str
)
def test_one_scale_over_all_parameters_is_refused(pool: WorkerPool, layout: Layout) -> None:
    told = pool.refusals(None, trained, layout, ("global",), FULL_SHARD, world_size=2)
    assert any("GlobalScale combines parameters in an update" in text for text in told), told


def test_one_scale_over_all_parameters_of_whole_replicas(pool: WorkerPool) -> None:
    expected = pool.run(trained, None, ("global",), {}, world_size=1)[0]
    layout = Layout("1f1b", 1, replicas=2, num_microbatches=2)
    found = pool.run(trained, layout, ("global",), {"sharding": "replicate"}, world_size=2)
    assert_same(found, expected, ("global",))
