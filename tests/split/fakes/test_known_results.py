"""Operations on fakes: what is remembered of them is what real tensors show, and what must be asked again is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_pp.split.fakes.fake_mode import FakeValueMode, LostEditError, NeedsDataError

Given = dict[str, Tensor]

POSITIONS = torch.arange(6)
MASK = torch.ones(2, 6, dtype=torch.bool).tril()

OPERATIONS: dict[str, Callable[[Given], Any]] = {
    "add": lambda given: given["x"] + given["y"],
    "add_real": lambda given: given["x"] + POSITIONS.unsqueeze(1),
    "add_number": lambda given: given["count"] + 1,
    "add_fraction": lambda given: given["count"] + 1.0,
    "divide": lambda given: given["count"] / given["count"],
    "cast": lambda given: given["x"].to(torch.bfloat16),
    "view": lambda given: given["x"].view(3, 2, 8).transpose(0, 2),
    "slice": lambda given: given["x"][:, 1:, ::2],
    "slice_of_slice": lambda given: given["x"][:, 1:][:, 1:],
    "select": lambda given: given["x"][:, 0],
    "split": lambda given: given["x"].split(2, 1),
    "unbind": lambda given: given["x"].unbind(1),
    "expand": lambda given: given["x"].unsqueeze(1).expand(2, 3, 6, 4),
    "reshape": lambda given: given["x"].transpose(1, 2).reshape(2, 24),
    "contiguous": lambda given: given["x"].transpose(1, 2).contiguous(),
    "concatenate": lambda given: torch.cat([given["x"], given["y"]], 1),
    "stack": lambda given: torch.stack((given["x"], given["y"])),
    "index": lambda given: given["x"][:, POSITIONS.flip(0)],
    "masked": lambda given: given["x"].masked_fill(MASK.unsqueeze(-1), 0.0),
    "where": lambda given: torch.where(MASK.unsqueeze(-1), given["x"], given["y"]),
    "norm": lambda given: F.layer_norm(given["x"], (4,)),
    "statistics": lambda given: torch.var_mean(given["x"], -1),
    "largest": lambda given: given["x"].max(1),
    "product": lambda given: given["x"] @ given["w"],
    "linear": lambda given: F.linear(given["x"], given["w"]),
    "attention": lambda given: F.scaled_dot_product_attention(given["x"], given["y"], given["y"]),
    "dropout": lambda given: F.dropout(given["x"], 0.5),
    "new": lambda given: given["x"].new_zeros(2, 3),
    "like": lambda given: torch.ones_like(given["x"], dtype=torch.int64),
    "detached": lambda given: given["x"].detach(),
    "scaled": lambda given: given["x"].mul_(2.0),
    "added": lambda given: given["x"].add_(given["y"]),
    "part_filled": lambda given: given["x"][:, 0].fill_(1.0),
    "turned": lambda given: given["x"].transpose_(0, 1),
    "with_a_dimension": lambda given: given["x"].unsqueeze_(0),
}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_pp.split.fakes.known_results._RESULTS", {})


def real() -> Given:
    return {
        "x": torch.rand(2, 6, 4),
        "y": torch.rand(2, 6, 4),
        "w": nn.Parameter(torch.rand(4, 4)),
        "count": torch.ones(2, 6, dtype=torch.int64),
    }


def fakes(mode: FakeValueMode) -> Given:
    with mode:
        return {
            name: nn.Parameter(torch.empty(tensor.shape))
            if name == "w"
            else torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in real().items()
        }


def memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def look(operation: Callable[[Given], Any], given: Given) -> list[Any]:
    """All that can be seen of what ``operation`` gives, and of what it was given, besides values."""
    inputs = list(given.values())
    outputs = operation(given)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    memories = [memory(tensor) for tensor in inputs + outputs]
    return [
        [
            (
                tuple(tensor.shape),
                tensor.stride(),
                tensor.storage_offset(),
                tensor.dtype,
                tensor.device,
                tensor.layout,
                tensor.requires_grad,
                tensor._version,
                tensor._is_view(),
                tensor.untyped_storage().nbytes(),
            )
            for tensor in inputs + outputs
        ],
        [memories.index(place) for place in memories],  # which share theirs with which
        [next((place for place, tensor in enumerate(inputs) if tensor is output), None) for output in outputs],
    ]


@pytest.mark.by_day(24)
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_known_is_what_real_tensors_show(name: str) -> None:
    expected = look(OPERATIONS[name], real())
    mode = FakeValueMode()
    for _ in range(3):
        assert look(OPERATIONS[name], fakes(mode)) == expected


@pytest.mark.parametrize("modes", [1, 2])
@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"turned", "with_a_dimension"}))
def test_torch_is_asked_once(name: str, modes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = FakeValueMode()
    OPERATIONS[name](fakes(mode))
    given = fakes(mode if modes == 1 else FakeValueMode())

    def dispatch(*_: Any) -> Any:
        raise AssertionError("asked again")

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    OPERATIONS[name](given)


def test_results_are_tensors_of_their_own() -> None:
    mode = FakeValueMode()
    given = fakes(mode)
    first, second, third = (given["x"] + given["y"] for _ in range(3))
    second.transpose_(0, 1)
    third.mark = "mine"  # type: ignore[attr-defined]
    fourth = given["x"] + given["y"]
    assert [tuple(tensor.shape) for tensor in (first, second, third, fourth)] == [(2, 6, 4), (6, 2, 4)] + 2 * [
        (2, 6, 4)
    ]
    assert not hasattr(fourth, "mark")
    assert len({memory(tensor) for tensor in (first, second, third, fourth)}) == 4


def test_what_the_dtype_of_new_tensors_depends_on() -> None:
    given = fakes(FakeValueMode())
    assert (given["count"] / 2).dtype == (given["count"] / 2).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (given["count"] / 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_fakes_of_two_modes_are_not_mixed_up() -> None:
    first, second = fakes(FakeValueMode()), fakes(FakeValueMode())
    for given in (first, second):
        assert (given["x"] + given["y"]).fake_mode is given["x"].fake_mode  # type: ignore[attr-defined]


def test_what_needs_data_is_refused_every_time() -> None:
    given = fakes(FakeValueMode())
    for _ in range(2):
        for read in (
            lambda: given["x"][given["x"] > 0],
            lambda: given["count"].nonzero(),
            lambda: given["x"].sum().item(),
        ):
            with pytest.raises(NeedsDataError):
                read()
        assert given["x"][MASK].shape == (int(MASK.sum()), 4)
    assert given["x"][~MASK].shape == (12 - int(MASK.sum()), 4)


def test_what_fails_whatever_the_data_are_raises_its_own_error() -> None:
    logits = fakes(FakeValueMode())["x"].float().log_softmax(-1)  # [2, 6, 4]
    arguments = torch.ones(9, dtype=torch.long), (2,) * 6, (1,) * 5  # five lengths for six samples
    with pytest.raises(RuntimeError) as expected:
        F.ctc_loss(torch.zeros(2, 6, 4).log_softmax(-1), *arguments)
    with pytest.raises(RuntimeError) as found:
        F.ctc_loss(logits, *arguments)
    assert str(found.value) == str(expected.value)


def test_an_edit_of_a_real_tensor_is_refused_every_time() -> None:
    mode = FakeValueMode()
    given = fakes(mode)
    average = torch.zeros(2, 6, 4)
    for _ in range(2):
        average.lerp_(given["x"], 0.5)
        with mode.refusing_edits(), pytest.raises(LostEditError):
            average.lerp_(given["x"], 0.5)


def test_numbers_that_change_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_pp.split.fakes.known_results._MOST_RESULTS", 8)
    mode = FakeValueMode()
    given = fakes(mode)
    for number in range(100):
        assert (given["x"] * (1.0 + number)).shape == (2, 6, 4)
    assert len(mode._known._results) <= 8


def test_compiled_code_takes_fakes() -> None:
    given = fakes(FakeValueMode())
    compiled = torch.compile(lambda x, y: F.gelu(x + y).transpose(0, 1), backend="eager")
    for _ in range(2):
        assert compiled(given["x"], given["y"]).shape == (6, 2, 4)
