"""Updates that do not wait for all ranks: made as if nothing was to be clipped or skipped, and settled a little later.

Post-validation of "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241, section 4): the norm of all gradients, or
whether all are finite, is known when the last rank is done with its backwards. Ranks that are done earlier update
without it and begin the next step. There an update is undone by copies from before it, not by inverting it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pp.errors import ConfigurationError
from lightning_pp.strategy._lightning_private import call_before_update
from lightning_pp.strategy._torch_private import step_hooks_of
from lightning_pp.strategy.parameters.finite_gradients import FiniteGradients
from lightning_pp.strategy.parameters.gradients import StageGradients
from lightning_pp.strategy.parameters.update_copies import BeforeUpdate, has_tensor_settings

# A norm so close to the limit may be clipped by a factor just below 1: torch adds 1e-6 to it, and sums round.
_MARGIN, _RELATIVE_MARGIN = 2e-6, 1e-6


@dataclass(frozen=True)
class _Clip:
    """Clipping by norm that is due before an update."""

    parameters: Sequence[nn.Parameter]
    max_norm: float


@dataclass(frozen=True)
class _Unsettled:
    """An update that was made before all ranks were known to make it.

    Attributes:
        before: What it is undone by.
        clip: What all gradients are clipped to; None for no clipping by norm.
        square: The square of the norm of all gradients, once it is known.
        place: The batch that it belongs to, in words.
    """

    before: BeforeUpdate
    clip: _Clip | None
    square: Future[float]
    place: str


class DeferredUpdates:
    """Makes updates as soon as this rank's own gradients are there, and settles each in the next step.

    One update, on every rank::

        if the gradients of the step before had to be clipped, or were not finite, or a loss of this one is not:
            clip, look at all gradients, agree and update, as without this
        otherwise:
            begin to add up the squares of all gradients over the ranks, aside
            copy parameters, gradients and optimizer state; update
            go on: Lightning's loop, the next batch, its forwards ahead
            settle: wait for the sum; where no rank would have clipped or skipped anything, drop the copies
                otherwise put them back, update as without this, and have the step begun anew

    So weights are bit for bit those of updates that wait. Whatever else looks at weights settles first.

    Args:
        finite: Decides whether an update is made.
        gradients: Clips.
        add_up: Adds a number of each rank of the pipeline up, aside from the step; does not wait for anything.

    Attributes:
        num_redone: Updates that were undone and made again.
    """

    def __init__(
        self, finite: FiniteGradients, gradients: StageGradients, add_up: Callable[[Tensor], Future[float]]
    ) -> None:
        self._finite = finite
        self._gradients = gradients
        self._add_up = add_up
        self._optimizer: Optimizer | None = None
        self._clip: _Clip | None = None
        self._unsettled: _Unsettled | None = None
        self._was_within = False
        self.num_redone = 0

    def install(self, precision: Precision, optimizer: Optimizer, is_last: Callable[[], bool]) -> None:
        """Takes the place of clipping by norm, and of the decision before an update.

        Args:
            precision: The plugin.
            optimizer: The one that is stepped.
            is_last: Whether gradients are being clipped right before the update, and not by a hook that goes on after.

        Raises:
            ConfigurationError: The optimizer, or the run's precision, cannot have its updates undone.
        """
        _refuse(precision, optimizer, self._gradients)
        self._optimizer = optimizer
        self._clip = self._unsettled = None
        self._was_within = False

        def clip_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
            parameters = list(precision.main_params(optimizer))
            if is_last():
                self._clip = _Clip(parameters, float(clip_val))
            else:
                self._gradients.clip_by_norm(parameters, clip_val, note=self._finite.note_norm)

        vars(precision)["clip_grad_by_norm"] = clip_by_norm
        call_before_update(precision, self._before_update)

    @property
    def is_unsettled(self) -> bool:
        """Whether the last update may have to be undone yet."""
        return self._unsettled is not None

    def _before_update(self) -> None:
        """After the closure of an update; decides whether it is made at once."""
        clip, self._clip = self._clip, None
        assert self._optimizer is not None
        if clip is None and not self._finite.skips:
            self._finite.decide()  # no rank waits for another
        elif not self._was_within or self._finite.is_told:
            self._in_step(clip)
        else:
            _refuse_hooks(self._optimizer)
            square = self._add_up(self._gradients.own_square(None if clip is None else clip.parameters))
            self._unsettled = _Unsettled(BeforeUpdate(self._optimizer), clip, square, self._finite.where())

    def after_update(self) -> None:
        """After an update was made; settles it at once where what follows may depend on it."""
        if self._unsettled is not None and not self._unsettled.before.are_settings_kept:
            self.settle()

    def settle(self) -> bool:
        """Waits until the last update is known to be right, or makes it so; every rank calls it at the same place.

        Returns:
            Whether the weights are still those that the update left; the same on every rank.

        Raises:
            NonFiniteError: It was made with gradients that are not finite, and is undone.
            RankStoppedError: Another rank has stopped.
        """
        last, self._unsettled = self._unsettled, None
        if last is None:
            return True
        square = last.square.result()
        if math.isfinite(square) and (last.clip is None or _is_within(math.sqrt(square), last.clip.max_norm)):
            return True
        self._redo(last)
        return False

    def forget(self) -> None:
        """After an exception: there is nothing left to settle."""
        self._clip = self._unsettled = None

    def _redo(self, last: _Unsettled) -> None:
        last.before.undo()
        now = [(parameter, parameter.grad) for parameter, _ in last.before.gradients]
        for parameter, gradient in last.before.gradients:
            parameter.grad = gradient
        try:
            with self._finite.speaking_of(last.place):
                self._in_step(last.clip)
            last.before.step_again()
        finally:
            for (parameter, current), (_, gradient) in zip(now, last.before.gradients, strict=True):
                if current is not gradient:  # zeroed since
                    parameter.grad = current
        self.num_redone += 1

    def _in_step(self, clip: _Clip | None) -> None:
        """Clips and decides with all ranks; notes whether anything had to be done about this update."""
        is_within = True
        if clip is not None:
            norm = float(self._gradients.clip_by_norm(clip.parameters, clip.max_norm, note=self._finite.note_norm))
            is_within = math.isfinite(norm) and _is_within(norm, clip.max_norm)
        is_made = self._finite.decide()
        self._was_within = is_within and is_made


def _is_within(norm: float, max_norm: float) -> bool:
    """Whether clipping multiplies by exactly 1."""
    return norm * (1.0 + _RELATIVE_MARGIN) + _MARGIN <= max_norm


def _refuse(precision: Precision, optimizer: Optimizer, gradients: StageGradients) -> None:
    what = None
    if not type(optimizer).__module__.startswith("torch.optim."):
        what = f"{type(optimizer).__name__} is none of torch.optim, and may keep what an update changes anywhere"
    elif has_tensor_settings(optimizer):
        what = f"a setting of {type(optimizer).__name__} is a tensor, which a scheduler may write into"
    elif getattr(precision, "scaler", None) is not None:
        what = f"{type(precision).__name__} scales the loss, and has to see all gradients before an update"
    elif not gradients.are_plain:
        what = "parameters are sharded, replicated or cast inside units, and their gradients are not kept"
    if what is not None:
        raise ConfigurationError(f"optimizer_sync='deferred' undoes updates, and here it cannot: {what}. {_ADVICE}")
    _refuse_hooks(optimizer)


def _refuse_hooks(optimizer: Optimizer) -> None:
    for hook in step_hooks_of(optimizer):
        if not str(getattr(hook, "__module__", "")).startswith("lightning_pp."):
            raise ConfigurationError(
                f"optimizer_sync='deferred' may step {type(optimizer).__name__} twice for one update, and its step "
                f"has a hook of yours ({getattr(hook, '__qualname__', hook)}), which would run twice. {_ADVICE}"
            )


_ADVICE = "Use optimizer_sync='immediate'."
