"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

_GIB, _MIB, _KIB = float(1 << 30), float(1 << 20), float(1 << 10)


def count(number: float) -> str:
    """``6.74 G``: three digits and a prefix."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{three_digits(number / size)} {prefix}"
    return f"{number:.0f} "


def flops(number: float) -> str:
    """``829 GFLOP``."""
    return f"{count(number)}FLOP"


def parameters(number: int) -> str:
    """``6.74 G parameters``."""
    return f"{count(number).rstrip()} parameters"


def size(num_bytes: float) -> str:
    """``16.0 MiB``."""
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if num_bytes >= unit:
            return f"{three_digits(num_bytes / unit)} {name}"
    return f"{num_bytes:.0f} B"


def gib(num_bytes: float) -> str:
    """GiB, with three digits, without the unit."""
    number = num_bytes / _GIB
    return f"{number:.2f}" if number >= 0.1 else f"{number:.2g}" if number else "0"


def milliseconds(number: float) -> str:
    """With four digits."""
    return f"{number:.0f}" if number >= 1000 else f"{number:.4g}"


def by_rank(texts: Sequence[str]) -> str:
    """One text for each rank; the first and last ones where there are many."""
    if len(set(texts)) == 1 and len(texts) > 1:
        return f"{texts[0]} each"
    return " ".join(texts) if len(texts) <= 8 else f"{' '.join(texts[:4])} ... {' '.join(texts[-4:])}"


def three_digits(number: float) -> str:
    """``12.3``."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
