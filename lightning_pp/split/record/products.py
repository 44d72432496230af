"""The products with a weight whose gradient can be deferred: one table, a row for each function of torch.

Everything that has to know such a function reads it here: deferral in eager code and in captured graphs, what a dry run
counts as kept for W, and the code between units. How a family computes its gradients stands in
:mod:`lightning_pp.runtime.split_backward.functions`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pp.split._torch_private import GROUPED_PRODUCT


class Family(Enum):
    """Functions whose gradients are computed in one way."""

    LINEAR = "linear"
    MATMUL = "matmul"
    GROUPED = "grouped matmul"
    ADDMM = "addmm"
    CONVOLUTION = "convolution"
    TRANSPOSED_CONVOLUTION = "transposed convolution"


class Product(NamedTuple):
    """A function of torch that multiplies by a weight.

    Attributes:
        family: How its gradients are computed.
        name: Its name.
        owners: Where code finds it under that name.
        num_dims: Dimensions of input and weight; None if they may differ.
        input: Position of the input among its arguments.
        weight: Position of the weight.
    """

    family: Family
    name: str
    owners: tuple[Any, ...]
    num_dims: int | None = None
    input: int = 0
    weight: int = 1

    @property
    def num_spatial(self) -> int:
        """Spatial dimensions of a convolution."""
        assert self.num_dims is not None
        return self.num_dims - 2


_BOTH = (torch, Tensor)
PRODUCTS: tuple[Product, ...] = (
    Product(Family.LINEAR, "linear", (F,)),
    Product(Family.MATMUL, "matmul", _BOTH),
    Product(Family.MATMUL, "__matmul__", (Tensor,)),
    Product(Family.MATMUL, "mm", _BOTH, num_dims=2),
    Product(Family.MATMUL, "bmm", _BOTH, num_dims=3),
    Product(Family.GROUPED, GROUPED_PRODUCT, (torch,) if hasattr(torch, GROUPED_PRODUCT) else ()),
    Product(Family.ADDMM, "addmm", _BOTH, num_dims=2, input=1, weight=2),
    *(Product(Family.CONVOLUTION, f"conv{n}d", (torch, F), num_dims=n + 2) for n in (1, 2, 3)),
    *(Product(Family.TRANSPOSED_CONVOLUTION, f"conv_transpose{n}d", (torch, F), num_dims=n + 2) for n in (1, 2, 3)),
)
NAMES = frozenset({*(product.name for product in PRODUCTS), "__rmatmul__"})
"""By these names ``__torch_function__`` sees them."""

_aten = torch.ops.aten
ATEN_OPERANDS: Mapping[Any, tuple[int, int]] = {
    _aten.mm: (0, 1),
    _aten.bmm: (0, 1),
    _aten._grouped_mm: (0, 1),
    _aten.addmm: (1, 2),
    _aten.convolution: (0, 1),
}
"""The operations that they are made of: positions of input and weight."""


def _targets() -> dict[Any, Product]:
    found: dict[Any, Product] = {}
    for product in (product for product in PRODUCTS if product.family is not Family.GROUPED):  # deferred in eager code
        for owner in product.owners:
            found[product.name if owner is Tensor else getattr(owner, product.name)] = product
    return {**found, operator.matmul: found["__matmul__"]}


TARGETS: Mapping[Any, Product] = _targets()
"""By their target in a captured graph: a function, or the name of a method."""
