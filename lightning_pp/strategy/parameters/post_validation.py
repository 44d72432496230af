"""Updates that do not wait for the norm of all ranks' gradients, and are made again where clipping scales them.

With clipping by norm, every rank has to know the norm of all gradients before its update, so in each step all ranks
wait for the last one. If the norm was within the limit in the step before, it mostly is again, and gradients stay as
they are. So the update is made at once, and validated when the norm is known: "post-validation" of Qi et al., Zero
Bubble Pipeline Parallelism (ICLR 2024), section 4. Where gradients had to be scaled, every rank undoes the update and
the batch that it has run since, and makes both again. Results are bit for bit those of waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pp.errors import NonFiniteError, add_note
from lightning_pp.sharding.gradients.clip import NormUnderWay, clip_coefficient, is_spread, scale_
from lightning_pp.sharding.gradients.memory_guard import MemoryGuard
from lightning_pp.sharding.gradients.undo_update import UndoableUpdate
from lightning_pp.sharding.shard_updates import has_other_step_hooks, is_elementwise_of_torch
from lightning_pp.strategy.parameters.finite_gradients import FiniteGradients
from lightning_pp.strategy.parameters.gradients import StageGradients


@dataclass(eq=False)
class _EarlyUpdate:
    """An update that is not validated yet.

    Attributes:
        norm: Of all gradients.
        limit: The largest norm that is not clipped.
        where: The batch, in words.
    """

    norm: NormUnderWay
    limit: float
    where: str
    _result: tuple[Tensor, bool] | None = field(default=None, init=False)

    def wait(self) -> tuple[Tensor, bool]:
        """Waits for the other ranks, the host alone: the norm, and whether gradients stay as they are."""
        if self._result is None:
            device = self.norm.parts.device
            # the device's own stream goes on
            side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
            with torch.cuda.stream(side):
                norm = self.norm.wait()
                self._result = norm, bool(clip_coefficient(norm, self.limit) == 1)
        return self._result

    def is_known_to_be(self, *, within: bool) -> bool:
        """Whether the norm is there, and within the limit or not; does not wait for other ranks."""
        with suppress(RuntimeError):
            return (self.norm.work is None or self.norm.work.is_completed()) and self.wait()[1] == within
        return False


class PostValidation:
    """Clips by norm on one rank, by waiting for the norm or with an early update.

    Whether an update is early is decided alike on all ranks: the schedule is settled, the last norm was within the
    limit, and :meth:`_reason_to_wait` had none. An early update is validated when code between steps uses parameters,
    gradients or states of the optimizer, before an evaluation, and at the latest at the end of the next batch.

    Args:
        module: The user's module.
        gradients: Of this rank.
        finite: Is asked before updates.
        is_asked: Whether the option is set.
        is_settled: Whether the schedule stays as it is.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        gradients: StageGradients,
        finite: FiniteGradients,
        is_asked: bool,
        is_settled: Callable[[], bool],
    ) -> None:
        self._module = module
        self._gradients = gradients
        self._finite = finite
        self._is_asked = is_asked
        self._is_settled = is_settled
        self._update, self._guard = UndoableUpdate(), MemoryGuard()
        self.begin()

    def begin(self) -> None:
        """At the start of a run."""
        self._is_allowed: bool | None = None
        self._was_within = self._is_rejected = False
        self._early: _EarlyUpdate | None = None
        self._gradients_before: list[tuple[nn.Parameter, Tensor]] = []
        self.num_early = self.num_made_again = self.num_looked_at = 0  # in this run

    def clip(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter], limit: float) -> None:
        """Scales the gradients so that the norm of all is at most ``limit``, or leaves them for an early update."""
        parameters = list(parameters)
        if self._may_be_early(optimizer):
            norm = self._gradients.start_norm(parameters)
            self._update.begin(_unwrapped(optimizer))
            self._early = _EarlyUpdate(norm, limit, self._finite.where())
            self._finite.postpone()
            return

        def note(norm: Tensor) -> None:
            self._finite.note_norm(norm)
            if self._is_allowed:
                self._was_within = bool(clip_coefficient(norm, limit) == 1)

        self._gradients.clip_by_norm(parameters, limit, note=note)

    def _may_be_early(self, optimizer: Optimizer) -> bool:
        if not (self._is_asked and is_spread()):
            return False
        if self._is_allowed is None:
            reasons: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(reasons, self._reason_to_wait(_unwrapped(optimizer)))
            reason = next(filter(None, reasons), None)
            self._is_allowed = reason is None
            if reason is not None:
                rank_zero_warn(f"post_validation=True has no effect: {reason}. Each update waits for all ranks.")
        return self._is_allowed and self._was_within and self._is_settled() and not self._finite.has_bad_loss

    def _reason_to_wait(self, optimizer: Optimizer) -> str | None:
        kind = type(optimizer).__name__
        if type(self._module).configure_gradient_clipping is not pl.LightningModule.configure_gradient_clipping:
            return f"{type(self._module).__name__} overrides configure_gradient_clipping"
        if self._finite.has_scaler:
            return "the scaler of 16-mixed decides about each update"
        if not is_elementwise_of_torch(optimizer):
            return f"restoring parameters and states may not undo an update of {kind}, unlike those of AdamW and SGD"
        if has_other_step_hooks(optimizer):
            return f"{kind} has hooks on its steps, and undoing an update does not undo what they did"
        if any(isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values()):
            return f"{kind} has a tensor among its settings, such as lr"
        return None

    def end_update(self) -> None:
        """After the optimizer's step: from here on code between steps runs."""
        if self._early is not None:
            self.num_early += 1
            self._update.end()
            self._guard.watch(self._update.tensors, self._settle_between_steps)

    def _settle_between_steps(self) -> None:
        self.num_looked_at += 1
        self.settle()

    def begin_batch(self) -> bool:
        """Before a training batch; returns whether it may have to be undone."""
        self._guard.end()
        if self._early is None and not self._is_rejected:
            return False
        held = [parameter for parameter in self._module.parameters() if parameter.grad is not None]
        if held:  # the batch adds to gradients that the update had
            self.settle()
        self._gradients_before = [
            (parameter, parameter.grad.clone()) for parameter in held if parameter.grad is not None
        ]
        return True

    def is_valid(self) -> bool:
        """Whether the batch under way runs with the right weights; the same on every rank. May wait for other ranks."""
        if self._early is not None and not self._early.wait()[1]:
            self._is_rejected = True
        return not self._is_rejected

    def settle(self) -> None:
        """Validates the last update if it was early: waits for other ranks, and makes it again if it has to be.

        Raises:
            NonFiniteError: A gradient is not finite.
        """
        early, self._early = self._early, None
        if early is None:
            return
        norm, self._was_within = early.wait()
        if self._was_within:
            return
        self._is_rejected = True
        self.num_made_again += 1

        def prepare(parameters: list[nn.Parameter]) -> bool:
            if not self._finite.decide_late(norm, early.where):
                return False
            scale_(parameters, clip_coefficient(norm, early.limit))
            return True

        self._update.make_again(prepare)

    def settle_on_all(self) -> None:
        """As :meth:`settle`, on every rank together: no batch has been run since, and none has to be undone."""
        self._guard.end()
        self.settle()
        self._is_rejected = False

    def settle_batch(self) -> None:
        """At the end of a batch that is not valid: drops its gradients, and makes the update before it again."""
        self._gradients.abandon()
        self.settle_on_all()
        for parameter, gradient in self._gradients_before:
            parameter.grad = gradient

    @contextmanager
    def explained(self) -> Iterator[None]:
        """In the block, an error of a batch gets a note if the batch has the weights of an update to be made again."""
        try:
            yield
        except NonFiniteError:  # has its own text
            raise
        except Exception as error:
            if self._is_rejected or (self._early is not None and self._early.is_known_to_be(within=False)):
                add_note(
                    error,
                    "This batch ran after an update whose gradients should have been clipped first "
                    "(post_validation=True). If the error comes from these weights, set post_validation=False.",
                )
            raise

    def close(self, *, has_failed: bool) -> None:
        """At the end of a run."""
        self._guard.end()
        if not has_failed:
            self.settle()
        elif self._early is not None and not self._early.is_known_to_be(within=True):
            with suppress(RuntimeError):  # the device has failed
                self._update.undo()
        self._early = None
        if self.num_early:
            rank_zero_info(
                f"post_validation: {self.num_early} updates were made before the norm of all gradients was known. "
                f"{self.num_made_again} of them were made again with clipped gradients. After {self.num_looked_at} of "
                "them, rank 0 waited for the norm because code between steps used weights, gradients or states."
            )
        self._update.forget()


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
