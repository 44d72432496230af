"""The user's own training on one device and as a pipeline of CPU processes, compared value by value."""

from __future__ import annotations

from lightning_pp.verification.comparison import Difference
from lightning_pp.verification.verify import Verification, verify

__all__ = ["Difference", "Verification", "verify"]
