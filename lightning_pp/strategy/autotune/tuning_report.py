"""The report of measured costs: a file of them, and a table of schedules by these costs."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pp.errors import ScheduleError
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.predictions import Prediction
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.schedule import ActionKind, Placement, Schedule, StageCosts, build_schedule
from lightning_pp.schedule.registry import families_allowing
from lightning_pp.schedule.simulation.costs_file import GIB
from lightning_pp.strategy.autotune.measured_costs import Measured


def save_costs(
    path: str | PathLike[str],
    measured: Measured,
    split: SplitModel,
    device: torch.device,
    num_replicas: int,
    num_batches: int,
) -> None:
    """Writes the costs to ``path``, with the units that they were measured on; a failure is only a warning."""
    placement, partition = split.placement, split.partition
    is_cuda = device.type == "cuda"
    try:
        measured.costs.to_json(
            path,
            held_unit=GIB,
            measured_on={
                "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
                "torch": torch.__version__,
                "num_ranks": placement.num_ranks,
                "data_parallel_size": num_replicas,
                "rank_of_stage": list(placement.rank_of_stage),
                "stages": [partition.units_of_stage(stage) for stage in range(placement.num_stages)],
                "num_microbatches": measured.num_microbatches,
                "samples_per_microbatch": measured.num_samples,
                "microbatch": measured.signature,
                "num_batches": num_batches,
            },
        )
    except OSError as error:
        rank_zero_warn(f"The measured costs could not be written to save_costs={str(path)!r}: {error}")
    else:
        rank_zero_info(f"The measured costs of the stages are in {path}.")


def compared_schedules(
    costs: StageCosts,
    placement: Placement,
    num_microbatches: int,
    memory_limit: float | None,
    *,
    whole_batch_loss: bool = False,
) -> Iterator[tuple[str, Schedule | ScheduleError]]:
    """Every schedule that is made by hand on this placement, or why it cannot be used."""
    stages_per_rank = placement.num_stages // placement.num_ranks
    for family in families_allowing(stages_per_rank):
        if family.is_search:
            continue
        name = family.name
        sizes: dict[str, Any] = {
            "num_ranks": placement.num_ranks,
            "num_microbatches": num_microbatches,
            "stages_per_rank": stages_per_rank,
            "whole_batch_loss": whole_batch_loss,
        }
        if build_schedule(name, **sizes).placement != placement:
            continue
        try:
            yield name, build_schedule(name, costs=costs, memory_limit=memory_limit, **sizes)
        except ScheduleError as error:
            yield name, error


def costs_text(costs: StageCosts) -> str:
    """A line with the range of each cost over the stages."""
    parts = []
    resolved = costs.per_stage(costs.num_stages or 1)
    messages = resolved.p2p[:-1] + resolved.p2p_back[1:]
    times = (resolved.forward, resolved.backward_input, resolved.backward_weight, messages)
    for name, values in zip(("F", "I", "W", "p2p"), times, strict=True):
        if values:
            parts.append(f"{name} " + " to ".join(dict.fromkeys(f"{ms:.3g}" for ms in (min(values), max(values)))))
    return f"  measured per stage, ms: {', '.join(parts)}"


def about_copies(asked: str, before: Schedule, found: Schedule) -> str:
    """How many microbatches wait on the host, of each rank, and how many did until now."""
    now, then = (
        ", ".join(str(sum(action.kind is ActionKind.OFFLOAD for action in program)) for program in schedule.programs)
        for schedule in (found, before)
    )
    return (
        f"{asked}: of {found.num_microbatches} microbatches, rank by rank, {now} now wait on the host ({then} before)."
    )


def predicted_schedules(
    costs: StageCosts, chosen: Schedule, options: ScheduleOptions, before: Schedule | None = None
) -> list[Prediction]:
    """What ``costs`` say of the schedule that is chosen, of the one before, and of those made by hand in its place."""
    source = options.source
    found = [Prediction.of(chosen.name, chosen, costs, source, is_chosen=True)]
    if before is not None:
        found.append(Prediction.of(f"{before.name}, until now", before, costs, source))
    by_hand = compared_schedules(
        costs,
        chosen.placement,
        chosen.num_microbatches,
        options.memory_limit_gib,
        whole_batch_loss=chosen.whole_batch_loss,
    )
    for name, schedule in by_hand:
        if isinstance(schedule, ScheduleError):
            found.append(Prediction.impossible(name, chosen.placement, schedule))
        elif name != chosen.name:
            found.append(Prediction.of(name, schedule, costs, source))
    return found


def comparison(measured: Measured, found: Schedule, before: Schedule, options: ScheduleOptions) -> list[str]:
    """A line for each schedule: predicted step time and bubble."""
    lines = ["  predicted                       step, ms   bubble   most held, GiB"]
    for row in predicted_schedules(measured.costs, found, options, before):
        mark = ">" if row.is_chosen else " "
        if row.step_ms is None:
            lines.append(f"  {mark} {row.schedule:<28} {row.why_not}")
        else:
            lines.append(
                f"  {mark} {row.schedule:<28} {row.step_ms:9.4g} {row.bubble_fraction:8.3f} {row.held_gib:12.3g}"
            )
    return lines
