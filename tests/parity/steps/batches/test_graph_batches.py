"""Batches whose rows refer to each other: right whole or with a function that cuts them, else an error at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from feature_parts import assert_equal_trees, check_with_weights, make_trainer
from parity_run import QUIET, Layout, whole_weights
from pool import WorkerPool
from small_models import NotesLosses
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pp import BatchPart, PipelineParallelStrategy
from lightning_pp.errors import BatchError
from lightning_pp.split.data.microbatch import split_by

PAGE = Path(__file__).parents[4] / "docs" / "training" / "batches.md"


def documented() -> Any:
    """The function in the documentation."""
    code = re.search(r"```python\n(.*?def split_graphs.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code.group(1), names)
    return names["split_graphs"]


def graphs(number: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(number):
        size = 3 + index % 4
        x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        edges = torch.randint(0, size, (2, 2 * size), generator=generator)
        made.append((x, edges, x.sum().sin().reshape(1)))
    return made


def collate(samples: Any) -> dict[str, Tensor]:
    sizes = torch.tensor([len(x) for x, _, _ in samples])
    starts = sizes.cumsum(0) - sizes
    return {
        "x": torch.cat([x for x, _, _ in samples]),
        "edges": torch.cat([edges + start for (_, edges, _), start in zip(samples, starts, strict=True)], 1),
        "graph": torch.arange(len(samples)).repeat_interleave(sizes),
        "y": torch.cat([y for _, _, y in samples]),
    }


class Plain:
    """As graph libraries have it: an object that no walk over containers goes into."""

    def __init__(self, content: dict[str, Tensor]) -> None:
        self.__dict__.update(content)

    def to(self, *args: Any, **kwargs: Any) -> Plain:
        return Plain({name: value.to(*args, **kwargs) for name, value in vars(self).items()})


def collate_plain(samples: Any) -> Plain:
    return Plain(collate(samples))


def split_plain(batch: Plain, num_microbatches: int) -> list[BatchPart]:
    parts = documented()(vars(batch), num_microbatches)
    return [BatchPart(Plain(part.data), part.num_samples) for part in parts]


class Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.message = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h: Tensor, edges: Tensor) -> Tensor:
        return torch.tanh(self.own(h).index_add(0, edges[1], self.message(h)[edges[0]]))


class Graphs(NotesLosses):
    collate = staticmethod(collate)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Linear(6, 8)
        self.convolutions = nn.ModuleList(Convolution(8) for _ in range(4))
        self.head = nn.Linear(8, 1)
        self.seen: list[Any] = []

    def forward(self, batch: Any) -> Tensor:
        batch = batch if isinstance(batch, dict) else vars(batch)
        h = self.embedding(batch["x"])
        for convolution in self.convolutions:
            h = convolution(h, batch["edges"])
        number = int(batch["graph"].max()) + 1
        pooled = torch.zeros(number, 8, dtype=h.dtype).index_add(0, batch["graph"], h)
        return self.head(pooled / torch.bincount(batch["graph"])[:, None]).squeeze(-1)

    def loss(self, batch: Any) -> Tensor:
        y = batch["y"] if isinstance(batch, dict) else batch.y
        return (self(batch) - y).square().mean()  # a mean over graphs, by hand

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, batch_size=8)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        predictions = self(batch)
        self.log("val_loss", self.loss(batch), batch_size=len(predictions))
        return predictions

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        self.seen.append(outputs.tolist())

    def loader(self, number: int, seed: int) -> DataLoader[Any]:
        placement = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        replicas = placement["num_replicas"]
        samples = graphs(number, seed)
        batches = [samples[start : start + 8] for start in range(0, number, 8)]
        part = [list(batch[placement["rank"] :: replicas]) for batch in batches]
        return DataLoader(part, batch_size=None, collate_fn=type(self).collate)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(24, 1)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(13, 2)


class GraphObjects(Graphs):
    collate = staticmethod(collate_plain)


class Nodes(Graphs):
    """A label for some of the nodes, and a mean by torch over those."""

    def loss(self, batch: Any) -> Tensor:
        h = self.embedding(batch["x"])
        for convolution in self.convolutions:
            h = convolution(h, batch["edges"])
        mask = batch["x"][:, 0] > 0
        return F.mse_loss(self.head(h).squeeze(-1)[mask], batch["x"].sum(-1)[mask])


def train(layout: Layout | None, kind: type[Graphs], split: Any = None) -> tuple[Any, ...]:
    split = documented() if split == "documented" else split
    module = kind()
    trainer = make_trainer(layout, **({} if layout is None else {"strategy": layout.strategy(split_batch=split)}))
    trainer.fit(module)
    logged = [float(trainer.callback_metrics[name]) for name in ("train_loss_epoch", "val_loss")]
    return module.losses, module.seen, logged, whole_weights(module)


CASES = [
    (Graphs, Layout("1f1b", 2, 1, 1), None),
    (Graphs, Layout("1f1b", 2, 1, 1), "documented"),
    (Graphs, Layout("1f1b", 2, 1, 4), "documented"),
    (Graphs, Layout("zb_v", 2, 1, 5), "documented"),
    (Nodes, Layout("1f1b", 2, 1, 1), None),
    (Nodes, Layout("1f1b", 2, 1, 4), "documented"),
    (GraphObjects, Layout("1f1b", 2, 1, 1), None),
    (GraphObjects, Layout("1f1b", 2, 1, 4), split_plain),
]


def named(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("kind", "layout", "split"), CASES, ids=named)
def test_trained_as_on_one_device(pool: WorkerPool, kind: type[Graphs], layout: Layout, split: Any) -> None:
    check_with_weights(pool, train, layout, kind, split)


def test_replicas_weigh_by_graphs(pool: WorkerPool) -> None:
    expected = train(None, Graphs)[-1]
    layout = Layout("1f1b", 1, 2, 3)
    weights: dict[str, Tensor] = {}
    for *_, part in pool.run(train, layout, Graphs, "documented", world_size=2, timeout=60):
        weights.update(part)
    assert_equal_trees(weights, expected)


def test_objects_that_stay_whole_train_on_replicas(pool: WorkerPool) -> None:
    expected = train(None, GraphObjects)[-1]
    weights: dict[str, Tensor] = {}
    for *_, part in pool.run(train, Layout("1f1b", 1, 2, 1), GraphObjects, world_size=2, timeout=60):
        weights.update(part)
    assert_equal_trees(weights, expected)


def test_objects_that_cannot_be_cut_are_refused(pool: WorkerPool) -> None:
    for message in pool.refusals("BatchError", train, Layout("1f1b", 2, 1, 4), GraphObjects, world_size=2, timeout=60):
        assert "split_batch=" in message and "num_microbatches=1" in message


def error_and_notes(kind: type[Graphs]) -> tuple[str, list[str], bool]:
    """What ends a fit of several microbatches without a function that cuts graphs; whether it is the first batch."""
    module = kind()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    trainer = L.Trainer(
        **QUIET, devices=2, max_epochs=1, precision="64-true", strategy=Layout("1f1b", 2, 1, 4).strategy()
    )
    with pytest.raises(Exception) as found:  # noqa: PT011
        trainer.fit(module)
    own = dict(module.named_parameters())
    is_as_before = all(torch.equal(own[name].detach(), before[name].to(own[name].dtype)) for name in own)
    return type(found.value).__name__, getattr(found.value, "__notes__", []), is_as_before


@pytest.mark.parametrize("kind", [Graphs, Nodes])
def test_rows_that_refer_to_each_other_end_the_first_batch(pool: WorkerPool, kind: type[Graphs]) -> None:
    found = pool.run(error_and_notes, kind, world_size=2, timeout=60)
    assert all(is_as_before for *_, is_as_before in found)  # nothing was updated
    assert {name for name, *_ in found} & {"IndexError", "SplitError", "RuntimeError"}
    text = "\n".join(note for _, notes, _ in found for note in notes)
    assert "There its tensors differ in length: batch['x'] has" in text
    assert "If rows refer to each other, give PipelineParallelStrategy(split_batch=...)." in text
    assert "samples, to check that its loss adds up" not in text  # the rows are nodes


def halves(batch: Any, number: int) -> Any:
    return [batch[: len(batch) // 2], batch[len(batch) // 2 :]]


def test_what_a_function_returns_is_checked() -> None:
    x = torch.randn(7, 2)
    assert [(part.num_samples, part.weight) for part in split_by(halves, x, 4)] == [(3, 3 / 7), (4, 4 / 7)]
    for split, message in (
        (lambda batch, number: [batch] * 5, "returned 5 parts. It must return a list of 1 to 4"),
        (lambda batch, number: [], "returned 0 parts"),
        (lambda batch, number: batch, "object of type Tensor"),
        (lambda batch, number: [BatchPart(batch, 0)], "num_samples=0"),
        (lambda batch, number: [{"a": x, "b": x[:2]}], r"batch\['a'\] has 7 rows, batch\['b'\] 2.*BatchPart"),
        (lambda batch, number: ["text"], "no tensor with a dimension 0"),
    ):
        with pytest.raises(BatchError, match=message):
            split_by(split, x, 4)
    with pytest.raises(ValueError, match="split_batch=3 must be a function"):
        PipelineParallelStrategy(2, split_batch=3)  # type: ignore[arg-type]
