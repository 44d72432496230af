"""What the set-up warns of the cuts that it has chosen."""

from __future__ import annotations

import warnings

import pytest

from lightning_pp.split.cut.wide_cuts import WideCut
from lightning_pp.strategy.setup import _warn_wide_cuts

SMALL = WideCut("blocks.1", "blocks.0", (1 << 20) - 1, 1024, 3, ("model.py:7",))
LARGE = WideCut("blocks.2", "blocks.1", 8 << 20, 2 << 20, 4, ("model.py:9",))


def test_what_crosses_in_no_time_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_wide_cuts([])
        _warn_wide_cuts([SMALL])


def test_the_widest_cut_is_told_and_how_many_others_there_are() -> None:
    with pytest.warns(UserWarning, match=r"'blocks.1' and 'blocks.2' sends 4 tensors .* 8,192 KiB in all") as told:
        _warn_wide_cuts([LARGE])
    assert "Further cuts" not in str(told[0].message)
    with pytest.warns(UserWarning, match=r"'blocks.1' and 'blocks.2' .* Further cuts that send much: 1\."):
        _warn_wide_cuts([SMALL, LARGE])
