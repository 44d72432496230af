"""``python -m lightning_pp.doctor``, and ``torchrun ... -m lightning_pp.doctor``."""

from __future__ import annotations

import sys

from lightning_pp.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
