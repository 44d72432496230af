"""A step's timeline as a PNG, written without a library for images."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

from lightning_pp.telemetry.timeline.bitmap_font import GLYPH_HEIGHT, GLYPH_WIDTH, glyph
from lightning_pp.telemetry.timeline.drawing import BUBBLE_COLOR, COLORS, LINE_COLOR, ODD_OPACITY, Label, draw
from lightning_pp.telemetry.timeline.step import Timeline

_Pixels = npt.NDArray[np.uint8]
_BLACK, _WHITE = "#000000", "#ffffff"


def png_timeline(timeline: Timeline, *, scale: int = 2) -> bytes:
    """The picture of :func:`~lightning_pp.telemetry.timeline.svg.svg_timeline` in pixels.

    Args:
        timeline: The step.
        scale: Pixels for each of the SVG's; at least 1.
    """
    drawing = draw(timeline)
    pixels: _Pixels = np.full((drawing.height * scale, drawing.width * scale, 3), 255, dtype=np.uint8)

    def fill(left: float, top: float, width: float, height: float, color: str, opacity: float = 1.0) -> None:
        first, last = round(left * scale), max(round((left + width) * scale), round(left * scale) + 1)
        area = pixels[round(top * scale) : round((top + height) * scale), first:last]
        area[:] = np.round(area * (1 - opacity) + opacity * _rgb(color))

    for span in drawing.spans:
        fill(*span, BUBBLE_COLOR)
    for left, top, height in drawing.ticks:
        fill(left, top, 1, height, LINE_COLOR)
    for box in drawing.legend:
        fill(box.left, box.top, box.width, box.height, COLORS[box.kind])
    for box in drawing.boxes:
        # what is drawn first would shine through what is above it
        fill(box.left, box.top, box.width, box.height, _WHITE)
        fill(box.left, box.top, box.width, box.height, COLORS[box.kind], ODD_OPACITY if box.is_odd else 1.0)
    for label in drawing.labels:
        _write(pixels, label, scale)
    return _encode(pixels)


def _write(pixels: _Pixels, label: Label, scale: int) -> None:
    advance = (GLYPH_WIDTH + 1) * scale
    width = advance * len(label.text) - scale
    left = round(label.left * scale) - {"start": 0, "middle": width // 2, "end": width}[label.anchor]
    top = round(label.baseline * scale) - (GLYPH_HEIGHT - 1) * scale
    left = min(max(left, 0), pixels.shape[1] - width)
    color = _rgb(_WHITE if label.is_light else _BLACK)
    for place, letter in enumerate(label.text):
        dots = np.kron(glyph(letter), np.ones((scale, scale), dtype=bool)).astype(bool)
        corner = left + place * advance
        area = pixels[top : top + dots.shape[0], corner : corner + dots.shape[1]]
        area[dots[: area.shape[0], : area.shape[1]]] = color


def _rgb(color: str) -> npt.NDArray[np.float64]:
    return np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)], dtype=np.float64)


def _encode(pixels: _Pixels) -> bytes:
    """PNG, 8 bits a channel, no filter (ISO/IEC 15948)."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each line begins with its filter, 0
    lines[:, 1:] = pixels.reshape(height, 3 * width)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    image = zlib.compress(lines.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", image) + chunk(b"IEND", b"")
