"""Reports what to change: after the first measured steps of a fit, and at its end."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pp.telemetry.diagnosis.collection import StepWindow
from lightning_pp.telemetry.diagnosis.diagnose import Diagnosis


class FitDiagnosis:
    """The diagnoses of one fit; every rank has one.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._window = StepWindow(trainer.strategy.engine)  # type: ignore[attr-defined] # of a pipeline's strategy
        self._has_told = False

    def batch_ended(self, waited_ms: float) -> Diagnosis | None:
        """Notes a training batch; after the first measured steps gathers, and tells on rank 0, once.

        Args:
            waited_ms: How long the loader was waited for, since the batch before.

        Returns:
            The printed text, if any.
        """
        self._window.batch_ended(waited_ms)
        if self._window.is_due:
            diagnosis = self.finish()
            if diagnosis is not None and diagnosis.findings and not self._has_told:
                self._has_told = True
                rank_zero_info(diagnosis.text)
                return diagnosis
        return None

    def finish(self) -> Diagnosis | None:
        """The diagnosis of the latest steps, on rank 0 of the first pipeline; every rank has to call it.

        A failed diagnosis is only a warning; it fails on rank 0, after the gather.
        """
        num_workers = getattr(self._trainer.train_dataloader, "num_workers", None)
        try:
            return self._window.diagnose(num_workers if isinstance(num_workers, int) else None)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            rank_zero_warn(f"The diagnosis failed with {type(error).__name__}: {error}. Training continues.")
            return None
