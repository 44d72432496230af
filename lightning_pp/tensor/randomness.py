"""Random draws for parts: others on each tensor rank, while the generators of all ranks stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lightning_pp.tensor.cuts import CutError
from lightning_pp.tensor.functions import RecordedGroup

if TYPE_CHECKING:
    from lightning_pp.tensor.region import Region

_STEP = 0x9E3779B97F4A7C15  # seeds of neighbouring ranks lie far apart


@contextmanager
def drawn_by_rank(region: Region, device: torch.device) -> Iterator[None]:
    """In the block, the generator of ``device`` is seeded from a draw that all ranks make alike, and the rank.

    Afterwards it goes on from that draw. So a recomputation that restores the generator draws the same again, and code
    after the region draws the same on every rank.
    """
    if isinstance(region.group, RecordedGroup):
        raise CutError("draws random numbers for a part, which compiled code cannot", frozenset())
    if device.type == "meta" or not region.draws:
        yield
        return
    drawn = int(torch.empty((), dtype=torch.int64).random_().item())  # on the CPU: nothing waits for the device
    seed = (drawn + region.rank * _STEP) % 2**63
    of_device = () if device.type == "cpu" else torch.get_device_module(device).default_generators
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        (of_device[device.index] if of_device else torch.default_generator).manual_seed(seed)
        yield
