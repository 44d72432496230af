"""What the runtime asks of whoever shards the stages of a rank."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from torch import nn

from lightning_pp.schedule import Action, ActionKind


class ShardedStages(Protocol):
    """Carries out the sharding actions of a program; every call returns at once, collectives run beside the rest."""

    def unshard(self, stage: int) -> None:
        """UNSHARD: starts to gather the stage's parameters; whatever uses them waits for it."""

    def reshard(self, stage: int) -> None:
        """RESHARD: frees the gathered parameters."""

    def reduce(self, stage: int) -> None:
        """REDUCE: starts the reduction of the stage's gradients, which are complete."""

    def before(self, action: Action) -> None:
        """An F, I, W or B is about to run."""

    def after(self, action: Action) -> None:
        """An F, I, W or B has run."""

    def finish(self) -> None:
        """The program has ended."""

    def reducer(
        self, action: Action, queued: Callable[[], Collection[nn.Parameter]]
    ) -> Callable[[nn.Parameter], None] | None:
        """What to tell, in this W, whenever the gradient of one of ``queued()`` is complete; None if nobody asks."""


def run_sharding_action(stages: ShardedStages, action: Action) -> None:
    """UNSHARD, RESHARD or REDUCE."""
    if action.kind is ActionKind.UNSHARD:
        stages.unshard(action.stage)
    elif action.kind is ActionKind.RESHARD:
        stages.reshard(action.stage)
    else:
        stages.reduce(action.stage)
