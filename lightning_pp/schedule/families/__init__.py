"""The families of schedules, one file each; importing this package registers them all."""

from __future__ import annotations

from lightning_pp.schedule.families import gpipe, one_f_one_b, zb_h

__all__ = ["gpipe", "one_f_one_b", "zb_h"]
