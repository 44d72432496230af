"""Draws the rooms of the package from its folders and its import contracts: ``python docs/tools/draw_rooms.py``.

Writes ``docs/inside/rooms.svg`` and the table of rooms in ``docs/inside/architecture.md``. A row is a layer, from
the top down; a box is a room with its number of files. A room's sentence in the table is the first line of its
``__init__.py``.
"""

from __future__ import annotations

import ast
import re
import sys
from html import escape
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_pp"
PICTURE = ROOT / "docs" / "inside" / "rooms.svg"
DOCUMENT = ROOT / "docs" / "inside" / "architecture.md"
TABLE = re.compile(r"(?<=<!-- rooms -->\n).*?(?=<!-- end of rooms -->)", re.DOTALL)
WIDTH, MARGIN, LABEL = 1120, 12, 150
BOX_HEIGHT, GAP = 40, 8
COLOURS = ("#dfe7f3", "#e4f0e2", "#f6ecd6", "#f3e1e1", "#e8e2f2", "#dff0f0")


def layers() -> list[list[str]]:
    """The layers from top to bottom, each the folders that stand side by side in it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (order,) = [contract["layers"] for contract in contracts if contract["name"] == "Imports point down only"]
    return [[name.strip().removeprefix("lightning_pp.") for name in row.split("|")] for row in order]


def rooms(layer: str) -> list[tuple[str, int]]:
    """The rooms of a layer and how many files each has: the folder itself first, then the folders in it."""
    folder = PACKAGE / layer
    if not folder.is_dir():
        return [(layer, 1)]
    inner = sorted(path for path in folder.iterdir() if (path / "__init__.py").exists())
    return [(layer, _num_files(folder)), *((path.name, _num_files(path)) for path in inner)]


def picture() -> str:
    """The picture as SVG."""
    shapes, y = [], MARGIN
    for row, names in enumerate(layers()):
        colour = COLOURS[row % len(COLOURS)]
        for name in names:
            boxes = rooms(name)
            per_line = 7
            lines = [boxes[i : i + per_line] for i in range(0, len(boxes), per_line)]
            height = len(lines) * (BOX_HEIGHT + GAP) + GAP
            shapes.append(_box(MARGIN, y, WIDTH - 2 * MARGIN, height, colour))
            shapes.append(_text(MARGIN + 10, y + height / 2 + 5, name, 15, "bold"))
            for line, content in enumerate(lines):
                width = (WIDTH - 2 * MARGIN - LABEL) / per_line
                for column, (room, number) in enumerate(content):
                    x, top = MARGIN + LABEL + column * width, y + GAP + line * (BOX_HEIGHT + GAP)
                    shapes.append(_box(x, top, width - GAP, BOX_HEIGHT, "#ffffff"))
                    shapes.append(_text(x + 8, top + 17, "(here)" if room == name else room, 12))
                    shapes.append(_text(x + 8, top + 32, f"{number} file{'s' if number > 1 else ''}", 10))
            y += height + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + MARGIN}" font-family="sans-serif">'
    return "\n".join([head, *shapes, "</svg>"]) + "\n"


def table() -> str:
    """The rooms and what each is for, as Markdown."""
    lines = ["| room | what it is for |", "|---|---|"]
    for layer in [name for row in layers() for name in row]:
        for room, _ in rooms(layer):
            path = layer if room == layer else f"{layer}/{room}"
            lines.append(f"| `{path}` | {_sentence(PACKAGE / path)} |")
    return "\n".join(lines) + "\n"


def document() -> str:
    """``docs/inside/architecture.md`` with the table of today."""
    return TABLE.sub(lambda _: table(), DOCUMENT.read_text())


def _sentence(path: Path) -> str:
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(source.read_text())) or ""
    return doc.partition("\n")[0].replace("``", "`")


def _num_files(folder: Path) -> int:
    return sum(path.name != "__init__.py" for path in folder.glob("*.py"))


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<rect {place} rx="6" fill="{colour}" stroke="#777"/>'


def _text(x: float, y: float, text: str, size: int, weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture())
    DOCUMENT.write_text(document())
