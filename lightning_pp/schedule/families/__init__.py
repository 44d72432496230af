"""The families of schedules, one file each; importing this package registers them all."""

from __future__ import annotations

from lightning_pp.schedule.families import dualpipe_v, gpipe, one_f_one_b, v_min_half, zb_v

__all__ = ["dualpipe_v", "gpipe", "one_f_one_b", "v_min_half", "zb_v"]
