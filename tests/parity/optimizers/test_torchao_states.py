"""torchao's 8-bit AdamW keeps its states in a tensor class of its own, of matrices of at least 4096 elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from feature_parts import make_unchecked_trainer
from parity_run import Layout, whole_weights
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchao.optim import AdamW8bit

WIDTH, CLASSES = 64, 5
STAGES, SHARDS = Layout("zb_h1", 2, 1, 2), Layout("1f1b", 1, 2, 2)
# An update is computed in float32, and its states are rounded to 8 bits.
TOLERANCE = 1e-5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Quantized(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, CLASSES)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h, y = batch
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(h), y)

    def train_dataloader(self) -> Any:
        placement = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(16, WIDTH, generator=generator, dtype=torch.float64)
        samples = TensorDataset(x, torch.randint(0, CLASSES, (16,), generator=generator))
        sampler = DistributedSampler(samples, shuffle=False, **placement)
        return DataLoader(samples, batch_size=8 // placement["num_replicas"], sampler=sampler)

    def configure_optimizers(self) -> Any:
        optimizer = AdamW8bit(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def train(
    layout: Layout | None, num_epochs: int, resumed: Path | None = None, saved: Path | None = None, **options: Any
) -> tuple[dict[str, Tensor], set[str]]:
    """In a worker: weights that this rank holds, and the classes of the states of its large matrices."""
    where = {} if layout is None else {"devices": 2, "strategy": layout.strategy(check_first_batches=False, **options)}
    module, trainer = Quantized(), make_unchecked_trainer(None, max_epochs=num_epochs, **where)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its update for each shape
        trainer.fit(module, ckpt_path=resumed)
        if saved is not None:
            trainer.save_checkpoint(saved)
            trainer.strategy.wait_for_checkpoint()
    states = [state for p, state in trainer.optimizers[0].state.items() if p.numel() >= 4096]
    kinds = {type(state[name]).__name__ for state in states for name in ("exp_avg", "exp_avg_sq")}
    return {name: value for name, value in whole_weights(module).items() if not value.is_meta}, kinds


def found(pool: WorkerPool, *args: Any, **options: Any) -> dict[str, Tensor]:
    """Weights of all ranks together."""
    weights: dict[str, Tensor] = {}
    for part, kinds in pool.run(train, *args, world_size=2, timeout=120, **options):
        assert kinds == {"OptimState8bit"}
        weights.update(part)
    return weights


SHARDED = {"sharding": "full_shard"}


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """Weights of one device after two epochs."""
    weights, kinds = train(None, 2)
    assert kinds == {"OptimState8bit"}
    return weights


def assert_close(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            weights[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda t, n=name: f"{n}: {t}"
        )


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("layout", "options"), [(STAGES, {}), (SHARDS, SHARDED)], ids=["stages", "shards"])
def test_trains_and_resumes_as_one_device(
    pool: WorkerPool, tmp_path: Path, expected: dict[str, Tensor], layout: Layout, options: dict[str, Any]
) -> None:
    path = tmp_path / "half.ckpt"
    found(pool, layout, 1, None, path, async_checkpoint=layout is STAGES, **options)
    assert_close(found(pool, layout, 2, path, **options), expected)
    other, others_options = (SHARDS, SHARDED) if layout is STAGES else (STAGES, {})
    assert_close(found(pool, other, 2, path, **others_options), expected)


def test_a_single_file_is_refused_by_name(pool: WorkerPool, tmp_path: Path) -> None:
    options = {"save_distributed_checkpoint": False}
    for message in pool.refusals(
        "CheckpointError", train, STAGES, 1, None, tmp_path / "one.ckpt", world_size=2, timeout=120, **options
    ):
        assert "AdamW8bit keeps 'exp_avg' of 'blocks.0.up.weight' in a OptimState8bit" in message
        assert "Set save_distributed_checkpoint=True on the strategy." in message
    assert not (tmp_path / "one.ckpt").exists()
