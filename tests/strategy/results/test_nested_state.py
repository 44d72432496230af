"""What a step keeps in nested containers, in objects and on classes is what one device has, on every rank."""

from __future__ import annotations

import types
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from feature_parts import Data, check_on_every_rank, make, make_trainer
from parity_run import Layout
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass
class Meter:
    """The running mean of published code."""

    total: float = 0.0
    count: int = 0
    history: list[float] = field(default_factory=list)

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.history.append(self.total / self.count)


class Keeps(Classifier):
    of_class: ClassVar[list[float]] = []
    names_of_class: ClassVar[dict[str, list[int]]] = {"batches": []}

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[list[Tensor]] = [[], []]
        self.by_name: dict[str, list[Tensor]] = {"predictions": []}
        self.grouped: defaultdict[str, list[int]] = defaultdict(list)
        self.deep = {"a": [{"b": (deque(maxlen=3), [0])}]}
        self.meter = Meter()
        self.space = types.SimpleNamespace(last=None, seen=[])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        predictions = self(x)
        loss = cross_entropy(predictions, y)
        self.outputs[0].append(loss.detach())
        self.by_name["predictions"].append(predictions.detach().argmax(1))
        self.grouped[f"batch {batch_idx % 2}"].append(batch_idx)
        window, counts = self.deep["a"][0]["b"]
        window.append(loss.detach())
        counts[0] += 1
        self.meter.update(float(loss.detach()))
        self.space.last = loss.detach()
        self.space.seen.append(batch_idx)
        self.of_class.append(float(loss.detach()))
        self.names_of_class["batches"].append(batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs[1].append(cross_entropy(self(batch[0]), batch[1]))


def plainly(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plainly(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [plainly(item) for item in value]
    return plainly(vars(value)) if isinstance(value, (Meter, types.SimpleNamespace)) else value


def kept(layout: Layout | None) -> Any:
    Keeps.of_class.clear()
    Keeps.names_of_class["batches"].clear()
    module = make(Keeps)
    make_trainer(layout, num_sanity_val_steps=1).fit(module, Data(num_train=22, num_val=10))
    names = ("outputs", "by_name", "grouped", "deep", "meter", "space", "of_class", "names_of_class")
    return {name: plainly(getattr(module, name)) for name in names}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "layout", [Layout("interleaved_1f1b", 1, 1, 2), Layout("1f1b", 2, 1, 2), Layout("zb_h1", 3, 1, 4)], ids=str
)
def test_as_on_one_device(pool: WorkerPool, layout: Layout) -> None:
    expected = check_on_every_rank(pool, kept, layout)
    assert len(expected["outputs"][0]) == len(expected["of_class"]) == 6 and expected["deep"]["a"][0]["b"][1] == [6]
    assert len(expected["outputs"][1]) == 7 and expected["meter"]["count"] == 6
    assert expected["grouped"] == {"batch 0": [0, 2, 0, 2], "batch 1": [1, 1]}
