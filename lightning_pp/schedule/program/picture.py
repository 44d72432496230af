"""A part of a schedule as text, around one cell."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_SHOWN = 40
_NUM_ROWS, _NUM_COLUMNS = 2, 5
"""Shown above and below, left and right."""


def picture(rows: Sequence[Sequence[str]], rank: int, column: int) -> str:
    """Draw the cells around ``rows[rank][column]``, which is set in brackets.

    Args:
        rows: For each rank, its cells; rows may have different lengths.
        rank: Row of the cell.
        column: Column of the cell; one past the end of the row draws an empty cell in brackets there.
    """
    first_rank, last_rank = max(0, rank - _NUM_ROWS), min(len(rows), rank + _NUM_ROWS + 1)
    first, last = max(0, column - _NUM_COLUMNS), column + _NUM_COLUMNS + 1
    last = min(last, max([column + 1, *(len(row) for row in rows[first_rank:last_rank])]))
    table = [["", *(f"cell {index}" if index == column else str(index) for index in range(first, last))]]
    for shown_rank in range(first_rank, last_rank):
        row = rows[shown_rank]
        cells = [_shortened(row[index]) if index < len(row) else "" for index in range(first, last)]
        if shown_rank == rank:
            cells[column - first] = f"[{cells[column - first]}]"
        before = "... " if first else ""
        after = " ..." if len(row) > last else ""
        table.append([f"rank {shown_rank}: {before}", *cells, after])
    widths = [max(len(row[index]) for row in table if index < len(row)) for index in range(last - first + 1)]
    lines = []
    for line in table:
        cells = [f"{cell:<{width}}" for cell, width in zip(line, widths, strict=False)]
        lines.append((" ".join(cells) + "".join(line[len(widths) :])).rstrip())
    return "\n".join(f"  {line}" for line in lines)


def _shortened(cell: str) -> str:
    return cell if len(cell) <= _MOST_SHOWN else f"{cell[:_MOST_SHOWN]}..."
