"""Draws what an offline run of W&B has logged of its pipeline: ``python docs/tools/draw_wandb_run.py RUN_FOLDER``.

Writes ``docs/training/wandb_run.svg``: for some metrics a chart with a line a stage, and the chart over the stages, as
W&B shows them where all segments of a name group its panels. It is read by wandb's own reader, and drawn here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parents[1] / "training" / "wandb_run.svg"
METRICS = ("forward_ms", "backward_input_ms", "backward_weight_ms", "bubble_fraction", "peak_memory_gib")
COLORS = ("#3b6fb6", "#c8553d", "#5aa05f", "#7a63ad")
WIDTH, HEIGHT, GAP = 340, 210, 20
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 44, 44

Line = tuple[str, Sequence[tuple[float, float]]]


def history(folder: Path) -> list[dict[str, Any]]:
    """What was logged, in order."""
    (file,) = folder.rglob("*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = [json.loads(line) for line in printed.splitlines()]
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def over_stages(folder: Path) -> list[Line]:
    """The lines of the newest chart over the stages."""
    files = sorted(folder.rglob("times_over_stages_table_*.json"), key=lambda file: int(file.name.split("_")[-2]))
    lines: dict[str, list[tuple[float, float]]] = {}
    for stage, name, value in json.loads(files[-1].read_text())["data"]:
        lines.setdefault(name, []).append((stage, value))
    return list(lines.items())


def chart(title: str, below: str, lines: Sequence[Line]) -> str:
    """One panel."""
    points = [point for _, line in lines for point in line]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    most = max(y for _, y in points) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / ((last - first) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / most * (HEIGHT - TOP - BOTTOM)

    floor = place(first, 0)[1]
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff" stroke="#d5d8dd"/>',
        f'<text x="{WIDTH / 2}" y="22" text-anchor="middle" font-weight="600">{escape(title)}</text>',
        f'<path d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}" fill="none" stroke="#999"/>',
    ]
    parts += [
        f'<text x="{LEFT - 6}" y="{place(first, y)[1] + 4:.0f}" text-anchor="end" fill="#666">{y:.3g}</text>'
        for y in (0, most / 2, most)
    ]
    parts += [
        f'<text x="{place(x, 0)[0]:.0f}" y="{floor + 14}" text-anchor="middle" fill="#666">{x:g}</text>'
        for x in (first, last)
    ]
    parts.append(f'<text x="{WIDTH / 2}" y="{floor + 14}" text-anchor="middle" fill="#666">{escape(below)}</text>')
    at = float(LEFT)
    for number, (name, line) in enumerate(lines):
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in line)
        color = COLORS[number % len(COLORS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{at:g}" y="{HEIGHT - 10}" fill="{color}" font-size="9.5">{escape(name)}</text>')
        at += 5.5 * len(name) + 14
    return "".join(parts)


def picture(folder: Path) -> str:
    """All panels, three in a row."""
    rows = [row for row in history(folder) if "pp/step_ms" in row]
    panels = []
    for metric in METRICS:
        stages = sorted(name for name in rows[-1] if name.startswith(f"pp/{metric}/stage_"))
        lines = [
            (name.rpartition("/")[2], [(row["trainer/global_step"], row[name]) for row in rows]) for name in stages
        ]
        panels.append(chart(f"pp/{metric}", "step", lines))
    panels.append(chart("pp/times_over_stages", "stage", over_stages(folder)))
    width, height = 3 * (WIDTH + GAP) + GAP, -(-len(panels) // 3) * (HEIGHT + GAP) + GAP
    placed = [
        f'<g transform="translate({GAP + number % 3 * (WIDTH + GAP)},{GAP + number // 3 * (HEIGHT + GAP)})">{panel}</g>'
        for number, panel in enumerate(panels)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="#f4f5f6"/>{"".join(placed)}</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(Path(sys.argv[1])))
