"""What it costs to look at gradients before an update, or to copy what it changes: milliseconds, beside the update.

    OMP_NUM_THREADS=1 python benchmarks/costs/updates/finite.py

``on_nonfinite="error"`` and ``"skip"`` read every gradient of a rank once for each update, unless gradients are clipped
by norm. On a GPU the host waits for the device to know the answer. What a training runs is compared: blocks of a
transformer, the tokens of a batch, AdamW. ``post_validation=True`` copies parameters, gradients and states before each
update.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_pp.sharding.gradients.finite import are_finite
from lightning_pp.sharding.gradients.undo_update import UndoableUpdate

FEATURES, BLOCKS, ROWS, TOKENS = 256, 4, 4, 128


def milliseconds(function: Callable[[], Any], repeats: int = 15) -> float:
    """Median time of a call, with what it has a device do."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Prints a table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = [
        nn.TransformerEncoderLayer(FEATURES, 4, 4 * FEATURES, dropout=0.0, batch_first=True) for _ in range(BLOCKS)
    ]
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(ROWS, TOKENS, FEATURES, device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    step()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    whole, update = milliseconds(step), milliseconds(optimizer.step)
    look, undoable = milliseconds(lambda: are_finite(gradients)), UndoableUpdate()
    copies = milliseconds(lambda: undoable.begin(optimizer))
    size = sum(gradient.nbytes for gradient in gradients) / 2**20
    print(f"gradients {size:.1f} MiB on {device.type}: look {look:.2f} ms, AdamW {update:.1f} ms, step {whole:.1f} ms")
    print(f"the look is {100 * look / (whole + update):.2f} % of a step with its update")
    print(f"copies {copies:.1f} ms, {100 * copies / (whole + update):.2f} % of a step with its update")


if __name__ == "__main__":
    main()
