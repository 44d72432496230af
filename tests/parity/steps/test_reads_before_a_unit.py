"""Steps that read values of weights before they call a unit: one may that validates, if only the last stage goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from feature_parts import Data, check_on_every_rank, make, make_trainer, plain
from parity_run import Layout
from pool import WorkerError, WorkerPool
from small_models import Classifier
from torch import Tensor, nn


class Transitions(nn.Module):
    """A loss with weights, as a CRF is one; it decodes with them too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores @ self.weight, y)

    def decode(self, scores: Tensor) -> list[int]:
        return [int((row @ self.weight).argmax()) for row in scores]


class DecodesFirst(Classifier):
    """Decodes sample by sample, and computes its loss by a unit after that."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = Transitions()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self(x)
        hits = [label == int(target) for label, target in zip(self.loss.decode(scores), y, strict=True)]
        self.log("val_hits", torch.tensor(hits).double().mean())
        self.log("val_loss", self.loss(scores, y))


class ReadsInTheMiddle(DecodesFirst):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.layers[0](batch[0])
        if float(h.mean()) < 100:
            h = self.layers[1:](h)
        self.log("val_loss", self.loss(h, batch[1]))


def logged(layout: Layout | None, module: type[Classifier], **options: Any) -> Any:
    trainer = make_trainer(layout, **options)
    trainer.fit(make(module), datamodule=Data())
    trainer.validate(trainer.lightning_module, datamodule=Data(), verbose=False)
    return plain(dict(trainer.callback_metrics))


def logged_over_batches(layout: Layout | None) -> Any:
    options = {} if layout is None else {"strategy": layout.strategy(whole_batch_loss=True)}
    return logged(layout, DecodesFirst, **options)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", [Layout("zb_v", 2, 1, 3), Layout("1f1b", 2, 1, 2)], ids=str)
def test_a_step_decodes_before_its_loss(pool: WorkerPool, layout: Layout) -> None:
    assert check_on_every_rank(pool, logged, layout, DecodesFirst)["val_hits"] > 0


def test_it_decodes_the_whole_batch_where_the_loss_is_of_it(pool: WorkerPool) -> None:
    check_on_every_rank(pool, logged_over_batches, Layout("1f1b", 2, 1, 2))


def test_other_stages_that_go_on_without_the_value_are_an_error(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"reads a value that depends on weights \(layers\.0\), and the unit .layers"):
        pool.run(logged, Layout("1f1b", 4, 1, 2), ReadsInTheMiddle, world_size=4, timeout=120)
