"""Whether the losses of a batch are finite, found on the last stage and told with the batch's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_pp.runtime.host_copies import HostCopies
from lightning_pp.strategy.results.outputs import loss_of


@dataclass(frozen=True)
class LossCheck:
    """Looks at the losses of one training batch.

    Attributes:
        raises: Whether every rank of every pipeline raises what is found, in place of telling it.
        where: Names the batch and this rank.
        is_whole: Whether there is one loss, of the whole batch.
    """

    raises: bool
    where: str
    is_whole: bool

    def begin(self, outputs: Sequence[Any], copies: HostCopies) -> Callable[[], str | None]:
        """Starts to look at what the step returned for each microbatch, on the last stage.

        Returns:
            Gives what is not finite, in words, once ``copies`` are made; None for nothing.
        """
        losses = [copies.copy(loss_of(output)) for output in (outputs[:1] if self.is_whole else outputs)]
        return lambda: self._told(losses)

    def _told(self, losses: Sequence[Tensor]) -> str | None:
        for number, loss in enumerate(losses):
            if not bool(loss.isfinite().all()):
                of_what = "the whole batch" if self.is_whole else f"microbatch {number + 1} of {len(losses)}"
                value = float(loss) if loss.numel() == 1 else loss.tolist()
                return f"The loss of {of_what} is {value}, in {self.where}."
        return None
