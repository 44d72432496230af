"""``python -m lightning_pp``, and ``torchrun ... -m lightning_pp``."""

from __future__ import annotations

from lightning_pp.cli import main

if __name__ == "__main__":
    main()
