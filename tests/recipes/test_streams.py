"""The stream of the page on data: replicas have samples of their own, ranks of one the same; a resume goes on."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from datasets import Dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from pool import WorkerPool
from torch import Tensor, nn

from lightning_pp import PipelineParallelStrategy

PAGE = Path(__file__).parents[2] / "docs" / "training" / "data.md"
NUM_SAMPLES, BATCH_SIZE, EPOCHS, REPLICAS = 48, 4, 2, 2
BATCHES_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE // REPLICAS


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(1, 8), nn.Linear(8, 1)
        self.seen: list[list[float]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch["x"].tolist())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"].unsqueeze(1) / NUM_SAMPLES
        return (self.second(torch.tanh(self.first(x))) - x).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(folder: Path, num_shards: int, ckpt: str | None = None) -> tuple[Any, Any]:
    parts = runpy.run_path(str(folder / "streamed.py"))
    stream = Dataset.from_dict({"x": [float(number) for number in range(NUM_SAMPLES)]}).to_iterable_dataset(num_shards)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=PipelineParallelStrategy(
            2, data_parallel_size=REPLICAS, num_microbatches=2, schedule="1f1b", check_first_batches=False
        ),
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
    )
    module = Module()
    data = parts["StreamedData"](stream.with_format("torch"), BATCH_SIZE)
    trainer.fit(module, data, ckpt_path=None if ckpt is None else folder / ckpt)
    trainer.strategy.gather_module()  # type: ignore[attr-defined]
    return module.seen, {name: value.tolist() for name, value in module.state_dict().items()}


def undisturbed_and_resumed(folder: Path, num_shards: int, steps: list[int]) -> list[Any]:
    return [fit(folder, num_shards)] + [fit(folder, num_shards, f"step={step}.ckpt") for step in steps]


@pytest.mark.nightly
@pytest.mark.parametrize("num_shards", [1, 4])
def test_a_stream_is_shared_out_by_replica_and_goes_on(pool: WorkerPool, tmp_path: Path, num_shards: int) -> None:
    block = re.search(r"^```python\n(# streamed\.py\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / "streamed.py").write_text(block.group(1))
    steps = [1, BATCHES_PER_EPOCH - 1, BATCHES_PER_EPOCH, BATCHES_PER_EPOCH + 3]
    told = pool.run(undisturbed_and_resumed, tmp_path, num_shards, steps, world_size=4, timeout=200)
    whole = [results[0][0] for results in told]
    assert whole[0] == whole[2] and whole[1] == whole[3]  # the pipelines are ranks 0 and 2, and ranks 1 and 3
    for epoch in range(EPOCHS):
        of_epoch = slice(epoch * BATCHES_PER_EPOCH, (epoch + 1) * BATCHES_PER_EPOCH)
        numbers = [number for seen in whole[:2] for batch in seen[of_epoch] for number in batch]
        assert sorted(numbers) == list(range(NUM_SAMPLES))
    for (seen, weights), *resumed in told:
        assert len(seen) == EPOCHS * BATCHES_PER_EPOCH
        for step, (seen_again, weights_again) in zip(steps, resumed, strict=True):
            assert seen_again == seen[step:], f"after step {step}"
            assert weights_again == weights, f"after step {step}"
