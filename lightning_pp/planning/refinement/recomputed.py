"""``activation_checkpointing="auto"``: as few blocks as a memory limit allows, on the ranks above it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_pp.errors import ConfigurationError, ScheduleError, SplitError
from lightning_pp.planning.activation_checkpointing import recomputation_of
from lightning_pp.planning.memory.limit import DeviceMemory
from lightning_pp.planning.refinement.choice import CutChoice, Request
from lightning_pp.planning.stage_model import RecordedModel, with_recomputation
from lightning_pp.planning.tuning import Layout


def recomputed_units(recording: RecordedModel, request: Request) -> list[str]:
    """The repeated blocks to run again in backward, so that every rank keeps the limit of ``request``.

    The model is laid out without the limit first. A rank over it gets just as many of its blocks recomputed as bring it
    below, in call order. The result is compared with cuts that keep the limit without recomputing: the shorter step is
    taken. Where neither keeps it, all blocks are recomputed.

    Args:
        recording: The model, recorded without recomputing.
        request: What cuts are chosen from, for a recording; with a limit.

    Raises:
        ConfigurationError: The model has no repeated blocks, or checkpoints them itself.
        SplitError, ScheduleError: The step cannot be cut.
    """
    if recording.record.failure is not None:
        return []
    blocks = recomputation_of(True, recording.module, recording.units, recording.record)
    assert blocks is not None
    in_order = [unit for unit in recording.record.first_calls() if unit in blocks.units]
    chosen, layout = CutChoice(recording, lambda one: replace(request(one), memory=None), None).layout()
    memory = request(chosen).memory
    assert memory is not None
    fewest = _by_rank(chosen, layout, memory, in_order)
    steps = [(_step_ms(with_recomputation(recording, names), request), names) for names in ([], fewest)]
    return min(steps)[1] if min(steps)[0] < math.inf else in_order


def _by_rank(recording: RecordedModel, layout: Layout, memory: DeviceMemory, blocks: Sequence[str]) -> list[str]:
    """For each rank its first blocks, the least number that keeps the limit; all of them where none does."""
    placement, partition = layout.placement, layout.partition
    own: list[list[str]] = [[] for _ in range(placement.num_ranks)]
    for name in blocks:
        own[placement.rank_of_stage[partition.stage_of_unit[name]]].append(name)

    def fitting(numbers: Sequence[int]) -> list[bool]:
        """Of each rank, whether it keeps the limit with so many of its blocks recomputed."""
        names = [name for names, number in zip(own, numbers, strict=True) for name in names[:number]]
        now = replace(memory, recording=with_recomputation(recording, names))
        return [over <= 0 for over in now.excess(partition, placement, layout.start)]

    # of each rank, a number that is too few and one that is enough, as far as any is
    few, enough = [-1] * len(own), [len(names) for names in own]
    while numbers := _between(few, enough):
        for rank, fits in enumerate(fitting(numbers)):
            if numbers[rank] < enough[rank]:
                (enough if fits else few)[rank] = numbers[rank]
    return [name for names, number in zip(own, enough, strict=True) for name in names[:number]]


def _between(few: Sequence[int], enough: Sequence[int]) -> list[int] | None:
    """Numbers halfway; None where there is nothing in between."""
    pairs = list(zip(few, enough, strict=True))
    if all(low + 1 == high for low, high in pairs):
        return None
    return [high if low + 1 == high else (low + high) // 2 for low, high in pairs]


def _step_ms(recording: RecordedModel, request: Request) -> float:
    """The planned time of a step that keeps the limit; infinite if no cut does."""
    try:
        return CutChoice(recording, request, None).layout()[1].step_ms
    except (ConfigurationError, SplitError, ScheduleError):
        return math.inf


def about_recomputed(names: Sequence[str], recording: RecordedModel, limit_gib: float) -> str:
    """What was chosen, in a sentence."""
    if not names:
        return f"activation_checkpointing='auto' recomputes no block: device_memory_gib={limit_gib:g} is kept without."
    shown = ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])}, ..., {names[-1]}"
    return (
        f"activation_checkpointing='auto' recomputes {len(names)} of {len(recording.units)} units in backward, for "
        f"device_memory_gib={limit_gib:g}: {shown}."
    )
