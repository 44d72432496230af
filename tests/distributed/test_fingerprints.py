"""All ranks of a pipeline see the same batch: any difference is found, and told with the ranks and the entry."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from pipelined_fit import trainer
from pool import WorkerPool
from small_models import Blocks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from lightning_pp.distributed.fingerprints import MOST_PARTS, _number_on_device, check_same_batch, fingerprint
from lightning_pp.errors import BatchError


@dataclasses.dataclass
class Pair:
    x: Any
    y: Any


class Plain:
    def __init__(self, x: Any, extra: Any = None) -> None:
        self.x, self.extra = x, extra


def same(one: Any, other: Any) -> bool:
    return fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"x": torch.arange(1000.0).reshape(10, 100), "y": ["a", "b"], "n": 3},
        lambda: [torch.arange(6).bool(), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64)],
        lambda: (np.arange(5), b"bytes", 2.5, None, True),
        lambda: Pair(Plain(torch.ones(3), {"deep": [torch.zeros(2)]}), torch.ones(0)),
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.arange(12.0).reshape(3, 4).t(),
        lambda: torch.arange(9, dtype=torch.uint8)[1:],
    ],
)
def test_equal_batches_have_equal_fingerprints(make: Any) -> None:
    assert same(make(), make())
    found = pickle.loads(pickle.dumps(fingerprint(make())))
    check_same_batch([found, fingerprint(make(), 1)], 0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(128), torch.zeros(128).index_fill(0, torch.tensor([1]), 1.0)),  # odd places
        (torch.arange(1000.0).reshape(10, 100), torch.arange(1000.0).reshape(100, 10)),
        (torch.arange(1000.0), torch.arange(1000.0).flip(0)),
        (torch.arange(1000.0), torch.arange(1000.0).double()),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3)),
        (torch.zeros(4, dtype=torch.int64), torch.full((4,), -1)),
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}),
        ({"x": "some text"}, {"x": "some Text"}),
        ([1, 2], [1, 3]),
        ([1], [True]),
        ([2.5], [2.5000001]),
        ({"a", "b"}, {"a", "c"}),
        (Pair(1, 2), Pair(2, 1)),
        (Plain(torch.ones(3)), Plain(torch.zeros(3))),
        (Plain(1, {"a": [1]}), Plain(1, {"a": [2]})),
        (np.arange(5), np.arange(5)[::-1]),
        (torch.eye(4).to_sparse(), (2 * torch.eye(4)).to_sparse()),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
    ],
)
def test_other_batches_have_other_fingerprints(one: Any, other: Any) -> None:
    assert not same(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int16])
@pytest.mark.parametrize("size", [100, 5_003, 70_001])
def test_every_element_counts(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    x = torch.randint(1, 100, (size,)).to(dtype)
    expected = fingerprint(x)
    for place in [0, 1, size // 2 + 1, size - 1, *torch.randint(size, (20,)).tolist()]:
        other = x.clone()
        other[place] += 1
        assert fingerprint(other) != expected
    swapped = x.clone()
    swapped[[0, size - 1]] = torch.tensor([200, 100]).to(dtype)
    back = swapped.clone()
    back[[size - 1, 0]] = swapped[[0, size - 1]]
    assert fingerprint(back) != fingerprint(swapped)
    for other in (-x, x.roll(1), x.flip(0), x + 1):  # all at once; of signs it is an even number of high bits
        assert fingerprint(other) != expected


@pytest.mark.parametrize("size", [3, 4_096, 600_001, 9_000_001])
def test_what_is_read_on_an_accelerator_counts_too(size: int) -> None:
    x = torch.randint(1, 100, (size,), dtype=torch.uint8)  # the same operations, here on the host
    expected = int(_number_on_device(x))
    assert int(_number_on_device(x.clone())) == expected
    for place in [0, 1, size - 1, *torch.randint(size, (10,)).tolist()]:
        other = x.clone()
        other[place] ^= 128
        assert int(_number_on_device(other)) != expected
    assert int(_number_on_device(x ^ 128)) != expected
    assert int(_number_on_device(x.roll(8))) != expected or size < 8


def test_a_difference_that_lasts_is_found_in_a_large_batch() -> None:
    large = {
        "x": torch.zeros(5_000_001, dtype=torch.float64),
        "turned": torch.zeros(1000, 5000).t(),
        "y": torch.ones(9),
    }
    for entry, place in (("x", (0,)), ("x", (5_000_000,)), ("x", (1_234_567,)), ("turned", (4_999, 999))):
        other = {**large, entry: large[entry].clone()}
        other[entry][place] = 1.0
        found = [fingerprint(large, part=number) != fingerprint(other, part=number) for number in range(MOST_PARTS)]
        assert any(found), (entry, place, found)
        assert fingerprint(large) != fingerprint(other)
    other = {**large, "y": torch.zeros(9)}  # what is small is read every time
    assert all(fingerprint(large, part=number) != fingerprint(other, part=number) for number in range(MOST_PARTS))


def test_the_error_names_ranks_and_entries() -> None:
    batch = {"x": torch.ones(4), "labels": torch.ones(4), "more": [torch.ones(2), "text"]}
    other = {"x": torch.ones(4), "labels": torch.zeros(4), "more": [torch.ones(2), "texts"]}
    seen = [fingerprint(batch, 0), fingerprint(other, 2), fingerprint(batch, 4)]
    with pytest.raises(BatchError, match=r"Batch 7 differs .* at batch\['labels'\], batch\['more'\]\[1\]: ranks 0, 4"):
        check_same_batch(seen, 7)
    with pytest.raises(BatchError, match=r"and rank 2 loaded 2 different batches.*seed_everything"):
        check_same_batch(seen, 7)
    sent = pickle.loads(pickle.dumps(seen[1]))
    with pytest.raises(BatchError, match=r"at batch\['labels'\]"):
        check_same_batch([seen[0], sent], 7)
    with pytest.raises(BatchError, match="in the entries that it has: rank 0 and rank 1"):
        check_same_batch([fingerprint(batch, 0), fingerprint({"x": 1}, 1)], 0)


class Numbered(Dataset[Any]):
    """Rows of which one element is another on one rank, from a sample on."""

    def __init__(self, rank: int, first: int) -> None:
        self.rank, self.first = rank, first

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.full((8,), 0.1 * index)
        y = x.sum()
        if self.rank == 1 and index >= self.first:
            y = y + 1.0
        return {"x": x, "y": y}


class OfRank(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch["x"], batch["y"]))


def fit_numbered(first: int) -> None:
    run = trainer()
    run.fit(OfRank(), DataLoader(Numbered(run.global_rank, first), batch_size=4))


@pytest.mark.parametrize(("first", "batch"), [(0, 0), (13, 3)])
def test_differences_are_found_in_training_on_every_rank(pool: WorkerPool, first: int, batch: int) -> None:
    report = pool.run(fit_numbered, first, world_size=2, expect_failure=True)
    told = [
        failure for failure in report.failures if failure is not None and f"Batch {batch} differs" in failure.message
    ]
    assert told, report.failures
    for failure in told:
        assert "at batch['y']: rank 0 and rank 1" in failure.message
    assert len(told) == 2 or batch > 0


class Largest(TorchDispatchMode):
    """Notes the most bytes of a tensor that an operation makes."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shared = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in shared:
            self.num_bytes = max(self.num_bytes, result.untyped_storage().nbytes())
        return result


def test_a_large_batch_on_a_device_takes_no_large_copies() -> None:
    x = torch.zeros(64 << 20, dtype=torch.uint8)
    with Largest() as largest:
        _number_on_device(x)
    assert 0 < largest.num_bytes <= 8 << 20
