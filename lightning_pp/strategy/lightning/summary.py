"""Lightning's model summary, of the whole model and with the stage of each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import get_formatted_model_size, get_human_readable_count
from rich import get_console
from rich.table import Table

from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.strategy._lightning_private import layer_names_of, replace_summary, summary_columns

Columns = list[tuple[str, list[str]]]


class WholeSummary:
    """What a model summary shows, counted while all parameters were there; this rank may have a part of them only.

    Args:
        summary: Lightning's.
        split: The model as it is cut.
    """

    def __init__(self, summary: Any, split: SplitModel) -> None:
        self.total_parameters: int = summary.total_parameters
        self.trainable_parameters: int = summary.trainable_parameters
        self.model_size: float = summary.model_size
        self.total_training_modes: dict[str, int] = summary.total_training_modes
        self.total_flops: int = summary.total_flops
        columns = summary_columns(summary)
        stages = [stages_of_layer(split, name) for name in layer_names_of(summary)]
        missing = [""] * (len(columns[0][1]) - len(stages))  # the row of parameters of no layer
        self.columns: Columns = [*columns[:3], ("Stage", stages + missing), *columns[3:]]

    def _get_summary_data(self) -> Columns:
        return self.columns


def stages_of_layer(split: SplitModel, name: str) -> str:
    """The stages that hold parameters of the layer, or units in it, such as ``0-2``; empty for a layer without any."""
    names = split.fake_parameters.canonical_names
    found = {stage for each in names if each.startswith(f"{name}.") for stage in split.owners[names[each]]}
    for unit, stage in split.partition.stage_of_unit.items():
        if f"{unit}.".startswith(f"{name}.") or f"{name}.".startswith(f"{unit}."):
            found.add(stage)
    return _ranges(sorted(found))


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def summarize_whole_model(trainer: pl.Trainer, split: Callable[[], SplitModel]) -> None:
    """Has the trainer's summaries show the user's model, and not this rank's part of it.

    Args:
        trainer: The trainer.
        split: Gives the model as it is cut by the time of the summary.
    """

    def of_all(original: Callable[..., Any]) -> Callable[..., WholeSummary]:
        def summary(*args: Any) -> WholeSummary:
            fakes = split().fake_parameters
            # of parameters that are cut, fakes have the whole shape
            with fakes.all_parameters() if split().tensor is None else fakes.all_fake(lambda fake, name: None):
                return WholeSummary(original(*args), split())

        return summary

    for callback in getattr(trainer, "callbacks", []):
        if isinstance(callback, ModelSummary):
            replace_summary(callback, of_all)
            if type(callback).summarize is RichModelSummary.summarize:  # it knows its columns by name
                vars(callback)["summarize"] = _print_with_rich


def _print_with_rich(
    summary_data: Columns,
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int,
    **summarize_kwargs: Any,
) -> None:
    """As ``RichModelSummary`` prints it, with whatever columns there are."""
    table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
    for heading, _ in summary_data:
        is_number = heading in ("Params", "FLOPs", "In sizes", "Out sizes")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=heading == "Name")
    for row in zip(*(values for _, values in summary_data), strict=True):
        table.add_row(*row)
    grid = Table.grid(expand=True)
    for label, value in (
        ("Trainable params", get_human_readable_count(trainable_parameters)),
        ("Non-trainable params", get_human_readable_count(total_parameters - trainable_parameters)),
        ("Total params", get_human_readable_count(total_parameters)),
        ("Total estimated model params size (MB)", get_formatted_model_size(model_size)),
        ("Modules in train mode", total_training_modes["train"]),
        ("Modules in eval mode", total_training_modes["eval"]),
        ("Total FLOPs", get_human_readable_count(total_flops)),
    ):
        grid.add_row(f"[bold]{label}[/]: {value}")
    console = get_console()
    console.print(table)
    console.print(grid)
