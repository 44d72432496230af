"""Imported last by the process that workers are forked from, for what each training in them would take time for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from pool_worker import freeze

first, _, others = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
if first == str(Path(__file__).parent):  # put there for this file to be found
    del os.environ["PYTHONPATH"]
    os.environ.update({"PYTHONPATH": others} if others else {})
sys.path.extend(sorted({str(path.parent) for path in Path(__file__).parent.rglob("*.py")}))


def warm() -> None:
    """Two short trainings fill caches of torch: on one device, and in the stages of a pipeline. So does a compilation.

    A fork would not have the threads of process groups, nor that of a progress bar.
    """
    import transformers_by_hand
    from one_process import compare
    from parity_run import Settings, train
    from pool_worker import remember_entry_points
    from tqdm import tqdm

    remember_entry_points()
    train(Settings("demo_transformer", num_samples=1, num_val_samples=1, max_epochs=1))
    compare(transformers_by_hand.gpt2, transformers_by_hand.batches_of("gpt2", (3, 2)), 2, splits_backward=True)
    tqdm.monitor_interval = 0
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="aot_eager")
    compiled(torch.ones(1, 2)).sum().backward()
    torch._dynamo.reset()


if not torch.cuda.device_count():  # backward would start threads for them
    warm()
freeze()  # what all processes have from here need not be looked through in any of them
