"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import settings

# A loaded machine may stop a process for longer than any deadline.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
