"""Imported last by the process that workers are forked from: two short trainings, which fill caches of torch.

Each fresh process would do so in its first training.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

before = os.environ.pop("PYTHONPATH", "").partition(os.pathsep)[2]  # as it was without the folder of this file
os.environ.update({"PYTHONPATH": before} if before else {})
sys.path.extend(sorted({str(path.parent) for path in Path(__file__).parent.rglob("*.py")}))


def warm() -> None:
    """On one device, and in the stages of a pipeline, without process groups, whose threads a fork would not have."""
    import transformers_by_hand
    from one_process import compare
    from parity_run import Settings, train

    train(Settings("demo_transformer", num_samples=1, num_val_samples=1, max_epochs=1))
    compare(transformers_by_hand.gpt2, transformers_by_hand.batches_of("gpt2", (3, 2)), 2, splits_backward=True)


if not torch.cuda.device_count():  # backward would start threads for them
    warm()
