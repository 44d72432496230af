"""A step's timeline as pixels, for loggers that take images."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_pp.telemetry.timeline.drawing import (
    BUBBLE_COLOR,
    COLORS,
    LINE_COLOR,
    ODD_OPACITY,
    Box,
    Drawing,
    Label,
    draw,
)
from lightning_pp.telemetry.timeline.step import Timeline

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_SCALE = 2
_FONT_SIZE = 12
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
_INK, _PAPER = (0, 0, 0), (255, 255, 255)


@dataclass(frozen=True)
class PngPicture:
    """A picture as a PNG file of so many pixels, which has a palette."""

    data: bytes
    width: int
    height: int


def raster_timeline(timeline: Timeline) -> npt.NDArray[np.uint8]:
    """The picture of :func:`~lightning_pp.telemetry.timeline.svg.svg_timeline` in pixels, twice its size.

    Returns:
        Height, width and red, green, blue; uint8.

    Raises:
        ImportError: Pillow is not installed, which comes with TensorBoard.
    """
    import numpy as np

    return np.asarray(_picture(timeline).convert("RGB"), dtype=np.uint8)


def png_timeline(timeline: Timeline) -> PngPicture:
    """The same picture as a file: a fifth of the time that packing the pixels takes.

    Raises:
        ImportError: Pillow is not installed, which comes with TensorBoard.
    """
    picture, file = _picture(timeline), io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return PngPicture(file.getvalue(), *picture.size)


def _picture(timeline: Timeline) -> Any:
    """The picture, a byte a pixel: there are few colours."""
    from PIL import Image, ImageDraw, ImageFont

    drawing = draw(timeline)
    picture = Image.new("P", (drawing.width * _SCALE, drawing.height * _SCALE), _PAPER)
    _paint(ImageDraw.Draw(picture), drawing, ImageFont.load_default(_FONT_SIZE * _SCALE))
    return picture


def _paint(canvas: Any, drawing: Drawing, font: Any) -> None:
    for left, top, width, height in drawing.spans:
        canvas.rectangle(_pixels(left, top, width, height), fill=_rgb(BUBBLE_COLOR))
    for left, top, height in drawing.ticks:
        canvas.line((left * _SCALE, top * _SCALE, left * _SCALE, (top + height) * _SCALE), fill=_rgb(LINE_COLOR))
    for box in (*drawing.legend, *drawing.boxes):
        canvas.rectangle(_pixels(box.left, box.top, box.width, box.height), fill=_color(box))
    for label in drawing.labels:
        _write(canvas, label, font)


def _pixels(left: float, top: float, width: float, height: float) -> tuple[int, int, int, int]:
    """Corners, both within the box; at least one pixel."""
    corners = (round(left * _SCALE), round(top * _SCALE))
    opposite = (round((left + width) * _SCALE) - 1, round((top + height) * _SCALE) - 1)
    return (*corners, max(corners[0], opposite[0]), max(corners[1], opposite[1]))


def _color(box: Box) -> tuple[int, int, int]:
    opacity = ODD_OPACITY if box.is_odd else 1.0
    red, green, blue = (round(part * opacity + 255 * (1 - opacity)) for part in _rgb(COLORS[box.kind]))
    return red, green, blue


def _rgb(text: str) -> tuple[int, int, int]:
    """Of ``#rrggbb``."""
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def _write(canvas: Any, label: Label, font: Any) -> None:
    place = (label.left * _SCALE, label.baseline * _SCALE)
    canvas.text(place, label.text, fill=_PAPER if label.is_light else _INK, anchor=_ANCHORS[label.anchor], font=font)
