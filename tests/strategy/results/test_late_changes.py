"""What a step begins to change on the module after the checked batches is what one device would keep, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from feature_parts import assert_equal_trees
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Blocks
from torch.utils.data import DataLoader, TensorDataset


class Looks(Blocks):
    """Keeps in ``found`` what :meth:`look` returns after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def look(self) -> Any:
        """What the step has left."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append(self.look())


class Spikes(Looks):
    """Lists high losses, which no stage but the last knows, and notes the first batch with one."""

    def __init__(self) -> None:
        super().__init__()
        self.spikes: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if loss.item() > 50:
            self.spikes.append(loss.item())
            self.last_spike = batch_idx
        return loss

    def look(self) -> Any:
        return list(self.spikes), getattr(self, "last_spike", None)


class High(Looks):
    """Lists batches by their values, by the same line as in batches before."""

    def __init__(self) -> None:
        super().__init__()
        self.high: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[0].max() > 2.5:
            self.high.append(batch_idx)
        return self.loss(batch)

    def look(self) -> Any:
        return list(self.high)


class FromTheThird(Looks):
    """Keeps predictions and counts samples once the training is so far."""

    def __init__(self) -> None:
        super().__init__()
        self.predictions: list[Any] = []
        self.num_seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step > 1:
            self.predictions.append(self(batch[0]).detach())
            self.num_seen += len(batch[0])
        return self.loss(batch)

    def look(self) -> Any:
        return [each.tolist() for each in self.predictions], self.num_seen


def found_after_batches(kind: type[Looks], pipelined: bool) -> list[Any]:
    """In a worker; batches of four, of which the fourth has high values, and the fifth a high loss as well."""
    x = torch.linspace(-1, 1, 192, dtype=torch.float64).reshape(-1, 8)
    y = x.sum(-1).tanh()
    x[[12, 16], 0], y[16:20] = 3.0, 40.0
    run = trainer(precision="64-true") if pipelined else trainer(1, "auto", precision="64-true")
    module = kind()
    run.fit(module, DataLoader(TensorDataset(x, y), batch_size=4))
    return module.found


@pytest.mark.parametrize("kind", [Spikes, High, FromTheThird])
def test_it_is_kept_as_on_one_device(pool: WorkerPool, kind: type[Looks]) -> None:
    [expected] = pool.run(found_after_batches, kind, False, world_size=1)
    assert expected[1] != expected[-1]
    for found in pool.run(found_after_batches, kind, True, timeout=60):
        assert_equal_trees(found, expected)
