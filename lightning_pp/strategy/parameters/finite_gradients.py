"""Gradients that are not finite: found before the optimizer's step, which is then an error or skipped by all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_pp.errors import NonFiniteError
from lightning_pp.planning.pipeline_options import OnNonFinite
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.sharding.gradients.finite import are_finite, norms_by_device
from lightning_pp.strategy._lightning_private import call_before_update

# stage, place among the parameters of the rank, and the finding in words
Finding = tuple[int, int, str]


class FiniteGradients:
    """Decides before each update of a pipeline whether to make it.

    With clipping by norm the norm, which all ranks know, tells. Otherwise each rank looks at its own gradients, by one
    reduction; in mode ``"skip"`` all ranks then agree by an all-reduce of one number. A precision with a scaler of the
    loss skips by itself, and nothing is done here.

    Args:
        mode: ``on_nonfinite`` of the strategy.
        split: The split model.
        rank: This rank's place in the pipeline.
        device: Where this rank computes.
        trainer: Gives the trainer that runs.
    """

    def __init__(
        self, mode: OnNonFinite, split: SplitModel, rank: int, device: torch.device, trainer: Callable[[], pl.Trainer]
    ) -> None:
        self.mode = mode
        self._split = split
        self._rank = rank
        self._device = device
        self._trainer = trainer
        self._norm: float | None = None
        self._own: Finding | None = None
        self._loss: str | None = None
        self._num_skipped = 0
        self._is_on = self._is_postponed = self.has_scaler = False

    def install(self, precision: Precision) -> None:
        """Has ``precision`` ask before every update."""
        self._norm = self._own = self._loss = None
        self._num_skipped = 0
        self._is_postponed = False
        self.has_scaler = getattr(precision, "scaler", None) is not None
        self._is_on = self.mode != "ignore" and not self.has_scaler
        if self._is_on:
            call_before_update(precision, self.decide)

    def where(self) -> str:
        """The batch under way."""
        trainer = self._trainer()
        number = max(0, trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1)
        return f"batch {number} of epoch {trainer.current_epoch} (step {trainer.global_step})"

    def note_loss(self, text: str | None) -> None:
        """What is not finite about the losses of a batch, the same on every rank: its update is to be skipped."""
        self._loss = self._loss or text

    def note_norm(self, norm: Tensor) -> None:
        """The norm of all gradients of all ranks, before they are scaled by it."""
        if not self._is_on:
            return
        self._norm = float(norm)
        if not math.isfinite(self._norm):
            self._own = self._last_own_finding(self.where())

    @property
    def has_bad_loss(self) -> bool:
        """Whether :meth:`note_loss` has been told of one since the last update."""
        return self._loss is not None

    def postpone(self) -> None:
        """The next update is made without a question; :meth:`decide_late` is asked when the norm is known."""
        self._is_postponed = True

    def decide_late(self, norm: Tensor, where: str) -> bool:
        """As :meth:`decide`, of the update of a batch before: on each rank for itself.

        Args:
            norm: Of all gradients.
            where: That batch, as :meth:`where` named it.
        """
        if not self._is_on or bool(norm.isfinite()):
            return True
        own = self._last_own_finding(where)
        return self._refuse(own[2] if own else f"The norm of all gradients is {float(norm)}, in {where}.")

    def bad_weight(self) -> str | None:
        """A trained parameter of this rank that is not finite, in words; None for none, and if the check is off."""
        trained = [item for item in self._split.module.named_parameters() if item[1].requires_grad]
        if self.mode == "ignore" or are_finite(parameter for _, parameter in trained):
            return None
        name = next(name for name, parameter in trained if not are_finite([parameter]))
        return f"{self._split.fake_parameters.canonical_names[name]} on rank {_global_rank()} is not finite."

    def decide(self) -> bool:
        """Before an update, on all ranks; returns whether it is made.

        Raises:
            NonFiniteError: It would be made with what is not finite.
        """
        is_postponed, self._is_postponed = self._is_postponed, False
        if not self._is_on or is_postponed:
            return True
        norm, own, loss = self._norm, self._own, self._loss
        self._norm = self._own = self._loss = None
        known_to_all = loss is not None or norm is not None
        is_bad = loss is not None or (norm is not None and not math.isfinite(norm))
        looks = norm is None and not is_bad
        if self.mode == "skip" and looks:
            looks = self._may_be_bad_anywhere()  # the only time that the host waits, unless something is found
        if looks and not are_finite(gradient for _, _, gradient in self._gradients()):
            own, is_bad = self._last_own_finding(self.where()), True
        if self.mode == "skip" and looks:
            is_bad = self._largest(torch.full((), float(is_bad), device=self._device))
            known_to_all = True
        if not is_bad:
            return True
        finding = self._last_finding_of_ranks(own) if known_to_all else own
        return self._refuse(
            loss or (finding[2] if finding else f"The norm of all gradients is {norm}, in {self.where()}.")
        )

    def _refuse(self, text: str) -> bool:
        """Raises, or drops the gradients."""
        if self.mode == "error":
            raise NonFiniteError(text)
        for parameter in self._split.module.parameters():
            parameter.grad = None
        self._num_skipped += 1
        rank_zero_warn(f"{text} This update is skipped on all ranks, as {self._num_skipped - 1} before it in this run.")
        return False

    def _gradients(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        for name, parameter in self._split.module.named_parameters():
            if parameter.grad is not None:
                yield name, parameter, parameter.grad

    def _last_own_finding(self, where: str) -> Finding | None:
        """Of this rank's parameters whose gradients are not finite the last, to which a backward comes first."""
        units = self._split.units_of(self._rank)
        unit_of = {id(parameter): name for name, unit in units.items() for parameter in unit.parameters()}
        found: list[Finding] = []
        for place, (name, parameter, gradient) in enumerate(self._gradients()):
            if are_finite([gradient]):
                continue
            unit = unit_of.get(id(parameter))
            stages = self._split.placement.stages_of_rank(self._rank)
            stage = min(stages) if unit is None else self._split.partition.stage_of_unit[unit]
            of_unit = "outside of units" if unit is None else f"unit {unit}"
            words = (
                f"The gradient of {self._split.fake_parameters.canonical_names[name]} ({of_unit}, stage {stage}, rank "
                f"{_global_rank()}) is not finite, before the update of {where}."
            )
            found.append((stage, place, words))
        return max(found, default=None)

    def _may_be_bad_anywhere(self) -> bool:
        """Whether the norm of some rank's gradients is not finite, which it also is where it overflows."""
        flag = torch.zeros((), device=self._device)
        for norm in norms_by_device(gradient for _, _, gradient in self._gradients()):
            flag.add_((~norm.isfinite()).to(flag.device, flag.dtype))
        return self._largest(flag)

    @staticmethod
    def _largest(flag: Tensor) -> bool:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    @staticmethod
    def _last_finding_of_ranks(own: Finding | None) -> Finding | None:
        """The same over all ranks; every one of them calls it."""
        found: list[Finding | None] = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, own)
        return max((each for each in found if each is not None), default=None)


def _global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
