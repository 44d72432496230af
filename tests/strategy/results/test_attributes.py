"""What steps keep on the module is what one device would keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks


class Keeps(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.by_name: dict[str, Any] = {}
        self.num_batches_seen = 0
        self.mean_loss = 0.0
        self.cache: Any = None
        self.epochs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_batches_seen += 1
        if self.cache is None:
            self.cache = torch.ones(1, 8, dtype=torch.float64)
        loss = super().training_step((batch[0] * self.cache, batch[1]), batch_idx)
        self.mean_loss = 0.5 * self.mean_loss + 0.5 * loss.detach()
        self.by_name[f"batch {batch_idx}"] = loss.item()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        prediction = self(batch[0])
        self.outputs.append({"prediction": prediction, "error": (prediction - batch[1]).abs().mean()})

    def on_validation_epoch_end(self) -> None:
        predictions = torch.cat([output["prediction"] for output in self.outputs])
        errors = torch.stack([output["error"] for output in self.outputs])
        self.epochs.append((predictions.tolist(), errors.tolist()))
        self.outputs.clear()


def kept(pipelined: bool) -> dict[str, Any]:
    module = Keeps()
    run = trainer(precision="64-true") if pipelined else trainer(1, "auto", precision="64-true")
    run.fit(module, loader(14, 5), loader(7, 4, seed=2))
    return {
        "num": module.num_batches_seen,
        "mean": float(module.mean_loss),
        "by_name": module.by_name,
        "cache": tuple(module.cache.shape),
        "epochs": module.epochs,
    }


def test_kept_values_are_those_of_one_device_on_every_rank(pool: WorkerPool) -> None:
    [expected] = pool.run(kept, False, world_size=1)
    for values in pool.run(kept, True, world_size=2):
        assert values["num"] == expected["num"] == 3
        assert values["cache"] == expected["cache"]
        assert values["mean"] == pytest.approx(expected["mean"], rel=1e-12)
        assert values["by_name"] == pytest.approx(expected["by_name"], rel=1e-12)
        for (predictions, errors), (its_predictions, its_errors) in zip(
            values["epochs"], expected["epochs"], strict=True
        ):
            assert predictions == pytest.approx(its_predictions, rel=1e-12)
            assert errors == pytest.approx(its_errors, rel=1e-12)
