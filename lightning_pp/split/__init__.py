"""Splitting: which unit runs where, and what crosses between stages.

This layer knows torch but not torch.distributed. In the order of use:

* :mod:`.units` finds the submodules that live whole on one stage;
* :mod:`.dry_run` runs the user's step once on fake parameters and records every unit call and what it reads;
* :mod:`.partition` assigns units to stages;
* :mod:`.plan` turns a record and a partition into what each stage runs, receives and sends;
* :mod:`.microbatch` cuts a batch, :mod:`.placeholders` stands in for what a stage does not own.
"""

from __future__ import annotations

from lightning_pp.split.dry_run import dry_run
from lightning_pp.split.microbatch import BatchPart, Microbatch, batch_size_of, split_batch
from lightning_pp.split.partition import partition_units
from lightning_pp.split.plan import StepPlan, build_plan
from lightning_pp.split.record import StepRecord
from lightning_pp.split.units import discover_units

__all__ = [
    "BatchPart",
    "Microbatch",
    "StepPlan",
    "StepRecord",
    "batch_size_of",
    "build_plan",
    "discover_units",
    "dry_run",
    "partition_units",
    "split_batch",
]
