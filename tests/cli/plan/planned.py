"""Plans made in this process, and the tiny run that they are of."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from rich.console import Console

from lightning_pp.cli.plan.report import Plan
from lightning_pp.cli.plan.run import make_plan

BATCH_SIZE, SEQ_LEN, DIM, NUM_LAYERS, NUM_MICROBATCHES = 8, 17, 64, 4, 4

TINY = [
    f"model.num_layers={NUM_LAYERS}",
    f"model.dim={DIM}",
    "model.num_heads=2",
    "model.max_seq_len=32",
    f"data.seq_len={SEQ_LEN}",
    f"data.batch_size={BATCH_SIZE}",
    "data.num_val_crops=4",
    f"strategy.num_microbatches={NUM_MICROBATCHES}",
    "trainer.devices=2",
    "strategy.schedule=zb_h1",
]


def plan_config(*overrides: str) -> DictConfig:
    with initialize_config_module("lightning_pp.conf", version_base="1.3"):
        return compose("plan", overrides=[*TINY, *overrides])


def planned(*overrides: str) -> tuple[Plan, str]:
    """The plan of the tiny run, and what was printed."""
    stream = io.StringIO()
    plan = make_plan(plan_config(*overrides), Console(file=stream))
    assert plan is not None
    return plan, stream.getvalue()


def read_json(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return content
