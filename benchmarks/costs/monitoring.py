"""What the monitor costs with all but profiles: a training in which blocks of steps with and without it take turns.

    OMP_NUM_THREADS=1 python benchmarks/costs/monitoring.py [--check]
    OMP_NUM_THREADS=1 python benchmarks/costs/monitoring.py --blocks 12 --steps 100 --every 50 --check  # 5 minutes
    OMP_NUM_THREADS=1 python benchmarks/costs/monitoring.py --sleep-ms 1.2 --dim 16 --steps 100 --every 50 --check

With --sleep-ms each block of the model sleeps that long in its forward and twice that in its backward, as a host that
waits for its device. Such a step takes nearly the same time always, where one that computes on shared cores does not:
a few tenths of a per cent can be told.

Both kinds of blocks run in the same two processes, within seconds of each other, so that whatever else a machine does
slows down both. With it means: actions and collectives are timed, norms of gradients taken, numbers gathered and
logged to CSV, TensorBoard and an offline run of W&B, timelines written, steps diagnosed. The time of a block is that of
all its steps, loggings and pages included, and each is compared with the mean of the blocks before and after it; what
is judged is the median of these differences. Beside it stands the processor time of rank 0, which does most of it: that
says something on a busy machine too. The first blocks of either kind, where a fit also diagnoses, are left out.
None is begun after --seconds.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, autograd, nn

from lightning_pp import PipelineMonitor, PipelineParallelStrategy, PipelineWandbLogger
from lightning_pp.recipes.byte_gpt import ByteGPT
from lightning_pp.recipes.byte_text import ByteTextDataModule

TARGET = 0.01
WARM_UP_BLOCKS = 2


class _SleepInBackward(autograd.Function):
    """The identity; its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        time.sleep(ctx.seconds)
        return grad_outputs[0], None


class Sleeping(nn.Module):
    """A block on a device that takes a known time.

    Args:
        block: Maps a tensor to one of its shape.
        seconds: What its forward takes besides; its backward takes twice that.
    """

    def __init__(self, block: nn.Module, seconds: float) -> None:
        super().__init__()
        self.block = block
        self.seconds = seconds

    def forward(self, tensor: Tensor) -> Tensor:
        """The block's output, later."""
        time.sleep(self.seconds)
        output: Tensor = _SleepInBackward.apply(self.block(tensor), 2 * self.seconds)  # type: ignore[no-untyped-call]
        return output


class InTurns(PipelineMonitor):
    """A monitor that looks away in every second block of steps."""

    def __init__(self, steps_of_block: int, every_n_steps: int, most_seconds: float) -> None:
        super().__init__(every_n_steps, timeline_every_n_steps=2 * steps_of_block)
        self.steps_of_block = steps_of_block
        self.ends_at = time.perf_counter() + most_seconds
        self.times: list[tuple[float, float]] = []
        self._num_steps = 0
        self._last = (0.0, 0.0)

    @property
    def is_on(self) -> bool:
        """Whether the step under way is one of a block that is looked at."""
        return bool(self._num_steps // self.steps_of_block % 2)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins a block where it is time to."""
        if self._num_steps % self.steps_of_block == 0:
            trainer.strategy.barrier()
            trainer.strategy.engine.is_timed = self.is_on
            now = (time.perf_counter(), time.process_time())
            self.times.append((now[0] - self._last[0], now[1] - self._last[1]))
            self._last = now
            if self.is_on and trainer.strategy.broadcast(time.perf_counter() > self.ends_at):
                trainer.should_stop = True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Looks at the gradients, or not."""
        if self.is_on:
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Collects and logs, or not."""
        if self.is_on:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._num_steps += 1


def main() -> None:
    """Trains, and prints what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--every", type=int, default=10, help="steps between two loggings")
    parser.add_argument("--dim", type=int, default=128, help="width of the model of 8 blocks")
    parser.add_argument("--sleep-ms", type=float, default=0.0, help="what a block sleeps in its forward")
    parser.add_argument("--seconds", type=float, default=240.0, help="no block with it is begun later than this")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if it costs over {TARGET:.0%}")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_utilities.core.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ["WANDB_SILENT"] = "true"
    monitor = InTurns(options.steps, options.every, options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        loggers = [
            CSVLogger(folder),
            TensorBoardLogger(folder),
            PipelineWandbLogger(folder, offline=True, project="monitoring"),
        ]
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=PipelineParallelStrategy(2, num_microbatches=8),
            max_steps=(2 * options.blocks + 1 + WARM_UP_BLOCKS) * options.steps + 1,
            logger=loggers,
            callbacks=[monitor],
            log_every_n_steps=10**9,
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = ByteGPT(dim=options.dim)
        if options.sleep_ms:
            model.blocks = nn.ModuleList(Sleeping(block, options.sleep_ms / 1e3) for block in model.blocks)
        trainer.fit(model, ByteTextDataModule())
        if trainer.is_global_zero:
            import wandb

            wandb.finish()
    if trainer.is_global_zero and not show(monitor.times, options.steps) and options.check:
        sys.exit(1)


def show(times: list[tuple[float, float]], num_steps: int) -> bool:
    """Prints two lines; returns whether the target is met.

    Args:
        times: Of blocks: wall and processor time, seconds; the first is that of what came before any.
        num_steps: Steps of a block.
    """
    costs = {}
    for index, kind in enumerate(("wall", "processor")):
        blocks = [block[index] for block in times[1 + WARM_UP_BLOCKS :]]  # one more without it than with it
        pairs = [((before + after) / 2, on) for before, on, after in zip(blocks, blocks[1:], blocks[2:], strict=False)]
        pairs = pairs[0::2]
        if not pairs:
            sys.exit("No block with the monitor ended between two without it: give it more --seconds or fewer --steps.")
        off, on = (statistics.median(some) / num_steps * 1e3 for some in zip(*pairs, strict=True))
        found = sorted(with_it / without - 1.0 for without, with_it in pairs)
        costs[kind] = statistics.median(found)
        quarters = [found[len(found) // 4], found[-1 - len(found) // 4]]
        print(
            f"{kind} time: off {off:.1f} ms a step, on {on:.1f} ms; on costs {costs[kind]:+.2%}, half of {len(pairs)} "
            f"blocks of {num_steps} steps from {quarters[0]:+.1%} to {quarters[1]:+.1%}"
        )
    return costs["wall"] <= TARGET


if __name__ == "__main__":
    main()
