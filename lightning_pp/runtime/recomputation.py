"""Activation checkpointing of whole units: a unit keeps its inputs only, and runs again in I.

Nothing is wrapped, so parameters keep their names. A unit runs again exactly once per microbatch, also where backward
is split: I is one ordinary backward, and W needs what I has queued, not the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from lightning_pp.split.side_effects.reach import Reached, reached_from, restored
from lightning_pp.split.unit_calls.selective_policy import Policy


class Recomputation:
    """Runs the calls of some units in such a way that backward runs them again.

    Args:
        units: Names of the units.
        policy: Which operations save their outputs even so; None for none of them.
    """

    def __init__(self, units: Collection[str], policy: Policy | None = None) -> None:
        self.units = frozenset(units)
        self.policy = policy
        self._contexts = noop_context_fn
        if policy is not None:
            self._contexts = partial(create_selective_checkpoint_contexts, policy)

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``original``, one of the units; the random numbers that it draws are the same both times.

        So are the objects and containers that it is called with: a cache of keys that it has put its own into, or a
        list that it has added to, is what it was then while the unit runs again, and afterwards what it is now.
        """
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        num_args, names = len(args), list(kwargs)
        given_at_first: list[Reached] | None = None

        def call(*given: Any) -> Any:  # the unit may have keywords that checkpoint() has too
            nonlocal given_at_first
            keywords = dict(zip(names, given[num_args:], strict=True))
            now = reached_from(given, "")
            if given_at_first is None:
                given_at_first = now
                return original(*given[:num_args], **keywords)
            for reached in given_at_first:
                reached.restore()
            with restored(now):
                return original(*given[:num_args], **keywords)

        return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, context_fn=self._contexts)
