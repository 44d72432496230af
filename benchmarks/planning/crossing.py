"""What crosses between stages, in the models of the tests: ``python benchmarks/planning/crossing.py [--stages 4]``.

Bytes of one microbatch, forward and back, where outputs of units cross alone, and where results of the code between
units cross in their place if that is less; the same cuts for both. Nothing runs but dry runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[2] / "tests" / folder) for folder in ("", "models", "split")]

import architectures  # noqa: E402
import transformers_by_hand  # noqa: E402
from one_process import CPU, build, recorded  # noqa: E402

from lightning_pp.errors import ConfigurationError, SplitError  # noqa: E402
from lightning_pp.planning.stage_model import assign_stages, record_model  # noqa: E402
from lightning_pp.schedule import Placement  # noqa: E402
from lightning_pp.split.record.plan import StepPlan, build_plan  # noqa: E402

WIDTH, LENGTH, WORDS, NUM_LAYERS = 256, 128, 512, 16


class Layers(nn.Module):
    """Sixteen layers of two halves, added up inside of a unit or outside of units."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.outside = outside
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH) if outside else Layer() for _ in range(NUM_LAYERS * (1 + outside))
        )

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + layer(h) if self.outside else layer(h)
        return self.head(h).square().mean()


class Layer(nn.Module):
    """Two halves with their residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.first(h)
        return h + self.second(h)


def num_bytes(plan: StepPlan) -> int:
    """Of one microbatch, forward and back."""
    return sum(edge.spec.num_bytes * (1 + edge.has_gradient) for edge in plan.edges)


def before_and_after(make: Callable[[], nn.Module], batch: Any, num_stages: int) -> tuple[int, int]:
    """Bytes of outputs of units alone, and of what crosses now."""
    module = build(make)
    split = assign_stages(
        record_model(
            module,
            device=CPU,
            step=recorded(module, batch),
            with_gradients=True,
            patterns=None,
            num_stages=num_stages,
            activation_checkpointing=False,
        ),
        placement=Placement.interleaved(num_stages),
    )
    alone = replace(split.record, outputs_cross_alone=True)
    before = build_plan(alone, split.partition.stage_of_unit, num_stages)
    return num_bytes(before), num_bytes(split.step_plan())


def main() -> None:
    """Prints a line for each model and number of stages, and the sum."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4])
    numbers = parser.parse_args().stages
    models: dict[str, tuple[Callable[[], nn.Module], Any]] = {}
    for zoo in (architectures, transformers_by_hand):
        models |= {name: (zoo.ARCHITECTURES[name][0], zoo.batches_of(name)[0]) for name in zoo.ARCHITECTURES}
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    models["residuals inside units"] = partial(Layers, False), tokens
    models["residuals outside units"] = partial(Layers, True), tokens
    sums = [0, 0]
    for name, (make, batch) in models.items():
        for num_stages in numbers:
            try:
                found = before_and_after(make, batch, num_stages)
            except (ConfigurationError, SplitError) as error:
                print(f"{name:24} {num_stages} stages: {str(error).partition('.')[0]}")
                continue
            if "residuals" not in name:
                sums = [total + number for total, number in zip(sums, found, strict=True)]
            print(f"{name:24} {num_stages} stages: {found[0]:12,} {found[1]:12,} bytes")
    print(f"{'all but the last two':24}           {sums[0]:12,} {sums[1]:12,} bytes")


if __name__ == "__main__":
    main()
