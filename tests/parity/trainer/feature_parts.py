"""The data of a small classifier and its trainers for the tests of Trainer features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from parity_run import QUIET, Layout
from pool import WorkerPool
from small_models import NUM_CLASSES, Classifier
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# A test's function: takes a layout, None for one device, and returns what is compared.
Scenario = Callable[..., Any]


class Data(L.LightningDataModule):
    """Loaders that read in order, with a smaller last batch; replicas together read what one device reads."""

    def __init__(self, num_train: int = 14, num_val: int = 6, train_batch: int = 8, val_batch: int = 4) -> None:
        super().__init__()
        self.num_train, self.num_val, self.train_batch, self.val_batch = num_train, num_val, train_batch, val_batch

    def loader(self, num_samples: int, batch_size: int, seed: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
        assert self.trainer is not None
        placement = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        samples = TensorDataset(x, y)
        sampler = DistributedSampler(samples, shuffle=False, **placement)
        return DataLoader(samples, batch_size=batch_size // placement["num_replicas"], sampler=sampler)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.num_train, self.train_batch, 1)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.num_val, self.val_batch, 2)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.loader(14, 4, 3)

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.loader(10, 4, 4)


def make(module: type[Classifier] = Classifier, **kwargs: Any) -> Any:
    """A module with the weights that every run starts from."""
    torch.manual_seed(7)
    return module(**kwargs)


def make_trainer(layout: Layout | None, *, check_first_batches: bool = True, **kwargs: Any) -> L.Trainer:
    """A quiet float64 Trainer, on one device or with the pipeline strategy."""
    arguments: dict[str, Any] = {**QUIET, "precision": "64-true", "max_epochs": 2, "use_distributed_sampler": False}
    if layout is not None:
        arguments.update(devices=layout.world_size, strategy=layout.strategy(check_first_batches=check_first_batches))
    return L.Trainer(**{"devices": 1, **arguments, **kwargs})


def make_unchecked_trainer(layout: Layout | None, **kwargs: Any) -> L.Trainer:
    """:func:`make_trainer`, without the check of first batches, which takes as long as a short training."""
    return make_trainer(layout, check_first_batches=False, **kwargs)


def plain(value: Any) -> Any:
    """Tensors of one element in a tree as numbers."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def assert_equal_trees(found: Any, expected: Any, *, tolerance: float = 1e-9, path: str = "result") -> None:
    """Same structure, numbers within a relative tolerance, everything else equal."""
    if isinstance(expected, dict):
        assert isinstance(found, dict) and sorted(found) == sorted(expected), f"{path}: {found} instead of {expected}"
        for key in expected:
            assert_equal_trees(found[key], expected[key], tolerance=tolerance, path=f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert isinstance(found, (list, tuple)) and len(found) == len(expected), f"{path}: {found}, not {expected}"
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_equal_trees(mine, theirs, tolerance=tolerance, path=f"{path}[{index}]")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{path}: {text}")
    elif isinstance(expected, float):
        difference = abs(found - expected)
        assert difference <= tolerance * max(1.0, abs(expected)), f"{path}: {found} instead of {expected}"
    else:
        assert found == expected, f"{path}: {found!r} instead of {expected!r}"


def check_on_every_rank(
    pool: WorkerPool, scenario: Scenario, layout: Layout, *args: Any, tolerance: float = 1e-9
) -> Any:
    """Every rank's result of the piped scenario is that of one device, which is returned."""
    expected = scenario(None, *args)
    results = pool.run(scenario, layout, *args, world_size=layout.world_size, timeout=120)
    for rank, found in enumerate(results):
        assert_equal_trees(found, expected, tolerance=tolerance, path=f"rank {rank}")
    return expected


def check_with_weights(pool: WorkerPool, scenario: Scenario, layout: Layout, *args: Any, **options: Any) -> None:
    """As :func:`check_on_every_rank`; the last of a scenario's results are weights, of which a rank has its stages'."""
    *expected, whole = scenario(None, *args, **options)
    weights: dict[str, Tensor] = {}
    results = pool.run(scenario, layout, *args, world_size=layout.world_size, timeout=120, **options)
    for rank, (*found, part) in enumerate(results):
        assert_equal_trees(found, expected, path=f"rank {rank}")
        weights.update(part)
    assert_equal_trees(weights, whole)
