"""Three steps of a pipeline against three steps on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from lightning_pp.doctor.checks.trainings import (
    Chain,
    Notes,
    batches,
    batches_for_replica,
    difference,
    loader,
    num_blocks_for,
    train_alone,
    trainer_for,
)
from lightning_pp.doctor.findings import Check, Finding, Rank, Status

_NUM_STEPS = 3
_MOST_DIFFERENCE = {"32-true": 1e-3, "bf16-mixed": 5e-2}
"""As a share of a parameter's change; sums in another order, and with TF32 products, stay below it."""


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        schedule: Name of the schedule.
        replicas: Data-parallel size.
        precision: Lightning's name.
        sharding: The strategy's argument.
    """

    schedule: str
    replicas: int
    precision: str
    sharding: str

    def __str__(self) -> str:
        replicas = f", {self.replicas} replicas with {self.sharding}" if self.replicas > 1 else ""
        return f"{self.schedule} in {self.precision}{replicas}"


def cases(num_ranks: int, *, is_quick: bool) -> list[Case]:
    """The trainings: all of them, or each setting once. Two replicas need an even number of ranks."""
    found = list(product(("1f1b", "zb_h1", "zb_v"), (1, 2), _MOST_DIFFERENCE))
    if is_quick:
        found = [("zb_h1", 1, "32-true"), ("1f1b", 1, "bf16-mixed"), ("zb_v", 2, "32-true")]
    return [
        Case(schedule, replicas, precision, "full_shard" if replicas > 1 else "shard_grad_op")
        for schedule, replicas, precision in found
        if num_ranks % replicas == 0
    ]


def train(rank: Rank) -> list[dict[str, Any]]:
    """Each case with its largest difference on this rank."""
    whole = batches(_NUM_STEPS, 8 * 2)
    alone: dict[str, Notes] = {}
    differences = []
    for case in cases(rank.num_ranks, is_quick=rank.is_quick):
        rank.note(str(case))
        if case.precision not in alone:
            module, bf16 = Chain(num_blocks_for(rank)), case.precision == "bf16-mixed"
            alone[case.precision] = train_alone(module, whole, rank.device, bf16=bf16)
        notes, module = Notes(), Chain(num_blocks_for(rank))
        trainer = trainer_for(
            rank,
            callbacks=[notes],
            precision=case.precision,
            pipeline_parallel_size=rank.num_ranks // case.replicas,
            data_parallel_size=case.replicas,
            schedule=case.schedule,
            sharding=case.sharding,
        )
        trainer.fit(module, loader(batches_for_replica(whole, rank.rank % case.replicas, case.replicas)))
        share, name = difference(notes, alone[case.precision], Chain(num_blocks_for(rank)))
        differences.append(
            {
                **asdict(case),
                "case": str(case),
                "difference": share,
                "parameter": name,
                "losses": notes.losses,
                "losses_alone": alone[case.precision].losses,
            }
        )
    return differences


def judge(values: Sequence[list[dict[str, Any]]]) -> list[Finding]:
    """What differs from one device by more than sums in another order explain."""
    largest = dict.fromkeys(_MOST_DIFFERENCE, 0.0)
    wrong = []
    for of_ranks in zip(*values, strict=True):
        case, precision = of_ranks[0]["case"], of_ranks[0]["precision"]
        place, worst = max(enumerate(of_ranks), key=lambda item: item[1]["difference"])
        largest[precision] = max(largest[precision], worst["difference"])
        if not worst["difference"] <= _MOST_DIFFERENCE[precision]:
            wrong.append(f"{case} by {worst['difference']:.2g} ({worst['parameter']} on rank {place})")
            continue
        losses = [sum(step) / len(of_ranks) for step in zip(*(value["losses"] for value in of_ranks), strict=True)]
        expected = worst["losses_alone"]
        most = max(abs(mine - its) / max(abs(its), 1e-9) for mine, its in zip(losses, expected, strict=True))
        if not (most <= _MOST_DIFFERENCE[precision] and len(losses) == _NUM_STEPS):
            wrong.append(f"the losses of {case}: {losses} in place of {expected}")
    if wrong:
        found = f"Not as on one device after {_NUM_STEPS} steps: {'; '.join(wrong)}."
        advice = "Do not train with these settings; attach the JSON to an issue."
        return [Finding(Status.FAILURE, found, advice, list(values))]
    shares = ", ".join(f"{share:.1g} in {precision}" for precision, share in largest.items() if share)
    found = f"{len(values[0])} trainings of {_NUM_STEPS} steps equal one device's; parameters differ by {shares}."
    return [Finding(Status.OK, found, details=list(values))]


CHECKS = [
    Check(
        "parity",
        "three steps of 1f1b, zb_h1 and zb_v, with and without replicas, equal those of one device",
        train,
        judge,
        limit_s=120.0,
        advice="Run it again with --only parity, and attach the JSON to an issue.",
    )
]
