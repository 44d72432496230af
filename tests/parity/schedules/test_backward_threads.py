"""Backward may run on another thread than forward, as autograd's does on every device but the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from parity_run import Layout, Outcome, Settings, check_like_one_device, train
from pool import WorkerPool


def on_its_own_thread(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` on a new thread, which has nothing of this one's, not even whether gradients are recorded."""

    def run(*args: Any, **options: Any) -> None:
        errors: list[BaseException] = []

        def target() -> None:
            try:
                function(*args, **options)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    return run


def train_with_threads(settings: Settings, layout: Layout, options: dict[str, Any]) -> Outcome:
    """In a worker: trains as a pipeline, every backward on a thread of its own."""
    with patch.object(torch.autograd, "backward", on_its_own_thread(torch.autograd.backward)):
        return train(settings, layout.strategy(check_first_batches=False, **options), layout.world_size)


RUNS: list[Any] = [
    ("residual_mlp", Layout("1f1b", 2, 1, 3), {}),
    ("demo_transformer", Layout("zb_v", 2, 1, 4), {"activation_checkpointing": True}),
    ("vit", Layout("zb_h1", 2, 2, 3), {"sharding": "full_shard"}),
    ("t5", Layout("interleaved_1f1b", 2, 2, 2), {"sharding": "shard_grad_op", "activation_checkpointing": True}),
    pytest.param("unet", Layout("zb_h1", 2, 1, 3), {"activation_checkpointing": True}, marks=pytest.mark.nightly),
    pytest.param(
        "root_parameters",
        Layout("zb_h2", 1, 2, 3),
        {"sharding": "full_shard", "activation_checkpointing": True},
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("model", "layout", "options"), RUNS, ids=lambda value: value if isinstance(value, str) else None
)
def test_training_is_that_of_one_device(pool: WorkerPool, model: str, layout: Layout, options: dict[str, Any]) -> None:
    settings = Settings(model, accumulate=2, clip_val=0.05, clip_algorithm="norm", num_samples=22, only_trains=True)
    outcomes = pool.run(train_with_threads, settings, layout, options, world_size=layout.world_size, timeout=120)
    check_like_one_device(outcomes, settings, layout)
