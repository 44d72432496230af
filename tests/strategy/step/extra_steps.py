"""Steps that add to the loss of a small residual stack, alone or several in one module, and their trainings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parity_run import Layout
from pipelined_fit import trainer
from small_models import Blocks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Step(Blocks):
    """Trains by momentum; subclasses add to the loss, or change how a block is called."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = x
        for number, block in enumerate(self.blocks):
            h = h + torch.tanh(self.called(number, block, h))
        return nn.functional.mse_loss(self.head(h).squeeze(-1), y) + self.extra(h, x, batch_idx)

    def called(self, number: int, block: nn.Module, h: Tensor) -> Any:
        return block(h)

    def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Any:
        return 0.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


# all steps in one module by day, each in its own at night
in_layouts = pytest.mark.parametrize(
    ("layout", "is_each_alone"),
    [
        (Layout("zb_h1", 2, num_microbatches=4), False),
        pytest.param(Layout("zb_h1", 2, num_microbatches=4), True, marks=pytest.mark.nightly),
        pytest.param(Layout("1f1b", 3, num_microbatches=2), True, marks=pytest.mark.nightly),
    ],
    ids=str,
)


def together(kinds: Sequence[type[Step]]) -> list[type[Step]]:
    """``kinds``, but one module in place of those that only add to the loss or call blocks in a way of their own.

    It adds the mean of what the former add, and has a block for each of the latter. What a kind makes beforehand, or
    does at the end of a batch, it does as well.
    """
    own = {
        kind: {name for name in vars(kind) if name == "__init__" or name[:2] != "__"}
        for kind in kinds
        if kind.__base__ is Step
    }
    added = [kind for kind, names in own.items() if {"extra"} <= names <= {"extra", "__init__", "on_train_batch_end"}]
    calling = [kind for kind, names in own.items() if names == {"called"}]

    class Together(*(kind for kind in added if own[kind] != {"extra"}), Step):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks.extend(nn.Linear(8, 8) for _ in calling[len(self.blocks) :])

        def on_train_batch_end(self, *args: Any) -> None:
            for kind in added:
                kind.on_train_batch_end(self, *args)

        def extra(self, h: Tensor, x: Tensor, batch_idx: int) -> Any:
            return sum(kind.extra(self, h, x, batch_idx) for kind in added) / len(added)

        def called(self, number: int, block: nn.Module, h: Tensor) -> Any:
            return (calling[number] if number < len(calling) else Step).called(self, number, block, h)

    return [Together, *(kind for kind in kinds if kind not in (*added, *calling))]


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs["loss"]) if outputs else float("nan"))  # of a batch that is skipped


def fitted(
    kind: type[Step], layout: Layout | None, num_batches: int, batch_size: int = 8, **options: Any
) -> tuple[list[float], Step]:
    """The losses, and the module, after an epoch on one device or, with ``options`` of the strategy, as a pipeline."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch_size * num_batches, 8, generator=generator, dtype=torch.float64)
    losses, module = Losses(), kind().double()
    where = (1, "auto") if layout is None else (layout.world_size, layout.strategy(**options))
    run = trainer(*where, callbacks=[losses], precision="64-true")
    run.fit(module, DataLoader(TensorDataset(x, x.sum(-1).tanh()), batch_size=batch_size))
    return losses.found, module
