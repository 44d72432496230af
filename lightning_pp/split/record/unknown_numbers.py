"""Numbers and texts that units compute from values; other stages cannot know them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NoReturn

from lightning_pp.errors import SplitError
from lightning_pp.split.record.source_lines import user_line

PLAIN = (bool, int, float, str, type(None))


class UnknownNumber:
    """Stands for such a number on a stage that does not run the unit; any use of it is an error.

    Args:
        unit: The unit that makes it.
        found: What it made on two sets of made-up data.

    Attributes:
        made_up: One of these.
    """

    def __init__(self, unit: str, found: tuple[Any, Any]) -> None:
        self.unit = unit
        self.found = found

    @property
    def made_up(self) -> Any:
        return self.found[1]

    def __repr__(self) -> str:
        return f"<a value that {self.unit!r} computes on another stage>"

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises the error.

        Raises:
            SplitError: Always.
        """
        first, second = self.found
        raise SplitError(
            f"{user_line()} uses a value that is not a tensor. The unit {self.unit!r} computes it on another stage "
            f"({first!r} and {second!r} on two sets of made-up data). Only tensors are sent. Return a tensor from the "
            "unit (`x.sum()`, not `x.sum().item()`), or use units= to name a larger module that contains this code."
        )


_USES = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor lshift rlshift rshift rrshift neg pos abs invert round trunc floor ceil "
    "bool int float complex index str format len iter contains getitem call lt le gt ge eq ne array"
)
for _use in _USES.split():
    setattr(UnknownNumber, f"__{_use}__", UnknownNumber.refuse)


def differing(first: Sequence[Any], second: Sequence[Any]) -> dict[int, tuple[Any, Any]]:
    """The positions at which two runs of a unit have left other plain things, with both; tensors are passed over."""
    return {
        position: (one, other)
        for position, (one, other) in enumerate(zip_longest(first, second))
        if isinstance(one, PLAIN) and isinstance(other, PLAIN) and one != other
    }
