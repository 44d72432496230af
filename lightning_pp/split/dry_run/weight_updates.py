"""Parameters that the user's code updates itself: moving averages of other parameters, momentum encoders.

``target.mul_(0.99).add_(online, alpha=0.01)`` needs both parameters on one stage, so a parameter is also held where
another is computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.split.dry_run.data_flow import DataFlow
from lightning_pp.split.fakes.parameters import FakeParameters, has_data
from lightning_pp.split.record.sources import Parameter, set_sources
from lightning_pp.split.side_effects.generators import generators_untouched
from lightning_pp.split.side_effects.module_state import preserved_state

# Canonical name of a parameter that is written into, to those that its new value is computed from, itself left out.
Updates = Mapping[str, frozenset[str]]


def updates_by(
    function: Callable[[], Any], module: nn.Module, fake_parameters: FakeParameters
) -> tuple[Updates, Exception | None]:
    """Runs ``function``, which calls a method of the module, with every parameter fake.

    It tells which parameters it writes into, and from which others; if it cannot run so, as far as it comes, and why.
    The module's state and the random generators are as before afterwards.
    """
    failure: Exception | None = None
    with (
        generators_untouched(fake_parameters.device),
        fake_parameters.all_fake(lambda fake, name: set_sources(fake, {Parameter(name)})),
        preserved_state(module),
    ):
        flow = DataFlow(fake_parameters.mode)
        flow.watch_parameters(fake_parameters)
        try:
            with flow:
                function()
        except Exception as error:  # it looks at values, or at what is there only while training runs
            failure = error
        finally:
            flow.restore()
        return flow.parameter_updates(), failure


class RepeatedUpdates:
    """The updates of a step that runs once for each microbatch, but must make them once for the batch."""

    def __init__(self, fake_parameters: FakeParameters, names: Iterable[str]) -> None:
        self._fake_parameters = fake_parameters
        self._names = frozenset(names)
        self._before: list[tuple[Tensor, Tensor]] | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._names)

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Around every run of the step: it starts from the same parameters, and sees all of them, in order."""
        with self._fake_parameters.all_parameters():
            self._start()
            yield

    def undo(self) -> None:
        """Puts back the parameters as they were before the first run of the step."""
        for parameter, before in self._before or ():
            with torch.no_grad():
                parameter.data.copy_(before)

    def _start(self) -> None:
        if self._before is None:
            parameters = dict(self._fake_parameters.module.named_parameters())
            written = [parameters[name] for name in self._names if name in parameters]
            self._before = [(p, p.detach().clone()) for p in written if has_data(p)]
            return
        self.undo()
