"""Search for schedules: greedy construction, improvement, and ``auto``, which uses both."""

from __future__ import annotations
