"""A trivial fit with one stage on one device beside a plain Trainer's, and the time of imports.

Run:
    python benchmarks/costs/one_stage.py [--check]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
import warnings

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_pp import PipelineParallelStrategy

TARGET = 1.2
IMPORTS = ("torch", "lightning.pytorch", "lightning_pp.strategy")


def seconds_of_fit(strategy: str | PipelineParallelStrategy) -> float:
    """A fit of four batches, without loggers, checkpoints and bars."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=1,
        limit_train_batches=4,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.perf_counter()
    trainer.fit(BoringModel())
    return time.perf_counter() - start


def compare_fits(num_fits: int) -> float:
    """Prints both medians, of fits in turns after three that warm up; returns their ratio."""
    plain, ours = [], []
    for _ in range(num_fits + 3):
        plain.append(seconds_of_fit("auto"))
        ours.append(seconds_of_fit(PipelineParallelStrategy(pipeline_parallel_size=1)))
    medians = [statistics.median(times[3:]) * 1e3 for times in (plain, ours)]
    print(f"plain Trainer {medians[0]:.2f} ms, one stage {medians[1]:.2f} ms: {medians[1] / medians[0]:.3f}")
    return medians[1] / medians[0]


def time_imports() -> None:
    """Prints for each import the median of three fresh processes."""
    for name in IMPORTS:
        code = f"import time; start = time.perf_counter(); import {name}; print(time.perf_counter() - start)"
        times = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
        print(f"import {name}: {statistics.median(times):.2f} s")


def main() -> None:
    """Both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=30, help="fits of each kind")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if one stage takes over {TARGET} times")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ratio = compare_fits(options.fits)
    time_imports()
    if options.check and ratio > TARGET:
        sys.exit(1)


if __name__ == "__main__":
    main()
