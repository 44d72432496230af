"""Cutting batches into microbatches."""

from __future__ import annotations

import re
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from lightning_pp.errors import BatchError, ConfigurationError
from lightning_pp.split.data.microbatch import batch_size_of, first_samples, split_batch
from lightning_pp.split.data.tree import leaves_of, own_copy, tensors_of

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Tensor
    name: list[str]
    weight: float = 0.5


@dataclass(frozen=True)
class FrozenSample:
    x: Tensor
    y: Tensor | None = None


def x(count: int = 6) -> Tensor:
    return torch.arange(count * 2).view(count, 2)


NAMES = list("abcdef")
BATCHES: dict[str, Any] = {
    "tensor": x(),
    "list": [x(), torch.arange(6)],
    "tuple": (x(), torch.arange(6)),
    "dict": {"x": x(), "nested": {"y": torch.arange(6)}},
    "namedtuple": Pair(x(), torch.arange(6)),
    "dataclass": Sample(x(), NAMES),
    "frozen": FrozenSample(x()),
    "encoding": BatchEncoding({"input_ids": x(), "text": NAMES}),
    "model_output": BaseModelOutput(last_hidden_state=x()),
    "strings": (x(), NAMES),
    "mixed": [{"x": x(), "deep": (Pair(x(), NAMES), [None, 3])}],
}


