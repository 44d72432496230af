"""The arguments of a unit, to compare a call with a recorded one."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.split.data.tree import leaves_of
from lightning_pp.split.fakes.parameters import has_data


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...] | None, ...]:
    """The shapes of all arguments; None for what is no tensor."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves_of((args, kwargs)))


def numbers_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, ...]:
    """The integers and texts in the arguments."""
    return tuple(leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, (int, str)))


def fingerprint_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A number for what is given besides floats and what depends on weights, equal where all of it is."""
    total = 0
    for place, leaf in enumerate(leaves_of((args, kwargs))):
        if isinstance(leaf, Tensor):
            is_plain = leaf.layout is torch.strided and not leaf.is_nested
            if is_plain and has_data(leaf) and not isinstance(leaf, nn.Parameter):
                content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                total = zlib.crc32(content.numpy().tobytes(), zlib.crc32(str(place).encode(), total))
        elif isinstance(leaf, (int, str)):
            total = zlib.crc32(f"{place}: {leaf!r}".encode(), total)
    return total
