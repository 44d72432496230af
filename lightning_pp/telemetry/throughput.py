"""Samples and tokens per second, between the ends of successive batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_pp.split.data.tree import tensors_of

# uint8 and bool are left out: images and masks are held in them, token ids are not
_ID_DTYPES = frozenset({torch.int16, torch.int32, torch.int64})


def count_tokens(batch: Any) -> int:
    """Elements of the first integer tensor of at least two dimensions in ``batch``: its input ids; 0 without one."""
    return next((tensor.numel() for tensor in tensors_of(batch) if tensor.dtype in _ID_DTYPES and tensor.dim() >= 2), 0)


@dataclass(frozen=True)
class Throughput:
    """Samples and tokens in a span of time.

    Attributes:
        num_batches: Number of batches.
        seconds: Wall time that they took.
        num_samples: Samples in them.
        num_tokens: Tokens in them; 0 if they hold no token ids.
        model_flops: Floating point operations of their forwards and backwards, without what is computed again.
    """

    num_batches: int = 0
    seconds: float = 0.0
    num_samples: int = 0
    num_tokens: int = 0
    model_flops: float = 0.0

    def __add__(self, other: Throughput) -> Throughput:
        return Throughput(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def step_ms(self) -> float:
        """Mean wall time of a batch, milliseconds."""
        return 1e3 * self.seconds / self.num_batches if self.num_batches else 0.0

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """None if no batch holds token ids."""
        return self.num_tokens / (self.seconds or float("inf")) if self.num_tokens else None


class BatchClock:
    """Takes the wall time from the end of one batch to the end of the next, without what lies in a pause.

    Args:
        now: A clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last_end = now()
        self._paused_at: float | None = None

    def restart(self) -> None:
        """The next batch begins now."""
        self._last_end = self._now()
        self._paused_at = None

    def pause(self) -> None:
        """What follows (a validation run, say) is not training."""
        self._paused_at = self._now()

    def resume(self) -> None:
        """Training goes on."""
        if self._paused_at is not None:
            self._last_end += self._now() - self._paused_at
            self._paused_at = None

    def batch_ended(self, num_samples: int, num_tokens: int, model_flops: float = 0.0) -> Throughput:
        """A batch with these numbers of samples, tokens and operations has ended."""
        end = self._now()
        seconds, self._last_end = end - self._last_end, end
        return Throughput(1, seconds, num_samples, num_tokens, model_flops)
