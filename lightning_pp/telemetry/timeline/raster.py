"""A step's timeline as pixels, for loggers that take images."""

from __future__ import annotations

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
_INK, _PAPER = "#000000", "#ffffff"


def raster_timeline(timeline: Timeline) -> npt.NDArray[np.uint8]:
    """The picture of :func:`~lightning_pp.telemetry.timeline.svg.svg_timeline` in pixels, twice its size.

    Returns:
        Height, width and red, green, blue; uint8.

    Raises:
        ImportError: Pillow is not installed, which comes with TensorBoard.
    """
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    drawing = draw(timeline)
    image = Image.new("RGB", (drawing.width * _SCALE, drawing.height * _SCALE), _PAPER)
    _paint(ImageDraw.Draw(image), drawing, ImageFont.load_default(_FONT_SIZE * _SCALE))
    return np.asarray(image, dtype=np.uint8)


def _paint(canvas: Any, drawing: Drawing, font: Any) -> None:
    for left, top, width, height in drawing.spans:
        canvas.rectangle(_pixels(left, top, width, height), fill=BUBBLE_COLOR)
    for left, top, height in drawing.ticks:
        canvas.line((left * _SCALE, top * _SCALE, left * _SCALE, (top + height) * _SCALE), fill=LINE_COLOR)
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
    text = COLORS[box.kind].removeprefix("#")
    red, green, blue = (round(int(text[index : index + 2], 16) * opacity + 255 * (1 - opacity)) for index in (0, 2, 4))
    return red, green, blue


def _write(canvas: Any, label: Label, font: Any) -> None:
    place = (label.left * _SCALE, label.baseline * _SCALE)
    canvas.text(place, label.text, fill=_PAPER if label.is_light else _INK, anchor=_ANCHORS[label.anchor], font=font)
