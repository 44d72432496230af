"""A call of a function that affects how a step's values grow with the batch: its kind, and its place."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Kind(enum.Enum):
    """The effect of a function on the degree of its arguments."""

    SUM = enum.auto()
    """Adds up: over rows, one degree more."""
    CONTRACTION = enum.auto()
    """Adds up products: degrees are added, over rows one more."""
    MEAN = enum.auto()
    """Takes a mean of elements."""
    LOSS = enum.auto()
    """Has a ``reduction``."""
    EXTREME = enum.auto()
    """The least or greatest."""
    PRODUCT = enum.auto()
    QUOTIENT = enum.auto()
    ADDITION = enum.auto()
    """Operands must have one degree."""
    NUMBER = enum.auto()
    """Makes a tensor of a number."""
    LINEAR = enum.auto()
    """Keeps the degree."""
    READING = enum.auto()
    """Returns no tensor, or does not read values."""


class Site(NamedTuple):
    """A call in the user's code.

    Attributes:
        code: The function that contains it.
        position: Where in its source: lines and columns, or the line alone on Python 3.10.
        function: The name of what is called.
    """

    code: CodeType
    position: tuple[int | None, ...]
    function: str

    def __hash__(self) -> int:
        return hash((id(self.code), self.position, self.function))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Site) and (
            self.code is other.code and self.position == other.position and self.function == other.function
        )

    def __ne__(self, other: object) -> bool:
        return not self == other


class Place(NamedTuple):
    """One of the times that a step reaches a site: the first, second, ..., perhaps after what Python has read."""

    site: Site
    occurrence: tuple[Hashable, ...]

    @property
    def follows_read(self) -> bool:
        """Whether Python has read a number before."""
        return len(self.occurrence) > 1


@dataclass(frozen=True)
class Reduction:
    """One call of such a function.

    Attributes:
        place: Where.
        kind: What it does.
        line: The user's line.
        is_mean: Whether it is a mean: one of elements, or a loss that takes it.
        is_countable: Whether it is known what the mean divides by.
        is_counted: Whether what it divides by depends on values of its target.
        depends_on_weights: Whether its result does, and not on the batch alone.
        given: Shapes of its argument tensors.
        of_samples: Which of them were made of samples by weights: outputs of units, or what was made of these.
        of_selected: Whether one of them has, or is made of, rows that values select (``h[mask]``).
        of_counted: Whether it may be rows up to a number that Python has of the batch (``h[: int(mask.sum())]``).
        of_first: Of rows up to a number that is larger than that of the rows (``h[:4]`` of 2): both; None for none.
        result: Shape of its result; None where that is no tensor.
        numbers: Python numbers among its arguments.
        value: Its result, where that depends on the batch alone.
    """

    place: Place
    kind: Kind
    line: str
    is_mean: bool
    is_countable: bool
    is_counted: bool
    depends_on_weights: bool
    given: tuple[Shape, ...]
    of_samples: tuple[bool, ...]
    of_selected: bool
    of_counted: bool
    of_first: tuple[int, int] | None
    result: Shape | None
    numbers: tuple[float, ...]
    value: Tensor | None

    @property
    def is_integer(self) -> bool:
        """Whether it returns integers of the batch, which code may use as places and sizes."""
        value = self.value
        return value is not None and not value.is_floating_point() and value.dtype != torch.bool
