"""What the fingerprint of a batch costs: microseconds a batch, beside torch's hash and a copy of the batch.

    OMP_NUM_THREADS=1 python benchmarks/costs/updates/fingerprints.py

Every rank of a pipeline takes it of every batch, on the host where the batch comes from there. ``torch.hash_tensor``
reads everything as well, and does not see that two elements have changed places.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pp.distributed.fingerprints import fingerprint
from lightning_pp.split.data.tree import tensors_of


def batches() -> dict[str, Any]:
    """Batches of the usual sizes."""
    tokens = {name: torch.randint(0, 50_000, (16, 2048)) for name in ("input_ids", "attention_mask", "labels")}
    images = [torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))]
    return {
        "256 rows of 32 floats": [torch.randn(256, 32), torch.randn(256)],
        "16 x 2048 tokens, mask, labels": tokens,
        "64 images of 3 x 224 x 224": images,
    }


def hashes(tensors: Sequence[Tensor]) -> list[float]:
    """Torch's hash of each tensor."""
    return [torch.hash_tensor(tensor).item() for tensor in tensors]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each tensor."""
    return [tensor.clone() for tensor in tensors]


def microseconds(function: Callable[[], Any], repeats: int = 30) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def main() -> None:
    """Prints a table."""
    print(f"{'batch':32} {'MiB':>6} {'whole µs':>9} {'a part µs':>9} {'hash_tensor µs':>14} {'clone µs':>9}")
    for name, batch in batches().items():
        tensors = tensors_of(batch)
        columns = (
            microseconds(partial(fingerprint, batch)),
            microseconds(partial(fingerprint, batch, part=3)),
            microseconds(partial(hashes, tensors)),
            microseconds(partial(copies, tensors)),
        )
        size = sum(tensor.nbytes for tensor in tensors) / 2**20
        print(f"{name:32} {size:6.2f} {columns[0]:9.0f} {columns[1]:9.0f} {columns[2]:14.0f} {columns[3]:9.0f}")


if __name__ == "__main__":
    main()
