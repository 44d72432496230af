"""Steps on tensor ranks: a ``Trainer`` with ``tensor_parallel_size`` beside ``parallelize_module`` in plain torch.

Both train the same blocks (attention with separate projections, a gated MLP) with AdamW over gloo, in the same
processes, and take turns. The plain loop has DTensors inside of modules and the styles that torch documents. The first
steps of each turn are not counted, and with them the check of the first batch.

    python benchmarks/steps/tensor.py                             # two and four processes
    python benchmarks/steps/tensor.py --width 64 --steps 5        # small, to see that it runs

Figures are medians of the turns' medians, of the slowest rank. On fewer cores than processes times say little; the CPU
time of the main thread says more. It runs Python, products and backward, and takes none while it waits for other ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy

_NUM_WARM = 2
Times = tuple[float, float]  # by the clock, and of the main thread's CPU
_COLUMNS, _ROWS = ("q", "k", "v", "up", "gate"), ("out", "down")


class Block(nn.Module):
    """A block of a Llama, with heads of 16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What the block makes of [rows, length, width]."""
        rows, length, _ = x.shape
        hidden = self.norm(x)
        q, k, v = (each(hidden).view(rows, length, -1, 16).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, -1))
        hidden = self.mlp_norm(x)
        added: Tensor = x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return added


class Module(L.LightningModule):
    """Blocks, and the mean square of what they return."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_blocks)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss."""
        loss: Tensor = self.blocks(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3, foreach=False)


class Clock(L.Callback):
    """When batches begin."""

    def __init__(self) -> None:
        self.times: list[Times] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Notes the time."""
        self.times.append((time.perf_counter(), time.thread_time()))


def trainer_ms(args: argparse.Namespace, data: Tensor) -> Times:
    """The median step of a fit with the strategy."""
    clock, size = Clock(), dist.get_world_size() if dist.is_initialized() else args.size
    trainer = L.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=PipelineParallelStrategy(1, 1, 1, tensor_parallel_size=size, schedule="1f1b"),
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(args.width, args.blocks), DataLoader(data, batch_size=args.rows))  # type: ignore[arg-type]
    return median_ms(clock.times)


def plain_ms(args: argparse.Namespace, data: Tensor) -> Times:
    """The median step of a loop with ``parallelize_module``."""
    module = Module(args.width, args.blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks:
        styles = {**{name: ColwiseParallel() for name in _COLUMNS}, **{name: RowwiseParallel() for name in _ROWS}}
        parallelize_module(block, mesh, styles)
    optimizer = module.configure_optimizers()
    times: list[Times] = []
    for batch in data.split(args.rows):  # type: ignore[no-untyped-call]
        times.append((time.perf_counter(), time.thread_time()))
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return median_ms(times)


def median_ms(times: list[Times]) -> Times:
    """Of the steps that count, in milliseconds."""
    steps = [(1e3 * (end[0] - start[0]), 1e3 * (end[1] - start[1])) for start, end in pairwise(times)][_NUM_WARM:]
    return statistics.median(wall for wall, _ in steps), statistics.median(cpu for _, cpu in steps)


def work(args: argparse.Namespace) -> None:
    """One rank: both take turns."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(args.rows * (args.steps + _NUM_WARM + 1), args.length, args.width, generator=generator)
    turns = [(*trainer_ms(args, data), *plain_ms(args, data)) for _ in range(args.turns)]
    mine = torch.tensor([statistics.median(column) for column in zip(*turns, strict=True)])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps(dict(zip(("trainer", "trainer_cpu", "plain", "plain_cpu"), mine.tolist(), strict=True))))


def main() -> None:
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 256), ("blocks", 4), ("rows", 8), ("length", 128), ("steps", 10), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.size:
        work(args)
        return
    print("| tensor ranks | Trainer, ms | parallelize_module, ms | by it | CPU, ms | CPU, ms | by it |")
    print("|---|---|---|---|---|---|---|")
    for size in args.sizes:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        done = subprocess.run(
            [*launch, *sys.argv, "--size", str(size)],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        by_clock = [(found[f"trainer{clock}"], found[f"plain{clock}"]) for clock in ("", "_cpu")]
        columns = " | ".join(f"{ours:.1f} | {plain:.1f} | {ours / plain:.3f}" for ours, plain in by_clock)
        print(f"| {size} | {columns} |")


if __name__ == "__main__":
    main()
