"""A module whose plain ``__init__`` runs in ``trainer.init_module(empty_init=True)`` gets memory where it is owned."""

from __future__ import annotations

import pytest
import torch
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks

from lightning_pp import PipelineParallelStrategy

WIDTH, NUM_BLOCKS = 64, 4


def made_without_memory(replicas: int) -> tuple[bool, dict[str, tuple[float, float]]]:
    """Whether all parameters were on meta, and the sizes of what this rank holds after the set-up; in a worker."""
    strategy = PipelineParallelStrategy(2, replicas, num_microbatches=2, sharding="full_shard")
    run = trainer(2 * replicas, strategy, max_steps=0)
    with run.init_module(empty_init=True):
        module = Blocks(NUM_BLOCKS, WIDTH)
    on_meta = all(parameter.is_meta for parameter in module.parameters())
    run.fit(module, loader(width=WIDTH, batch_size=4 * replicas))
    held = {}
    for name, parameter in module.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        held[name] = (float(whole.detach().abs().max()), float(whole.detach().std()))
    return on_meta, held


@pytest.mark.parametrize("replicas", [1, 2])
def test_reset_parameters_fills_what_a_rank_owns(pool: WorkerPool, replicas: int) -> None:
    """A linear layer draws from ``U(-1/sqrt(n), 1/sqrt(n))``, whose standard deviation is ``1/sqrt(3n)``."""
    ranks = pool.run(made_without_memory, replicas, world_size=2 * replicas)
    expected = {name for name, _ in Blocks(NUM_BLOCKS, WIDTH).named_parameters()}
    assert all(on_meta for on_meta, _ in ranks)
    first, last = ranks[0][1], ranks[-1][1]
    assert not first.keys() & last.keys() and first.keys() | last.keys() == expected
    bound = WIDTH**-0.5
    for name, (largest, deviation) in {**first, **last}.items():
        assert 0 < largest <= bound, name
        if name.startswith("blocks") and name.endswith("weight"):
            assert largest > 0.99 * bound, name
            assert deviation == pytest.approx(bound / 3**0.5, rel=0.05), name
    for rank in range(replicas):
        assert ranks[rank][1] == first  # replicas have the same values
    torch.testing.assert_close(ranks[-1][1]["head.weight"][0], ranks[replicas][1]["head.weight"][0], rtol=0, atol=0)
