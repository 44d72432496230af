"""Steps that write into their batch train as on one device, and what they write stays in the step."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from feature_parts import Data, assert_equal_trees, make, make_trainer
from parity_run import Layout, whole_weights
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor
from torch.utils.data import DataLoader

LAYOUTS = [Layout("1f1b", 2, 1, 4), Layout("1f1b", 2, 1, 1), Layout("zb_v", 2, 1, 4)]


@dataclasses.dataclass
class Record:
    x: Tensor
    labels: Tensor
    extra: dict[str, Any]


class Plain:
    """A batch that is an object, as graph libraries have them."""

    def __init__(self, x: Tensor, labels: Tensor) -> None:
        self.x, self.labels, self.extra = x, labels, {"scale": torch.full((len(x),), 2.0, dtype=x.dtype)}

    def to(self, *args: Any, **kwargs: Any) -> Plain:
        return self


class Dicts(Data):
    def __init__(self, kind: str = "dict") -> None:
        super().__init__()
        self.kind = kind

    def loader(self, *args: Any) -> DataLoader[Any]:
        plain = super().loader(*args)
        return DataLoader(plain.dataset, plain.batch_size, sampler=plain.sampler, collate_fn=self.collate)

    def collate(self, samples: Any) -> Any:
        x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        if self.kind == "record":
            return Record(x, y, {"deep": [x.clone(), x + 1]})
        if self.kind == "plain":
            return Plain(x, y)
        if self.kind == "uncopyable":
            return Uncopyable(x, y)
        if self.kind == "columns":
            return {"x": x, "labels": y, "columns": COLUMNS}
        if self.kind == "list":
            return [x, y]
        return {"x": x, "labels": y, "deep": {"list": [x.clone(), x + 1]}}


class Writes(Classifier):
    data = "dict"
    writes = True

    def change(self, batch: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, labels = self.change(batch)
        loss = F.cross_entropy(self(x), labels)
        self.log("train_loss", loss, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, labels = self.change(batch)
        self.log("val_loss", F.cross_entropy(self(x), labels), batch_size=len(labels))


class SetsKeys(Writes):
    def change(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch["x"] = batch["x"] * 2
        return batch["x"], batch["labels"]


class PopsKeys(Writes):
    def change(self, batch: Any) -> tuple[Tensor, Tensor]:
        labels = batch.pop("labels")
        del batch["deep"]["list"][0]
        batch["deep"]["new"] = batch["deep"]["list"].pop() * 0.5
        return batch["x"] + batch["deep"]["new"], labels


class WritesInPlace(Writes):
    def change(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch["x"].mul_(2.0)
        batch["deep"]["list"][1][:, 0] = 0
        batch["x"].unsqueeze_(0)
        return (batch["x"] + batch["deep"]["list"][1])[0], batch["labels"]


class SetsEntries(Writes):
    data = "list"

    def change(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch[0] = batch[0] + 1
        batch.append(batch[0] * 2)
        return batch[2], batch[1]


class SetsFields(Writes):
    data = "record"

    def change(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch.x = batch.x * 2
        batch.extra["deep"][0] = batch.extra["deep"][0] + 1
        return batch.x + batch.extra["deep"][0], batch.labels


class SetsAttributes(Writes):
    data = "plain"  # cannot be cut, so with one microbatch only

    def change(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch.x = batch.x * batch.extra["scale"][:, None]
        batch.extra["scale"] = batch.extra["scale"] + 1
        batch.num_runs = getattr(batch, "num_runs", 0) + 1
        return batch.x * batch.num_runs, batch.labels


COLUMNS = pd.Index(["labels", "x"])  # the same object in every batch


class AsksPandas(Writes):
    """It writes nothing; pandas keeps in the object how the question was answered."""

    data = "columns"
    writes = False

    def change(self, batch: Any) -> tuple[Tensor, Tensor]:
        columns = batch["columns"]
        assert columns.get_loc("x") == 1 and columns.dtype is not None
        return batch[columns[1]], batch[columns[0]]


class KeepsFeatures(Writes):
    """What depends on weights is written into the batch, and read from there."""

    def forward_of(self, batch: Any) -> Tensor:
        batch["features"] = batch["x"] = self.layers[:3](batch["x"])
        batch["deep"]["all"] = [batch["features"]]
        return self.layers[3:](batch["deep"]["all"][0] + batch["features"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.forward_of(batch), batch["labels"])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", F.cross_entropy(self.forward_of(batch), batch["labels"]))


def train(kind: type[Writes], layout: Layout | None = None) -> tuple[list[float], dict[str, Tensor], list[float]]:
    losses: list[float] = []
    seen: list[float] = []

    class Notes(kind):  # type: ignore[valid-type, misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))
            x = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch.x
            seen.append(float(x.sum()))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = make(Notes)
        trainer = make_trainer(layout)
        trainer.fit(module, Dicts(kind.data))
    written = [str(warning.message) for warning in told if "writes into its batch" in str(warning.message)]
    if layout is not None and trainer.is_global_zero:
        assert bool(written) == kind.writes, written
        assert all("on_train_batch_end of Notes" in message for message in written), written
    losses.append(float(trainer.callback_metrics["val_loss"]))
    return losses, whole_weights(module), seen


CASES = [
    (kind, layout)
    for kind in (SetsKeys, PopsKeys, WritesInPlace, SetsEntries, SetsFields, SetsAttributes, AsksPandas, KeepsFeatures)
    for layout in LAYOUTS
    if kind is not SetsAttributes or layout.num_microbatches == 1
]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("kind", "layout"), CASES, ids=lambda each: getattr(each, "__name__", str(each)))
def test_trained_as_on_one_device(pool: WorkerPool, kind: type[Writes], layout: Layout) -> None:
    losses, expected, _ = train(kind)
    before = [float(total) for total in sums_of_batches()]
    weights: dict[str, Tensor] = {}
    for found, part, seen in pool.run(train, kind, layout, world_size=layout.world_size, timeout=60):
        assert_equal_trees(found, losses)
        assert_equal_trees(seen, before * 2)  # hooks see the batch as it was
        weights.update(part)
    assert_equal_trees(weights, expected)


class Uncopyable(Plain):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("it is bound to a device")


class SetsAttributesOfSuch(SetsAttributes):
    data = "uncopyable"


def test_objects_that_cannot_be_copied_are_refused(pool: WorkerPool) -> None:
    for message in pool.refusals("BatchError", train, SetsAttributesOfSuch, LAYOUTS[1], world_size=2, timeout=60):
        assert "training_step writes into batch.x" in message and "__copy__" in message


def sums_of_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(14, 6, generator=generator, dtype=torch.float64)
    return [part.sum() for part in x.split(8)]
