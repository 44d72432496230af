"""How far a whole batch and its microbatches may be apart: by the dtypes, and by what the device computes with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pp.strategy.batch.differences import _first_other, tolerance_of

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
cudnn: Any = torch.backends.cudnn


@pytest.fixture(autouse=True)
def own_precisions() -> Iterator[None]:
    places = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "ieee"
    yield
    for place, precision in zip(places, before, strict=True):
        place.fp32_precision = precision


MODELS = {"products": nn.Linear(2, 2), "convolutions": nn.Conv2d(1, 1, 3), "recurrent": nn.GRU(2, 2)}


@pytest.mark.parametrize("kind", MODELS)
def test_tf32_widens_it_for_what_is_computed_with_it(kind: str) -> None:
    places = {"products": torch.backends.cuda.matmul, "convolutions": cudnn.conv, "recurrent": cudnn.rnn}
    for place in places.values():
        place.fp32_precision = "tf32"
    # ten bits of mantissa: each factor is off by up to 2 ** -11, about 5e-4
    assert tolerance_of(MODELS[kind], None, CUDA) == 5e-3
    assert tolerance_of(MODELS[kind], None, CPU) == 1e-4
    places[kind].fp32_precision = "ieee"
    others = 5e-3 if kind != "products" else 1e-4  # every model has products
    assert tolerance_of(MODELS[kind], None, CUDA) == others


def test_it_is_that_of_the_coarsest_dtype() -> None:
    both = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    assert tolerance_of(both, None, CUDA) == 1e-4
    assert tolerance_of(both[1], None, CUDA) == 1e-7
    assert tolerance_of(both, torch.bfloat16, CUDA) == 3e-2
    assert tolerance_of(nn.Module(), None, CPU) == 1e-4


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1.6), (torch.float32, 1.02)])
def test_an_output_that_differs_by_half_of_the_largest_is_found_in_any_dtype(dtype: torch.dtype, factor: float) -> None:
    tolerance, rows = tolerance_of(nn.Module(), dtype, CPU), torch.tensor([1.0, -4.0, 2.0], dtype=dtype)
    assert _first_other(rows, rows * 1.001, tolerance) is None
    assert _first_other(rows, rows * factor, tolerance) == pytest.approx((-4.0, -4.0 * factor), rel=0.01)
