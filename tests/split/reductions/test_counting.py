"""What batches count is copied and compared together, whatever its dtypes and shapes are."""

from __future__ import annotations

import torch
from host_waits import HostWaits

from lightning_pp.split.reductions.counting import are_equal, on_host

COUNTS = {
    "flag": (torch.tensor(True), 3.0),
    "unknown": None,
    "each class": (torch.arange(5), torch.tensor(2.5, dtype=torch.float64)),
    "numbers": (7, 8.0),
    "turned": (torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,),
    "empty": (torch.zeros(0, 2),),
    "not a number": (torch.tensor(float("nan")),),
}


def test_copies_are_what_they_were_and_made_at_once() -> None:
    with HostWaits() as waits:
        copies = on_host(COUNTS)
    assert len(waits.found) == 1
    assert list(copies) == list(COUNTS)
    for place, count in COUNTS.items():
        copy = copies[place]
        assert (copy is None) == (count is None)
        for mine, its in zip(count or (), copy or (), strict=True):
            assert type(mine) is type(its)
            torch.testing.assert_close(its, mine, rtol=0, atol=0, equal_nan=True)


def test_numbers_alone_are_not_waited_for() -> None:
    with HostWaits() as waits:
        assert on_host({"rows": (3.0,)}) == {"rows": (3.0,)}
        assert are_equal({"rows": (3.0,)}, {"rows": (3.0,)})
    assert not waits.found


def test_any_difference_is_seen_with_one_look() -> None:
    assert are_equal({}, {})
    with HostWaits() as waits:
        assert are_equal(COUNTS, on_host(COUNTS))
    assert len(waits.found) == 2  # one of them for the copy
    for place, other in [
        ("flag", (torch.tensor(False), 3.0)),
        ("flag", (torch.tensor(True), 4.0)),
        ("unknown", (1.0,)),
        ("each class", None),
        ("each class", (torch.arange(5).flip(0), torch.tensor(2.5, dtype=torch.float64))),
        ("each class", (torch.arange(5), torch.tensor(2.5))),
        ("numbers", (7, torch.tensor(8.0))),
        ("empty", (torch.zeros(2, 0),)),
    ]:
        assert not are_equal(COUNTS, {**COUNTS, place: other})
        assert not are_equal({**COUNTS, place: other}, COUNTS)
    assert not are_equal(COUNTS, {"flag": COUNTS["flag"]})