def shapes(tree: Any) -> list[Any]:
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(tree)]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 6])
def test_slices_are_the_batch(name: str, num_microbatches: int) -> None:
    batch = BATCHES[name]
    assert batch_size_of(batch) == 6
    microbatches = split_batch(batch, num_microbatches)
    assert [microbatch.num_samples for microbatch in microbatches] == {1: [6], 2: [3, 3], 4: [2, 2, 1, 1], 6: [1] * 6}[
        num_microbatches
    ]
    assert sum(microbatch.weight for microbatch in microbatches) == pytest.approx(1.0, abs=1e-15)
    assert all(type(microbatch.data) is type(batch) for microbatch in microbatches)
    parts = [tensors_of(microbatch.data) for microbatch in microbatches]
    for whole, *slices in zip(tensors_of(batch), *parts, strict=True):
        assert torch.equal(torch.cat(slices), whole)
        assert all(part.data_ptr() >= whole.data_ptr() for part in slices)  # views
    for microbatch in microbatches:
        texts = [leaf for leaf in leaves_of(microbatch.data) if isinstance(leaf, str)]
        if "a" in leaves_of(batch):
            assert len(texts) == microbatch.num_samples


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("number", [1, 2, 4, 5, 6])
def test_first_samples_are_those_of_single_slices(name: str, number: int) -> None:
    batch = BATCHES[name]
    first = first_samples(batch, number)
    assert first.num_samples == number and type(first.data) is type(batch)
    singles = [tensors_of(microbatch.data) for microbatch in split_batch(batch, 6)[:number]]
    for found, *slices in zip(tensors_of(first.data), *singles, strict=True):
        assert torch.equal(torch.cat(slices), found)
    if 6 % number == 0:
        assert repr(first.data) == repr(split_batch(batch, 6 // number)[0].data)


def test_there_are_no_more_first_samples_than_samples() -> None:
    with pytest.raises(ConfigurationError, match="microbatches of 7 samples .* the first batch has 6 samples"):
        first_samples(x(), 7)
    with pytest.raises(ConfigurationError, match="the first batch has samples that cannot be counted"):
        first_samples(3.0, 1)
    with pytest.raises(BatchError, match="cannot be cut into 4 microbatches"):
        first_samples(nn.utils.rnn.pack_sequence([x(4), x(3)]), 2)


def test_strings_go_with_their_samples() -> None:
    first, second = split_batch(BATCHES["encoding"], 2)
    assert first.data["text"] == ["a", "b", "c"] and second.data["text"] == ["d", "e", "f"]
    assert isinstance(first.data, BatchEncoding) and first.data.input_ids.shape == (3, 2)


def test_a_model_output_keeps_its_attributes() -> None:
    first = split_batch(BATCHES["model_output"], 3)[0].data
    assert first.last_hidden_state is first["last_hidden_state"]
    assert first.last_hidden_state.shape == (2, 2)


def test_what_has_no_batch_dimension_goes_whole() -> None:
    batch = {
        "x": x(),
        "y": torch.arange(6),
        "scalar": torch.tensor(3.0),
        "mask": torch.ones(4, 4),
        "class_weights": torch.ones(3),
        "number": 7,
        "text": "abcdef",
        "none": None,
        "labels": ["cat", "dog"],
        "option": True,
    }
    for microbatch in split_batch(batch, 2):
        data = microbatch.data
        assert data["scalar"] is batch["scalar"] and data["mask"] is batch["mask"]
        assert data["class_weights"] is batch["class_weights"]
        assert data["number"] == 7 and data["text"] == "abcdef" and data["none"] is None
        assert data["labels"] == ["cat", "dog"] and data["option"] is True
        assert data["y"].shape == (3,)


def test_uneven_and_small_batches() -> None:
    weights = [microbatch.weight for microbatch in split_batch(x(7), 3)]
    assert weights == [3 / 7, 2 / 7, 2 / 7]
    few = split_batch((x(2), torch.arange(2)), 4)
    assert [microbatch.num_samples for microbatch in few] == [1, 1]
    assert split_batch(x(1), 4)[0].data.shape == (1, 2)


def test_detection_batches_have_an_entry_per_sample() -> None:
    """Images and boxes of different sizes: tensors have no batch dimension, lists do."""
    images = [torch.ones(3, 8 + index, 8) for index in range(4)]
    targets = [{"boxes": torch.ones(index + 1, 4), "labels": torch.ones(index + 1)} for index in range(4)]
    for batch in ((images, targets), {"images": tuple(images), "targets": targets}):
        assert batch_size_of(batch) == 4
        first, second, third = split_batch(batch, 3)
        assert shapes(first.data) == [(3, 8, 8), (3, 9, 8), (1, 4), (1,), (2, 4), (2,)]
        assert shapes(third.data) == [(3, 11, 8), (4, 4), (4,)]
        assert second.num_samples == 1
    same = ([torch.ones(3, 8, 8)] * 4, [{"boxes": torch.ones(2, 4), "labels": torch.ones(2)}] * 4)
    assert shapes(split_batch(same, 4)[0].data) == [(3, 8, 8), (2, 4), (2,)]
    ids = {"targets": targets, "ids": torch.arange(4), "names": list("abcd")}
    assert [split.data["ids"].tolist() for split in split_batch(ids, 2)] == [[0, 1], [2, 3]]
    assert split_batch(ids, 2)[1].data["names"] == ["c", "d"]


def test_batches_without_tensors() -> None:
    assert [part.data for part in split_batch(["a", "b", "c"], 2)] == [["a", "b"], ["c"]]
    assert batch_size_of({"text": ["a", "b"], "id": [1, 2]}) == 2
    assert split_batch(None, 4)[0].data is None
    assert split_batch(5, 4)[0].num_samples == 1
    assert batch_size_of(torch.tensor(1.0)) is None


def test_two_views_of_a_batch_are_no_samples() -> None:
    views = [{"x": x(), "y": torch.arange(6)}, {"x": x(), "y": torch.arange(6)}]
    assert batch_size_of(views) == 6
    assert shapes(split_batch(views, 2)[0].data) == [(3, 2), (3,)] * 2
    assert batch_size_of((views, torch.arange(6))) == 6


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Known(Opaque):
    pass


_pytree.register_pytree_node(Known, lambda known: ([known.x], None), lambda children, _: Known(*children))


def test_unknown_types_are_refused_and_registered_ones_cut() -> None:
    with pytest.raises(
        BatchError,
        match=r"of type Opaque keeps its tensors in attributes \(batch.x has 6 rows\), .* 2 microbatches.*register the",
    ):
        split_batch(Opaque(x()), 2)
    assert split_batch(Opaque(x()), 1)[0].num_samples == 6
    two_lengths = Opaque(x())
    two_lengths.edges = x()[:4]
    assert split_batch(two_lengths, 1)[0].num_samples == 1
    with pytest.raises(
        BatchError,
        match=r"attribute 'x' of the Opaque in the batch has 6 rows, one per sample.*split_batch=",
    ):
        split_batch({"object": Opaque(x()), "y": torch.arange(6)}, 2)
    weights = Opaque(torch.ones(3))
    assert split_batch((x(), weights), 2)[1].data[1] is weights
    assert [part.data.x.shape[0] for part in split_batch(Known(x()), 2)] == [3, 3]


def test_what_cannot_be_cut_is_refused() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    for batch in (packed, [packed], {"deep": (x(), packed)}):
        with pytest.raises(BatchError, match="PackedSequence cannot be cut into 2"):
            split_batch(batch, 2)
        assert split_batch(batch, 1)[0].data is batch
    with pytest.raises(BatchError, match=r"layout torch.sparse_coo cannot be cut into 3"):
        split_batch({"x": x().to_sparse(), "y": x()}, 3)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(BatchError, match=r"\(nested\) cannot be cut into 2"):
        split_batch(nested, 2)


def test_bad_numbers() -> None:
    with pytest.raises(BatchError, match="0 samples"):
        split_batch(torch.ones(0, 3), 2)
    with pytest.raises(ConfigurationError, match="num_microbatches=0"):
        split_batch(x(), 0)


def test_copies_share_no_memory() -> None:
    batch = {"x": x(), "names": NAMES, "pair": Pair(x(), 3)}
    copied = own_copy(batch)
    copied["x"].zero_()
    copied["pair"].x.zero_()
    assert torch.equal(batch["x"], x()) and torch.equal(batch["pair"].x, x())
    assert copied["names"] == NAMES


def test_named_dimensions_say_where_samples_lie() -> None:
    axes = torch.arange(24).view(3, 4, 2)
    batch = (axes, {"x": x(4), "deep": [axes + 24]})
    dims = {"[0]": 1, "batch[1]['deep'][0]": -2}
    assert batch_size_of(batch) == 3 and batch_size_of(batch, dims) == 4
    parts = split_batch(batch, 3, dims)
    assert [part.num_samples for part in parts] == [2, 1, 1]
    assert torch.equal(torch.cat([part.data[0] for part in parts], 1), axes)
    assert torch.equal(torch.cat([part.data[1]["deep"][0] for part in parts], 1), axes + 24)
    assert torch.equal(torch.cat([part.data[1]["x"] for part in parts]), x(4))
    assert all(tensor.is_contiguous() for part in parts for tensor in tensors_of(part.data))
    assert torch.equal(first_samples(batch, 2, dims).data[0], axes[:, :2])
    assert shapes([part.data for part in split_batch(axes, 2, {"batch": 2})]) == [(3, 4, 1)] * 2
    square = torch.arange(9).view(3, 3)  # the option decides
    assert split_batch({"x": square}, 3, {"x": 1})[0].data["x"].tolist() == [[0], [3], [6]]


def test_named_dimensions_that_do_not_fit_are_refused() -> None:
    class Held:
        def __init__(self) -> None:
            self.x = torch.ones(3, 4)

    targets = [{"boxes": torch.ones(number, 4)} for number in (2, 1, 3)]
    for batch, path in (({"x": x(4), "held": Held()}, "held.x"), ({"x": x(3), "targets": targets}, "targets[0].boxes")):
        with pytest.raises(
            BatchError, match=rf"names '{re.escape(path)}', but no tensors .* Name one of: 'x' \(\d, 2\)"
        ):
            split_batch(batch, 2, {path: 0})
    same = {"a.b": x(4), "a": {"b": x(4)}}
    with pytest.raises(BatchError, match=r"names 'a\.b', but 2 tensors of the batch that can be cut have this path"):
        split_batch(same, 2, {"a.b": 0})
    assert len(split_batch(same, 2, {"batch['a']['b']": 0})) == 2
    with pytest.raises(BatchError, match=r"dimension 0 of 'y', whose shape is \(5, 2\)\. This .* size 5, but .* 4 sam"):
        split_batch({"y": x(5), "x": x(4)}, 1, {"y": 0})
