"""What is sharded is never whole on a rank: not while it gets its values, and not besides its shards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pipelined_fit import loader, trainer
from pool import WorkerPool
from small_models import Blocks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_pp import PipelineParallelStrategy
from lightning_pp.strategy.parameters.placing import ParameterPlacing

WIDTH, NUM_BLOCKS = 32, 6


class Configured(Blocks):
    """Makes its layers in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        del self.blocks, self.head

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
            self.head = nn.Linear(WIDTH, 1)


def num_whole() -> int:
    """How many weights of blocks have memory in this process."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    return len(
        {
            tensor.untyped_storage().data_ptr()
            for tensor in tensors
            if type(tensor) in (torch.Tensor, nn.Parameter)
            and not isinstance(tensor, FakeTensor)
            and tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and tensor.untyped_storage().nbytes() == WIDTH * WIDTH * 4
        }
    )


def whole_weights(sharding: str, on_meta: bool) -> tuple[list[int], int]:
    """How many weights were whole when each unit was about to be sharded, and after the set-up; in a worker."""
    counts: list[int] = []
    place = ParameterPlacing.place_units

    def count(self: ParameterPlacing, units: Mapping[str, nn.Module]) -> None:
        place(self, units)
        counts.append(num_whole())

    strategy = PipelineParallelStrategy(1, 2, 2, sharding=sharding, meta_init=on_meta)  # type: ignore[arg-type]
    before = num_whole()  # what others have left in this process
    module = Configured() if on_meta else Blocks(NUM_BLOCKS, WIDTH)
    with patch.object(ParameterPlacing, "place_units", count):
        trainer(strategy=strategy, max_steps=0).fit(module, loader(width=WIDTH))
    return [number - before for number in counts], num_whole() - before


@pytest.mark.parametrize("sharding", ["shard_grad_op", "full_shard"])
def test_units_are_made_one_at_a_time(pool: WorkerPool, sharding: str) -> None:
    for counts, afterwards in pool.run(whole_weights, sharding, True, world_size=2):
        assert max(counts) == 1 and sum(counts) == NUM_BLOCKS
        assert afterwards == 0


def test_nothing_keeps_whole_units(pool: WorkerPool) -> None:
    for counts, afterwards in pool.run(whole_weights, "full_shard", False, world_size=2):
        assert counts == [*range(NUM_BLOCKS, 0, -1), 0]  # the head has no weight of that size
        assert afterwards == 0


class Scheduled(Blocks):
    """Remembers, weakly, its optimizers, which hold each other with their schedulers."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, WIDTH)
        self.made: list[weakref.ref[torch.optim.Optimizer]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        self.made.append(weakref.ref(optimizer))
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


def optimizers_at_first_placing() -> list[bool]:
    """Whether each optimizer that was made before the first unit is placed is alive then; in a worker."""
    module = Scheduled()
    alive: list[list[bool]] = []
    place = ParameterPlacing.place_units

    def note(self: ParameterPlacing, units: Mapping[str, nn.Module]) -> None:
        alive.append([made() is not None for made in module.made])
        place(self, units)

    with patch.object(ParameterPlacing, "place_units", note):
        trainer(strategy=PipelineParallelStrategy(1, 2, 2, sharding="full_shard"), max_steps=0).fit(
            module, loader(width=WIDTH)
        )
    return alive[0]


def test_the_optimizer_of_the_whole_module_is_gone_before_units_are_placed(pool: WorkerPool) -> None:
    assert pool.run(optimizers_at_first_placing, world_size=2) == [[False], [False]]
