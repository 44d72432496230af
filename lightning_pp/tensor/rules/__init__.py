"""Rules for functions of torch with cut arguments, one for each function, by its name."""

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
