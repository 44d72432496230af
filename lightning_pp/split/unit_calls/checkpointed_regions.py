"""Activation checkpointing around unit calls: the code is run again in backward, when no stage intercepts units.

``checkpoint(lambda h: second(first(h)), h)`` may span units of several stages. So what the first run saw is remembered
per checkpointed region, outputs of units and results of the code between them that were received, and the second run
sees the same. Reentrant checkpointing, which cuts the autograd graph in a
way that hides what depends on what, runs as the other kind meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from lightning_pp.split._torch_private import CHECKPOINT_GENERATORS, tree_any
from lightning_pp.split.fakes.parameters import is_fake

RAN = object()


@dataclass(eq=False, slots=True)
class Region:
    """The unit calls in the first run of a checkpointed region.

    Attributes:
        calls: What its unit calls gave: :data:`RAN` where the unit itself ran, else what stood in for it.
        num_functions: Functions of torch that gave a tensor between units, where these are followed.
        received: By how many came before: the name of such a function, and what was substituted for its result.
    """

    calls: list[Any] = field(default_factory=list)
    num_functions: int = 0
    received: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)


_never_runs_again = False


class NotRunAgainError(RuntimeError):
    """The tensors that a checkpointed region keeps are not needed now."""


@contextmanager
def never_run_again() -> Iterator[None]:
    """In the block, reading a region's saved tensors raises :class:`NotRunAgainError` instead of running it again."""
    global _never_runs_again
    before, _never_runs_again = _never_runs_again, True
    try:
        yield
    finally:
        _never_runs_again = before


class CheckpointedRegions:
    """Keeps the unit calls of every checkpointed region.

    Args:
        replaying: Makes a context that repeats the results of unit calls and of code between them in a region.

    Attributes:
        open: The regions that run now.
        num_regions: Regions that were opened so far.
        watching: Makes a context around the code of a region in its first run.
    """

    def __init__(self, replaying: Callable[[Region], AbstractContextManager[None]]) -> None:
        self._replaying = replaying
        self.open: list[Region] = []
        self._num_opened = 0
        self.num_regions = 0
        self.watching: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def running(self) -> int | None:
        """A number for the outermost region that runs now; None outside of one."""
        return self._num_opened if self.open else None

    def note(self, given: Any) -> None:
        """A unit call gave ``given``, :data:`RAN` if the unit ran."""
        for region in self.open:
            region.calls.append(given)

    def note_function(self, name: str, received: torch.Tensor | None) -> None:
        """A function between units gave a tensor, in whose place ``received`` was taken, if that is one."""
        for region in self.open:
            if received is not None:
                region.received[region.num_functions] = name, received
            region.num_functions += 1

    def close(self) -> None:
        """No region is open: a stage that ended its step inside one may have left it so."""
        self.open.clear()

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """In the block, regions are remembered for their second run, which may come much later."""
        originals = {name: getattr(torch_checkpoint, name) for name in CHECKPOINT_GENERATORS}
        function_class = torch_checkpoint.CheckpointFunction
        own_apply = vars(function_class).get("apply")  # of an outer context: a step may be rehearsed within a step
        for name, original in originals.items():
            setattr(torch_checkpoint, name, self._wrapped(original))
        function_class.apply = _not_reentrant  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.close()
            for name, original in originals.items():
                setattr(torch_checkpoint, name, original)
            del function_class.apply
            if own_apply is not None:
                function_class.apply = own_apply  # type: ignore[method-assign]

    def _wrapped(self, generator: Callable[..., Generator[None]]) -> Callable[..., Any]:
        def wrapped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
            region = Region()

            def run_again(*inputs: Any, **named_inputs: Any) -> Any:
                if _never_runs_again:
                    raise NotRunAgainError
                if not region.num_functions and all(given is RAN for given in region.calls):
                    return function(*inputs, **named_inputs)
                with self._replaying(region):
                    return function(*inputs, **named_inputs)

            self._num_opened += not self.open
            self.num_regions += 1
            self.open.append(region)
            run = generator(run_again, *args, **kwargs)
            try:
                next(run)
                region.num_functions = 0  # those of torch's own code before it
                with self.watching():
                    yield
                yield from run
            finally:
                run.close()
                self.open = [other for other in self.open if other is not region]

        return wrapped


def _not_reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Replaces reentrant checkpointing, with its effect on inputs that need no gradient."""
    # what stands in for another stage's value is detached, whether or not that value is
    if not tree_any(lambda leaf: isinstance(leaf, torch.Tensor) and (leaf.requires_grad or is_fake(leaf)), args):
        with torch.no_grad():
            return function(*args)
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
