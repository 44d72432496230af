"""What two runs wrote down, compared moment by moment: which values differ, where first, and why that can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_pp.checkpoint.content import OPTIMIZERS
from lightning_pp.verification.recording import Facts, Moment, moment_file

#: In the order in which a difference of one moment is told.
KINDS = (
    *("batch", "loss", "logged", "gradient", "weight", "buffer", "optimizer state", "learning rate"),
    *("state of a callback", "checkpoint"),
)
#: The largest relative difference that counts as equal, by dtype.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSEST = 2e-2
# of a tensor that is nothing but rounding, such as the gradient of a key's bias: relative to the largest of its kind
_SMALL_OF_KIND = 1e-3
_OF_STAGES = ("gradient", "weight", "buffer", "optimizer state")
_SMALL = 1e-6


@dataclass(frozen=True)
class Difference:
    """One value that differs from one device.

    Attributes:
        place: The moment: training or resumed training, and the batch.
        kind: One of :data:`KINDS`.
        name: Name of the value. For a tensor, with the indices of the element that differs most.
        stage: The stages that have it, or an empty string.
        expected: The value on one device.
        found: The value in the pipeline.
        relative: The difference, relative to the largest element.
    """

    place: str
    kind: str
    name: str
    stage: str
    expected: Any
    found: Any
    relative: float

    def __str__(self) -> str:
        stage = f" (stage {self.stage})" if self.stage else ""
        numbers = f"{_shown(self.expected)} on one device, {_shown(self.found)} in the pipeline"
        return f"{self.place}: {self.kind} {self.name}{stage}: {numbers}, relative difference {self.relative:.2g}"


class Comparison:
    """Two runs, compared when this is made.

    Args:
        plain: Folder of the run on one device.
        piped: Folder of the pipeline.
        expected: Facts of the run on one device.
        ranks: Facts of each rank of the pipeline.

    Attributes:
        differences: In the order of the training.
        compared: How many values of each kind were compared.
        largest: The largest relative difference of each kind.
    """

    def __init__(self, plain: Path, piped: Path, expected: Facts, ranks: Sequence[Facts]) -> None:
        self.differences: list[Difference] = []
        self.compared: dict[str, int] = {}
        self.largest: dict[str, float] = {}
        self._ranks = ranks
        self._tolerance = tolerance_of(expected.loss_dtype)
        self._folders = str(plain), str(piped)
        for number in range(max(facts.num_moments for facts in (expected, *ranks))):
            of_one = _moment(plain, 0, number)
            of_ranks = [_moment(piped, rank, number) for rank in range(len(ranks))]
            if other := [each.place for each in of_ranks if each.place != of_one.place]:
                self.differences.append(Difference(of_one.place, "moment", "", "", of_one.place, other[0], math.inf))
                return
            for kind in KINDS:
                if kind in of_one.values:
                    found = [each.values.get(kind, {}) for each in of_ranks]
                    self._compare(of_one.place, kind, of_one.values[kind], found)

    def _compare(self, place: str, kind: str, expected: dict[str, Any], found: Sequence[dict[str, Any]]) -> None:
        """Compares what each rank has, and whether any has each; so a rank may have a part only."""
        sizes: dict[str, float] = {}
        for name, value in expected.items() if kind in (*_OF_STAGES, "checkpoint") else ():
            sizes[_group(kind, name)] = max(sizes.get(_group(kind, name), 0), _size(value))
        for name in dict.fromkeys([*expected, *(name for values in found for name in values)]):
            holders = [rank for rank, values in enumerate(found) if name in values]
            for rank in holders or [0]:
                one, other = expected.get(name, _MISSING), found[rank].get(name, _MISSING)
                self.compared[kind] = self.compared.get(kind, 0) + 1
                smallest = max(_SMALL_OF_KIND * sizes.get(_group(kind, name), 0), _SMALL)
                relative, where = self._relative(one, other, smallest)
                self.largest[kind] = max(self.largest.get(kind, 0.0), relative)
                if relative > max(self._tolerance, tolerance_of(getattr(one, "dtype", None))):
                    stage = self._ranks[rank].stages if holders and kind in _OF_STAGES else ""
                    one, other = (value[where] if where else value for value in (one, other))
                    shown = f"{name}[{', '.join(map(str, where))}]" if where else name
                    self.differences.append(Difference(place, kind, shown, stage, one, other, relative))
                    break

    def _relative(self, one: Any, other: Any, smallest: float) -> tuple[float, tuple[int, ...]]:
        """The relative difference of two values, and the indices of the element of tensors that differs most."""
        if not all(isinstance(value, (Tensor, int, float)) for value in (one, other)):
            words = (str(one).replace(self._folders[0], ""), str(other).replace(self._folders[1], ""))
            return (0.0 if words[0] == words[1] else math.inf), ()
        one, other = (torch.as_tensor(value).double() for value in (one, other))
        if one.shape != other.shape:
            return math.inf, ()
        if not one.numel():
            return 0.0, ()
        is_equal = (one == other) | (one.isnan() & other.isnan())
        apart = torch.where(is_equal, 0.0, (one - other).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        finite = one[one.isfinite()]
        size = max(float(finite.abs().max()) if finite.numel() else 0.0, smallest)
        where = torch.unravel_index(apart.argmax(), apart.shape) if apart.dim() else ()
        return float(apart.max()) / size, tuple(int(index) for index in where)


def tolerance_of(dtype: object) -> float:
    """The relative difference that counts as equal."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:  # numbers of NumPy have dtypes of their own
        return TOLERANCES[torch.float64]
    return TOLERANCES.get(dtype, _COARSEST)


_OTHER_BATCHES = (
    "Known cause: the two trainings read other batches. Perhaps a loader, sampler or dataset draws from a generator "
    "that the run's seed does not set. Or it keeps state that a resume on one device does not restore, such as an "
    "order that it shuffles in place."
)


def causes(expected: Facts, found_by_rank: Facts, first: Difference) -> list[str]:
    """What is known to make a pipeline of this module differ, and what it warned of; if nothing is, what to look at."""
    if first.kind == "batch":
        return [_OTHER_BATCHES]
    told = [text for text in found_by_rank.warnings if text not in expected.warnings]
    found = [f"The pipeline warned: {text}" for text in told]
    if expected.draws:
        found.append("Known cause: a step draws random numbers (functional dropout, noise), others in a pipeline.")
    if tolerance_of(expected.loss_dtype) > TOLERANCES[torch.float64]:
        found.append(
            f"Known cause: the loss is {expected.loss_dtype}; sums in another order round differently, and updates "
            "increase the difference."
        )
    return found or [
        "No cause is known. Look at what the step reads besides its batch: trainer.world_size, counters and attributes "
        "that every microbatch changes."
    ]


_MISSING = "nothing"


def _moment(folder: Path, rank: int, number: int) -> Moment:
    path, ended = moment_file(folder, rank, number), Moment("the training has ended", {})
    moment: Moment = torch.load(path, weights_only=False) if path.exists() else ended
    return moment


def _group(kind: str, name: str) -> str:
    """Values that are of one size: gradients, or all ``exp_avg_sq``."""
    return name.rpartition(".")[2] if kind == "optimizer state" or name.startswith(OPTIMIZERS) else ""


def _size(value: Any) -> float:
    is_numbers = isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0
    return float(value.abs().max().nan_to_num(nan=0.0, posinf=0.0)) if is_numbers else 0.0


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    return f"{value:.12g}" if isinstance(value, float) else str(value)
