"""What becomes of functions of torch whose arguments are cut, a rule for each, by the function's name."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_pp.tensor.region import Rule
from lightning_pp.tensor.rules import attention, elementwise, products, reductions, shapes

RULES: Mapping[str, Rule] = {
    **elementwise.RULES,
    **shapes.RULES,
    **reductions.RULES,
    **products.RULES,
    **attention.RULES,
}
