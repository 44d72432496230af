"""Outputs of microbatches put together as the whole batch's, and sent to every rank of a pipeline."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from one_pipeline import Regression, grid, report_of
from pool import WorkerPool
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_outputs import CausalLMOutput

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.distributed.messages import MessageLine
from lightning_pp.errors import SplitError
from lightning_pp.runtime.host_copies import HostCopies
from lightning_pp.strategy.results.logs import StepLogs
from lightning_pp.strategy.results.outputs import merge_outputs, packed_outputs

Pair = namedtuple("Pair", ["loss", "rows"])


@dataclass(frozen=True)
class Prediction:
    rows: Tensor
    label: str


class Bag(UserDict):  # type: ignore[type-arg]
    pass


def step(x: Tensor) -> dict[str, Any]:
    """Returns one of everything for a batch of shape [samples, 2]."""
    rows = x * 2
    loss = (x**2).mean()
    return {
        "loss": loss,
        "bfloat16": loss.bfloat16(),
        "float": float(loss),
        "rows": rows,
        "labels": x.argmax(1),
        "flags": x > 0,
        "array": rows.numpy(),
        "tuple": (rows, loss),
        "list": [rows, {"deep": loss}],
        "named": Pair(loss, rows),
        "dataclass": Prediction(rows, "model a"),
        "ordered": OrderedDict(rows=rows, note="same"),
        "bag": Bag(rows=rows),
        "huggingface": CausalLMOutput(loss=loss, logits=rows),
        "texts": [str(value) for value in x.argmax(1).tolist()],
        "boxes": [{"box": row.repeat(3, 1)} for row in rows],
        "constant": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "constant_array": np.arange(4),
        "none": None,
        "number": 7,
    }


def assert_equal(found: Any, expected: Any, at: str = "output") -> None:
    assert type(found) is type(expected), f"{at}: {found!r} is not {expected!r}"
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, at
        tolerance = 1e-2 if expected.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{at}: {text}")
    elif isinstance(expected, np.ndarray):
        np.testing.assert_allclose(found, expected, err_msg=at)
    elif isinstance(expected, (dict, UserDict)):
        assert list(found) == list(expected), at
        for key in expected:
            assert_equal(found[key], expected[key], f"{at}[{key}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), at
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{at}[{index}]")
    elif isinstance(expected, Prediction):
        assert_equal(vars(found), vars(expected), at)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected), at
    else:
        assert found == expected, at


def samples(number: int) -> Tensor:
    return torch.randn(number, 2, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("sizes", [[6], [3, 3], [2, 2, 2], [3, 2], [3, 3, 2]])
def test_merged_outputs_are_those_of_the_whole_batch(sizes: list[int]) -> None:
    batch = samples(sum(sizes))
    merged = merge_outputs([step(part) for part in batch.split(sizes)], sizes)
    assert_equal(merged, step(batch))


def test_gradients_are_left_behind() -> None:
    x = samples(4).requires_grad_()
    merged = merge_outputs([{"loss": part.sum(), "rows": part * 2} for part in x.split(2)], [2, 2])
    assert not merged["loss"].requires_grad
    assert not merged["rows"].requires_grad
    alone = merge_outputs([x.sum()], [4])
    assert not alone.requires_grad


def test_means_are_weighted() -> None:
    values = [torch.tensor(1.0), torch.tensor(4.0)]
    assert merge_outputs(values, [1, 2]) == 3.0
    assert merge_outputs(values, [1, 2], weights=[0.5, 0.5]) == 2.5
    assert merge_outputs([1.0, 4.0], [1, 2]) == 3.0
    assert merge_outputs([torch.tensor([1.0]), torch.tensor([4.0])], [2, 2]).tolist() == [2.5]
    counts = merge_outputs([torch.tensor(1), torch.tensor(4)], [2, 2])
    assert (counts, counts.dtype) == (2.5, torch.float32)
    # a microbatch without a value does not count
    assert merge_outputs([values[0], None, values[1]], [1, 5, 2]) == 3.0
    assert merge_outputs([None, None], [1, 1]) is None
    assert merge_outputs([{"loss": 2.0}, {"loss": 4.0, "high": 4.0}], [2, 2]) == {"loss": 3.0, "high": 4.0}


@pytest.mark.parametrize("sizes", [[2, 2], [2, 1], [1, 1, 1]])
def test_sequences_of_every_length_are_lists_of_samples(sizes: list[int]) -> None:
    """As decoded texts are, of which some are as long as a microbatch."""
    lengths = [3, 1, 2, 4][: sum(sizes)]
    batch = [torch.full((length,), index) for index, length in enumerate(lengths)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    parts = [batch[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert_equal(merge_outputs(parts, sizes), batch)


def test_what_cannot_be_merged_is_a_list() -> None:
    assert merge_outputs([3, 4], [2, 2]) == [3, 4]
    assert merge_outputs(["a", "b"], [2, 2]) == ["a", "b"]
    assert merge_outputs([{"a": 1}, [1]], [2, 2]) == [{"a": 1}, [1]]
    assert merge_outputs([1.0, "b"], [2, 2]) == [1.0, "b"]
    ragged = [torch.ones(2, 3), torch.ones(2, 4)]
    assert merge_outputs(ragged, [2, 2])[1].shape == (2, 4)
    statistics = [torch.ones(5), torch.zeros(5)]
    assert len(merge_outputs(statistics, [2, 2])) == 2


@pytest.mark.parametrize(("outputs", "num_samples"), [([], []), ([1.0], [1, 2])])
def test_every_microbatch_has_an_output(outputs: list[Any], num_samples: list[int]) -> None:
    with pytest.raises(ValueError, match="one entry per microbatch"):
        merge_outputs(outputs, num_samples)


def test_outputs_without_data_are_refused() -> None:
    with FakeTensorMode():
        fake = torch.ones(4, 7)
    with pytest.raises(SplitError, match=r"\(4, 7\)"):
        merge_outputs([{"hidden": fake}, {"hidden": fake}], [4, 4])
    with pytest.raises(SplitError, match=r"\(4, 7\)"):
        packed_outputs([fake], HostCopies())


def shared(groups: ControlGroups, outputs: list[Any], samples: list[int]) -> Any:
    """What a report gives every rank."""
    line = MessageLine(groups, torch.device("cpu"))
    report = report_of(line, StepLogs(), samples)
    if groups.is_last_stage:
        report.send(outputs)
    output, _ = report.receive_and_apply(Regression(), 0)
    line.drain()
    return output


class Held:
    """What the content of a message is made from, as the activations of a batch."""


def stays_while_the_message_is_under_way() -> bool:
    """In a worker; rank 0 listens a second later."""
    groups = grid(1, 1)
    line = MessageLine(groups, torch.device("cpu"))
    if not groups.is_last_stage:
        time.sleep(1.0)
        return bool(line.listen().result())
    held = Held()
    reference = weakref.ref(held)
    message = line.send(lambda held=held: isinstance(held, Held))
    del held
    assert message.result()
    stays = reference() is not None
    line.drain()
    return stays


def test_what_a_message_is_made_from_is_let_go_when_it_is_made(pool: WorkerPool) -> None:
    assert pool.run(stays_while_the_message_is_under_way, world_size=2, process_group=True) == [True, False]


def share(last_stage_rank: int) -> Any:
    groups = grid(1, last_stage_rank)
    batch = samples(5)
    large = torch.arange(3000, dtype=torch.float64).reshape(30, 100)
    outputs = [
        {
            **step(part),
            "large": large[:, :50],  # not contiguous
            "again": large,
            "bool": large > 7,
            "half": large.half(),
            "sparse": torch.eye(3).to_sparse(),
            "empty": torch.ones(0, 4),
        }
        for part in batch.split([3, 2])
    ]
    found = shared(groups, outputs, [3, 2])
    found["sparse"] = [matrix.to_dense() for matrix in found["sparse"]]
    return found


@pytest.mark.parametrize("last_stage_rank", [0, 1])
def test_every_rank_gets_the_outputs_of_the_last_stage(pool: WorkerPool, last_stage_rank: int) -> None:
    large = torch.arange(3000, dtype=torch.float64).reshape(30, 100)
    expected = {
        **step(samples(5)),
        "large": large[:, :50],
        "again": large,
        "bool": large > 7,
        "half": large.half(),
        "sparse": [torch.eye(3), torch.eye(3)],
        "empty": torch.ones(0, 4),
    }
    for found in pool.run(share, last_stage_rank, world_size=2, process_group=True):
        assert_equal(found, expected)


def share_unpicklable() -> None:
    shared(grid(1, 1), [{"function": lambda: 1}], [4])


def merge_fakes() -> None:
    with FakeTensorMode():
        fake = torch.ones(4, 7)
    shared(grid(1, 1), [fake], [4])


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [(share_unpicklable, "TypeError", "What the step returned cannot be sent"), (merge_fakes, "SplitError", "(4, 7)")],
)
def test_what_cannot_be_shared_raises_on_every_rank(pool: WorkerPool, function: Any, error: str, text: str) -> None:
    report = pool.run(function, world_size=2, process_group=True, expect_failure=True)
    assert [failure and failure.type for failure in report.failures] == [error, error]
    assert all(failure and text in failure.message for failure in report.failures)
