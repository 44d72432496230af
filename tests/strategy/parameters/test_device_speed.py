"""What is known of the speed of a device."""

from __future__ import annotations

import pytest
import torch

from lightning_pp.strategy.parameters import device_speed


def test_a_device_that_lightnings_table_trips_over_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a GeForce RTX whose name has no number."""

    def trips(device: torch.device, dtype: torch.dtype) -> int:
        raise IndexError("list index out of range")

    monkeypatch.setattr(device_speed, "get_available_flops", trips)
    assert device_speed.peak_flops_of(torch.device("cuda", 0), torch.bfloat16) is None
