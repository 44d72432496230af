"""A step that shortens padded rows to the longest of its batch, which in a pipeline is that of its microbatch."""

from __future__ import annotations

from typing import Any

import torch
from feature_parts import assert_equal_trees
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Descends
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy

Batch = list[Tensor]


class Encoder(nn.Module):
    """Reads backwards from the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(6, 6, batch_first=True, bidirectional=True), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x)[0])


class Shortening(Descends):
    def __init__(self, in_hook: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.in_hook = in_hook
        self.blocks, self.head = nn.ModuleList(Encoder() for _ in range(3)), nn.Linear(6, 3)
        self.double()

    def shortened(self, batch: Batch) -> Batch:
        x, lengths, y = batch
        return [x[:, : int(lengths.max())], lengths, y]

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return self.shortened(batch) if self.in_hook else batch

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, lengths, y = batch if self.in_hook else self.shortened(batch)
        for block in self.blocks:
            x = block(x)
        last = x[torch.arange(len(x)), lengths - 1]
        return nn.functional.cross_entropy(self.head(last), y)


def trained(in_hook: bool, strategy: Any = "auto") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([9, 3, 4, 5, 6, 4, 3, 5] * 2)
    x = torch.randn(16, 12, 6, generator=generator, dtype=torch.float64)
    x *= (torch.arange(12) < lengths[:, None])[..., None]
    data = TensorDataset(x, lengths, torch.randint(0, 3, (16,), generator=generator))
    module = Shortening(in_hook)
    trainer(1 if strategy == "auto" else 2, strategy).fit(module, DataLoader(data, batch_size=8))
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters() if not parameter.is_meta}


def piped(in_hook: bool) -> dict[str, Tensor]:
    return trained(in_hook, PipelineParallelStrategy(2, num_microbatches=4))


def test_shortening_in_the_hook_of_batches_is_that_of_one_device(pool: WorkerPool) -> None:
    expected = trained(in_hook=True)
    first, second = pool.run(piped, True, world_size=2, timeout=120)
    assert_equal_trees({**first, **second}, expected)


def test_shortening_in_the_step_is_refused(pool: WorkerPool) -> None:
    for message in pool.refusals("SplitError", piped, False, world_size=2, timeout=120):
        assert "depends on how the batch is cut" in message and f"{__file__}:" in message
