"""Search for schedules: greedy construction, improvement, an exact solver, and ``auto``, which uses them all."""

from __future__ import annotations
