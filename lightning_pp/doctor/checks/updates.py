"""A fused optimizer with clipping, and a training that is saved in shards and goes on: as on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_pp.doctor.checks.trainings import (
    Chain,
    Notes,
    batches,
    difference,
    loader,
    num_blocks_for,
    part_of_replica,
    train_alone,
    trainer_for,
)
from lightning_pp.doctor.findings import Check, Finding, Rank, Status

_NUM_BATCHES = 2
"""Of each of the two epochs, between which the training is saved."""
_CLIP = 0.05
_MOST_DIFFERENCE = 1e-3


def train_and_resume(rank: Rank) -> dict[str, Any]:
    """Trains halfway, saves, goes on in another Trainer; the largest difference at the save and in the end."""
    replicas = 2 if rank.num_ranks % 2 == 0 and rank.num_ranks > 2 else 1
    whole = batches(_NUM_BATCHES, 8 * replicas)
    mine = part_of_replica(whole, rank.rank % replicas, replicas)
    folder = rank.folder / "saved.ckpt"
    found = {}
    for name, num_epochs in (("saved", 1), ("resumed", 2)):
        rank.note(f"training with fused AdamW and clipping, {name}")
        alone = train_alone(
            Chain(num_blocks_for(rank), optimizer="adamw"), whole * num_epochs, rank.device, bf16=False, clip=_CLIP
        )
        notes, module = Notes(), Chain(num_blocks_for(rank), optimizer="adamw fused")
        trainer = trainer_for(
            rank,
            callbacks=[notes],
            max_epochs=num_epochs,
            gradient_clip_val=_CLIP,
            pipeline_parallel_size=rank.num_ranks // replicas,
            data_parallel_size=replicas,
            sharding="full_shard",
        )
        trainer.fit(module, loader(mine), ckpt_path=folder if name == "resumed" else None)
        found[name] = difference(notes, alone, Chain(num_blocks_for(rank)))
        if name == "saved":
            rank.note("saving in shards")
            trainer.save_checkpoint(folder)
    return {name: {"difference": share, "parameter": parameter} for name, (share, parameter) in found.items()}


def judge(values: Sequence[dict[str, Any]]) -> list[Finding]:
    """Whether both ends are those of one device."""
    for name, what in (("saved", "with fused AdamW and clipping"), ("resumed", "after a save in shards and a resume")):
        rank, worst = max(enumerate(value[name] for value in values), key=lambda item: item[1]["difference"])
        if not worst["difference"] <= _MOST_DIFFERENCE:
            found = (
                f"Not as on one device {what}: {worst['parameter']} on rank {rank} differs by "
                f"{worst['difference']:.2g} of what it has moved."
            )
            advice = "Use fused=False or no clipping, or do not resume; attach the JSON to an issue."
            return [Finding(Status.FAILURE, found, advice, list(values))]
    most = max(part["difference"] for value in values for part in value.values())
    found = f"Trained, saved and resumed as on one device; parameters differ by {most:.1g} at most."
    return [Finding(Status.OK, found, details=list(values))]


CHECKS = [
    Check(
        "updates",
        "a fused optimizer, clipping, a save in shards and a resume are those of one device",
        train_and_resume,
        judge,
        limit_s=60.0,
        advice="Several hosts need a working folder that all of them see. Attach the JSON to an issue.",
    )
]
