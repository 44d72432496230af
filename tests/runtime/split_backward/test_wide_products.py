"""Weight gradients of 16-bit matrices in 32 bits, where a device multiplies so: here one that a CPU stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pp.runtime.split_backward.queue import add_product
from lightning_pp.runtime.split_backward.wide_products import multiplies_into

CPU = torch.device("cpu")
NARROW = (torch.bfloat16, torch.float16)


def _product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    return left.to(out_dtype) @ right.to(out_dtype)


def _added(target: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor, **_: float) -> Tensor:
    return out.copy_(target + _product(left, right, out_dtype))


def _added_to_batches(*args: Any, **kwargs: Any) -> Tensor:
    return _added(*args, **kwargs)


@pytest.fixture
def wide_device() -> Iterator[None]:
    """Gives the CPU torch's products with ``out_dtype``, as CUDA devices have them, for one test."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "mm.dtype": _product,
        "bmm.dtype": _product,
        "addmm.dtype_out": _added,
        "baddbmm.dtype_out": _added_to_batches,
    }.items():
        library.impl(name, function, "CPU")
    multiplies_into.cache_clear()
    yield
    library._destroy()
    multiplies_into.cache_clear()


def gradients(narrow: torch.dtype, shape: tuple[int, ...], num_microbatches: int = 3) -> tuple[Tensor, Tensor]:
    """The gradient as it is accumulated, and as it is in float64: of a weight [5, 6] or a batch of two of them."""
    generator = torch.Generator().manual_seed(1)
    num_weights = (2,) if len(shape) == 2 else ()
    weight = nn.Parameter(torch.zeros(*num_weights, 5, 6))
    exact = torch.zeros(weight.shape, dtype=torch.float64)
    for _ in range(num_microbatches):
        left = torch.randn(*shape, 5, generator=generator).to(narrow)
        right = torch.randn(*shape, 6, generator=generator).to(narrow)
        add_product(weight, left, right)
        rows = (left, right) if num_weights else (left.flatten(0, -2), right.flatten(0, -2))
        exact += rows[0].double().mT @ rows[1].double()
    assert weight.grad is not None and weight.grad.dtype is torch.float32
    return weight.grad, exact


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("shape", [(64,), (4, 16, 4), (2, 64)], ids=["rows", "positions", "batch of weights"])
def test_products_are_added_without_being_rounded(
    wide_device: None, narrow: torch.dtype, shape: tuple[int, ...]
) -> None:
    """As exact as float32 is; rounded once per microbatch, they are off by the spacing of 16-bit numbers."""
    assert multiplies_into(torch.float32, narrow, CPU)
    gradient, exact = gradients(narrow, shape)
    assert (gradient - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("narrow", NARROW)
def test_where_the_device_cannot(narrow: torch.dtype) -> None:
    multiplies_into.cache_clear()
    assert not multiplies_into(torch.float32, narrow, CPU)
    gradient, exact = gradients(narrow, (64,))
    spacing = torch.finfo(narrow).eps
    assert 1e-5 < (gradient - exact).abs().max() / exact.abs().max() < 3 * spacing


def test_a_device_that_rounds_all_the_same(wide_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial looks at the numbers, and not only at whether the call is there."""
    monkeypatch.setattr(_added, "__code__", _rounded.__code__)
    multiplies_into.cache_clear()
    assert not multiplies_into(torch.float32, torch.bfloat16, CPU)


def test_a_device_may_have_products_of_matrices_and_none_of_batches(
    wide_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_added_to_batches, "__code__", _refused.__code__)
    multiplies_into.cache_clear()
    assert multiplies_into(torch.float32, torch.bfloat16, CPU, 2)
    assert not multiplies_into(torch.float32, torch.bfloat16, CPU, 3)
    gradient, exact = gradients(torch.bfloat16, (64,))
    assert (gradient - exact).abs().max() < 1e-5 * exact.abs().max()
    gradient, exact = gradients(torch.bfloat16, (2, 64))  # rounded, and right
    assert (gradient - exact).abs().max() < 0.03 * exact.abs().max()


def _refused(*_: Any, **__: Any) -> Tensor:
    raise NotImplementedError


def _rounded(target: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor, **_: float) -> Tensor:
    return out.copy_(target + (left @ right).to(out_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("narrow", NARROW)
def test_on_a_device(narrow: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert multiplies_into(torch.float32, narrow, device)
    weight = nn.Parameter(torch.zeros(128, 64, device=device))
    left, right = torch.randn(2, 512, 128, device=device).to(narrow), torch.randn(2, 512, 64, device=device).to(narrow)
    for one, other in zip(left, right, strict=True):
        add_product(weight, one, other)
    exact = sum(one.double().mT @ other.double() for one, other in zip(left, right, strict=True))
    assert weight.grad is not None
    assert (weight.grad - exact).abs().max() < 1e-4 * exact.abs().max()
