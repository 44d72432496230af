"""Two runs side by side: their different settings and results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_pp.cli.past_runs.run_file import RunFile

# of a configuration, what differs between any two runs or says nothing of their speed
_NOT_COMPARED = ("hydra", "resume", "ckpt_path")
_SAME_WORK = ("strategy.", "trainer.max_", "trainer.limit_", "trainer.log_", "trainer.enable_", "logger", "callbacks")
_WHOLE = {
    "step ms": "step_ms",
    "tokens per second": "tokens_per_s",
    "samples per second": "samples_per_s",
    "bubble": "bubble_fraction",
    "last loss": "last_loss",
}
_OF_STAGE = (
    *("forward_ms", "backward_input_ms", "backward_weight_ms"),
    *("bubble_fraction", "p2p_wait_ms", "peak_memory_gib"),
)
_LEAST_DIFFERENCE_IN_SPEED = 0.1


@dataclass(frozen=True)
class Pair:
    """One number in both runs.

    Attributes:
        name: What it is.
        first: In the first run.
        second: In the second.
    """

    name: str
    first: float | None
    second: float | None

    @property
    def change(self) -> float | None:
        """How much more it is in the second run, by the first; None where that cannot be said."""
        if self.first is None or self.second is None or self.first == 0:
            return None
        return self.second / self.first - 1


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        first: The run that is compared with.
        second: The run that is compared.
    """

    first: RunFile
    second: RunFile

    def settings(self) -> dict[str, tuple[Any, Any]]:
        """What was set differently: dotted name to both values; None where a run has no such name."""
        first, second = (
            # but not those that name the run's own folder
            {name: value for name, value in _flat(run.content["config"]) if run.content["folder"] not in str(value)}
            for run in (self.first, self.second)
        )
        names = [*first, *(name for name in second if name not in first)]
        return {
            name: (first.get(name), second.get(name))
            for name in names
            if first.get(name) != second.get(name) and not name.startswith(_NOT_COMPARED)
        }

    def whole(self) -> list[Pair]:
        """Numbers of the whole pipeline, and validation metrics that both have."""
        pairs = [
            Pair(name, self.first.pipeline.get(key), self.second.pipeline.get(key)) for name, key in _WHOLE.items()
        ]
        peaks = [max(stage.peak_memory_gib for stage in run.stages) for run in (self.first, self.second)]
        pairs.append(Pair("peak GiB, any rank", *peaks))
        first, second = self.first.content["metrics"], self.second.content["metrics"]
        shared = [name for name in first if name in second and name.startswith(("val", "test"))]
        pairs += [Pair(name, first[name], second[name]) for name in shared]
        return [pair for pair in pairs if pair.first is not None or pair.second is not None]

    def stages(self) -> list[tuple[str, list[Pair]]]:
        """For each stage that both have, its heading and its numbers."""
        found = []
        for first, second in zip(self.first.stages, self.second.stages, strict=False):
            units = "the same units" if first.units == second.units else "other units"
            pairs = [Pair(name, getattr(first, name), getattr(second, name)) for name in _OF_STAGE]
            found.append((f"stage {first.stage}, {units}", pairs))
        return found

    def speed_text(self) -> str | None:
        """How fast microbatches of different sizes were by the row; None where nothing of that was measured."""
        if any(not name.startswith(_SAME_WORK) for name in self.settings()):
            return None
        rows = [_rows(run) for run in (self.first, self.second)]
        if rows[0] == rows[1] or 0 in rows:
            return None
        by_row = [
            sum(stage.forward_ms + stage.backward_input_ms + stage.backward_weight_ms for stage in run.stages) / its
            for run, its in zip((self.first, self.second), rows, strict=True)
        ]
        few, many = (0, 1) if rows[0] < rows[1] else (1, 0)
        speed = by_row[many] / by_row[few]
        if abs(1 - speed) < _LEAST_DIFFERENCE_IN_SPEED:
            return f"Microbatches of {rows[few]:g} rows are as fast per row as those of {rows[many]:g} ({speed:.0%})."
        return f"Microbatches of {rows[few]:g} rows reach {speed:.0%} of the speed of those of {rows[many]:g} rows."

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""

        def listed(pairs: list[Pair]) -> list[dict[str, Any]]:
            return [{**vars(pair), "change": pair.change} for pair in pairs]

        return {
            "runs": [str(self.first.folder), str(self.second.folder)],
            "settings": {name: list(values) for name, values in self.settings().items()},
            "whole": listed(self.whole()),
            "stages": {heading: listed(pairs) for heading, pairs in self.stages()},
            "speed_by_row": self.speed_text(),
        }


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, tree


def _rows(run: RunFile) -> int:
    """Samples of all replicas in a microbatch."""
    pipeline = run.pipeline
    samples_of_a_step = float(pipeline["samples_per_s"] * pipeline["step_ms"] / 1e3)
    return round(samples_of_a_step / int(pipeline["num_microbatches"]))
