"""Parameters that are frozen and unfrozen during training: every stage must know, since gradients cross stages."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.split.fakes.parameters import FakeParameters

Frozen = tuple[frozenset[str], frozenset[str]]


class FrozenParameters:
    """Which parameters require no gradient, on every stage of a pipeline.

    Code that freezes a module (``requires_grad_(False)``, a callback) finds the parameters of its own stage only. Each
    rank tells the others in the first two batches of an epoch, with the fingerprints of the batches. A change in
    another batch is refused.

    Args:
        module: The user's module, with this rank's parameters.
        fake_parameters: Those of the whole module.
    """

    def __init__(self, module: nn.Module, fake_parameters: FakeParameters) -> None:
        canonical = fake_parameters.canonical_names
        self._own = {canonical[name]: parameter for name, parameter in module.named_parameters()}
        self._others = {canonical[name]: fake_parameters.parameter(name) for name in fake_parameters.released}
        self._told = self._frozen()

    def names(self) -> list[str]:
        """Of all parameters that are frozen, other ranks' too."""
        everywhere = (*self._own.items(), *self._others.items())
        return [name for name, parameter in everywhere if not parameter.requires_grad]

    def own(self) -> Frozen:
        """For the other ranks: names of this rank's parameters that are frozen, and of all others of this rank."""
        self._told = self._frozen()
        return self._told, frozenset(self._own.keys() - self._told)

    def apply(self, states: Iterable[Frozen]) -> None:
        """Freezes or unfreezes the fakes of other stages' parameters, as these stages have reported."""
        for frozen, trained in states:
            for name in frozen & self._others.keys():
                self._others[name].requires_grad_(False)
            for name in trained & self._others.keys():
                self._others[name].requires_grad_(True)

    def check(self, batch_idx: int) -> None:
        """Raises :class:`ConfigurationError` if the others do not know of a change on this rank."""
        changed = sorted(self._told ^ self._frozen())
        if changed:
            raise ConfigurationError(
                f"requires_grad of {len(changed)} parameters ({', '.join(changed[:3])}) was changed before batch "
                f"{batch_idx} of an epoch. Stages exchange such changes only in the first two batches of an epoch. "
                "Change it in on_train_epoch_start."
            )

    def _frozen(self) -> frozenset[str]:
        return frozenset(name for name, parameter in self._own.items() if not parameter.requires_grad)
