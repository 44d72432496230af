"""The report of measured costs: a file of them, and a table of schedules by these costs."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pp.errors import ScheduleError
from lightning_pp.planning.schedules.options import ScheduleOptions
from lightning_pp.planning.schedules.predictions import Prediction
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.schedule import ActionKind, Schedule, StageCosts, build_schedule
from lightning_pp.schedule.registry import families_allowing
from lightning_pp.schedule.simulation.costs_file import GIB
from lightning_pp.strategy.autotune.measured_costs import Measured


def save_costs(
    options: ScheduleOptions, measured: Measured, split: SplitModel, device: torch.device, num_replicas: int
) -> None:
    """Writes the costs to ``save_costs``, with the units that they were measured on; a failure is only a warning."""
    placement, partition, path = split.placement, split.partition, options.save_costs
    is_cuda = device.type == "cuda"
    assert path is not None
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
                "num_batches": options.num_profiled_batches,
            },
        )
    except OSError as error:
        rank_zero_warn(f"The measured costs could not be written to save_costs={str(path)!r}: {error}")
    else:
        rank_zero_info(f"The measured costs of the stages are in {path}.")


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
    found = [Prediction.of(chosen.name, chosen, costs, is_chosen=True)]
    if before is not None:
        found.append(Prediction.of(f"{before.name}, until now", before, costs))
    placement = chosen.placement
    sizes: dict[str, Any] = {
        "num_ranks": placement.num_ranks,
        "num_microbatches": chosen.num_microbatches,
        "stages_per_rank": placement.num_stages // placement.num_ranks,
        "whole_batch_loss": chosen.whole_batch_loss,
    }
    names = [family.name for family in families_allowing(sizes["stages_per_rank"]) if not family.is_search]
    for name in names:
        if build_schedule(name, **sizes).placement != placement:
            continue
        try:
            schedule = build_schedule(name, costs=costs, memory_limit=options.memory_limit_gib, **sizes)
        except ScheduleError as error:
            found.append(Prediction.impossible(name, placement, error))
        else:
            if name != chosen.name:
                found.append(Prediction.of(name, schedule, costs))
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
