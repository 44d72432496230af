"""What crosses between stages, in the models of the tests: ``python benchmarks/planning/crossing.py [--stages 4]``.

Bytes of one microbatch, forward and back, where outputs of units cross alone, and where results of the code between
units cross in their place if that is less; the same cuts for both. Then with cuts inside of blocks, wherever FLOPs are
shared out more evenly so, whether that would make a step of so small a model shorter or not. Last with the cuts that
training by ``1f1b`` on a GPU would choose: inside of blocks only where the estimated step, transfers included,
is shorter so. And the work of the slowest rank over that of the mean one, with whole blocks and with cuts inside of
them. Nothing runs but dry runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.extend(sorted({str(path.parent) for path in (Path(__file__).parents[2] / "tests").rglob("*.py")}))

import architectures
import transformers_by_hand
from balance import cut_as_on_gpus, unevenness
from one_process import CPU, build, recorded

from lightning_pp.errors import ConfigurationError, SplitError
from lightning_pp.planning.cuts import CutOptions
from lightning_pp.planning.refinement.blocks import refinable, what_differs
from lightning_pp.planning.stage_model import RecordedModel, RecordingOptions, SplitModel, assign_stages, record_model
from lightning_pp.schedule import Placement
from lightning_pp.split.cut.partition import partition_units
from lightning_pp.split.record.plan import StepPlan, build_plan

WIDTH, LENGTH, WORDS, NUM_LAYERS = 256, 128, 512, 16
KINDS = ("outputs_alone", "whole", "inside", "chosen")


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
        loss: torch.Tensor = self.head(h).square().mean()
        return loss


class Layer(nn.Module):
    """Two halves with their residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.first(h)
        second: torch.Tensor = self.second(h)
        return h + second


def num_bytes(plan: StepPlan) -> int:
    """Of one microbatch, forward and back."""
    return sum(edge.spec.num_bytes * (1 + edge.has_gradient) for edge in plan.edges)


@dataclass(frozen=True)
class Crossing:
    """What crosses in a microbatch, forward and back, in bytes; and the work of the slowest rank over the mean.

    Attributes:
        outputs_alone: With whole blocks, where outputs of units cross alone.
        whole: With whole blocks.
        inside: With cuts inside of blocks; as ``whole`` where no cut comes to be inside of one.
        chosen: With the cuts that training would choose.
        blocks: Blocks that are cut inside; ``chosen`` may have others.
        unevenness: With whole blocks.
        unevenness_inside: With cuts inside of blocks.
    """

    outputs_alone: int
    whole: int
    inside: int
    chosen: int
    blocks: tuple[str, ...]
    unevenness: float
    unevenness_inside: float


def crossing(make: Callable[[], nn.Module], batch: Any, num_stages: int) -> Crossing:
    """What crosses in the balanced cuts, with whole blocks and without."""
    module = build(make)
    placement = Placement.interleaved(num_stages)

    def recording(refined: Collection[str] = ()) -> RecordedModel:
        return record_model(
            module,
            device=CPU,
            step=recorded(module, batch),
            with_gradients=True,
            patterns=None,
            num_stages=num_stages,
            how=RecordingOptions(refined=refined),
        )

    whole = recording()
    split = balanced(whole, placement)
    alone = replace(split.record, outputs_cross_alone=True)
    before = build_plan(alone, split.partition.stage_of_unit, num_stages)
    names = inside_of(whole, recording, placement)
    inside = balanced(recording(names), placement) if names else split
    chosen = cut_as_on_gpus(module, batch, recorded(module, batch), placement, "1f1b", CutOptions())
    return Crossing(
        num_bytes(before),
        num_bytes(split.step_plan()),
        num_bytes(inside.step_plan()),
        num_bytes(chosen.step_plan()),
        tuple(names),
        unevenness(split),
        unevenness(inside),
    )


def balanced(recording: RecordedModel, placement: Placement) -> SplitModel:
    """Stages with equal costs."""
    partition = partition_units(recording.record, placement=placement, num_parameters=recording.num_parameters)
    return assign_stages(recording, placement=placement, partition=partition)


def inside_of(whole: RecordedModel, recording: Callable[..., RecordedModel], placement: Placement) -> list[str]:
    """The blocks that balanced cuts fall in, if they may."""
    names = refinable(whole)
    with suppress(SplitError):  # a step that goes by values cannot be cut between the children
        finer = recording(names)
        if not what_differs(whole, finer, names):
            return cut_inside(balanced(finer, placement), names)
    return []


def cut_inside(split: SplitModel, names: Sequence[str]) -> list[str]:
    """Those of the blocks whose children are on several stages."""
    stages = split.partition.stage_of_unit
    return [name for name in names if len({stages[unit] for unit in stages if unit.startswith(f"{name}.")}) > 1]


def main() -> None:
    """Prints a line for each model and number of stages, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4])
    numbers = parser.parse_args().stages
    models: dict[str, tuple[Callable[[], nn.Module], Any]] = {}
    for zoo in (architectures, transformers_by_hand):
        models |= {name: (zoo.ARCHITECTURES[name][0], zoo.batches_of(name)[0]) for name in zoo.ARCHITECTURES}
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    models["residuals inside units"] = partial(Layers, False), tokens
    models["residuals outside units"] = partial(Layers, True), tokens
    found: list[Crossing] = []
    for name, (make, batch) in models.items():
        for num_stages in numbers:
            try:
                one = crossing(make, batch, num_stages)
            except (ConfigurationError, SplitError) as error:
                print(f"{name:24} {num_stages} stages: {str(error).partition('. ')[0]}")
                continue
            if "residuals" not in name:
                found.append(one)
            sent = " ".join(f"{getattr(one, kind):12,}" for kind in KINDS)
            work = f"{one.unevenness:.3f} {one.unevenness_inside:.3f}"
            print(f"{name:24} {num_stages} stages: {sent} bytes, {work}, {len(one.blocks)} blocks cut inside")
    sums = " ".join(f"{sum(map(attrgetter(kind), found)):12,}" for kind in KINDS)
    print(f"{'all but the last two':24}           {sums} bytes")
    cut = [one for one in found if one.blocks]
    other = [one for one in found if one.chosen != one.whole]
    print(f"{len(other)} have other bytes with the cuts that training would choose than with balanced whole blocks.")
    more, less = (sum(sign * (one.inside - one.whole) > 0 for one in cut) for sign in (1, -1))
    whole, inside = sum(one.whole for one in cut), sum(one.inside for one in cut)
    print(f"{len(cut)} of {len(found)} have cuts inside of blocks: {whole:,} bytes with whole blocks, {inside:,} so.")
    print(f"{more} of them send more so than with whole blocks, {less} less.")


if __name__ == "__main__":
    main()
