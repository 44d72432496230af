"""Values that ranks report when measurements are collected, beside the times of their actions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepPrediction:
    """Predictions of a simulated step.

    Attributes:
        step_ms: The time of a step in a row of overlapping ones, milliseconds.
        held_gib: The most that each rank holds of microbatches between their F and their W, GiB.
    """

    step_ms: float
    held_gib: tuple[float, ...]


@dataclass(frozen=True)
class RankReading:
    """One rank, now.

    Attributes:
        peak_memory_gib: :func:`read_peak_memory_gib`.
        memory_allocated_gib: :func:`read_memory_gib`.
        memory_reserved_gib: The same.
        data_wait_ms: Time that the training has waited for its loader since the last reading, milliseconds.
        gradient_square: The square of the gradients' 2-norm, of what counts here in the norm of the model; negative
            where no gradient was looked at.
        gradient_squares: The same of each of the rank's stages; empty where none was looked at.
    """

    peak_memory_gib: float = 0.0
    memory_allocated_gib: float = 0.0
    memory_reserved_gib: float = 0.0
    data_wait_ms: float = 0.0
    gradient_square: float = -1.0
    gradient_squares: tuple[float, ...] = ()

    def merged(self, later: RankReading) -> RankReading:
        """This and a later one as one: the higher peak, all waits, otherwise the later."""
        return RankReading(
            max(self.peak_memory_gib, later.peak_memory_gib),
            later.memory_allocated_gib,
            later.memory_reserved_gib,
            self.data_wait_ms + later.data_wait_ms,
            later.gradient_square if later.gradient_squares else self.gradient_square,
            later.gradient_squares or self.gradient_squares,
        )
