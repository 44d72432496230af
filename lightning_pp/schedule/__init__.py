"""Pipeline schedules as data: built by name, checked, simulated, searched. Imports no torch.

A *stage* is a run of the model's units, a *rank* holds one or more stages, a *microbatch* is a slice of the batch; an
*action* is what a rank does next (F forward, I input gradient, W weight gradient, B both), and a *program* the ordered
actions of one rank for one step.
"""

from __future__ import annotations

from lightning_pp.schedule import families as _families  # noqa: F401 - importing registers the families
from lightning_pp.schedule.families.gpipe import build_forward_only
from lightning_pp.schedule.program.action import Action, ActionKind
from lightning_pp.schedule.program.placement import Placement
from lightning_pp.schedule.registry import available_schedules, build_schedule
from lightning_pp.schedule.schedule import Schedule
from lightning_pp.schedule.search import auto as _auto  # noqa: F401 - importing registers it
from lightning_pp.schedule.sharding import Sharding, insert_sharding
from lightning_pp.schedule.simulation.costs import StageCosts
from lightning_pp.schedule.simulation.simulate import BubbleFraction, Simulation, TimedAction

__all__ = [
    "Action",
    "ActionKind",
    "BubbleFraction",
    "Placement",
    "Schedule",
    "Sharding",
    "Simulation",
    "StageCosts",
    "TimedAction",
    "available_schedules",
    "build_forward_only",
    "build_schedule",
    "insert_sharding",
]
