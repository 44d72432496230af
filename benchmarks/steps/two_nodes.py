"""A pipeline across two emulated nodes: the step that measured costs predict, beside the step that is measured.

    python benchmarks/steps/two_nodes.py

Two network namespaces stand for nodes, each with a ``torchrun`` of its own and two processes; between them is a link
with a latency and a bandwidth (``emulated_link.py``; needs root). A LightningModule of eight blocks that sleep a given
time in each of F, I and W, so that two cores stand for four devices, is trained by the strategy: with ``1f1b`` as four
stages, with ``zb_v`` as eight. What is sent between stages is a tensor of a given size for each microbatch.

The strategy measures the stages and the messages between them in the first batches, as it does for ``schedule="auto"``
and ``save_costs=``. The predicted step is the simulation of the program with these costs, the longest span of a rank.
The measured step is the time from one batch's end to the next's, the median over the batches after those, of the
slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from emulated_link import ADDRESSES, DEVICE, TwoNodes
from emulated_runs import SLEEPS, WIDTH, Block, DelayedBlock, sleep_precisely
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.schedule import StageCosts, build_schedule

PER_NODE = 2
NUM_BLOCKS = 8
NUM_MICROBATCHES = 8
NUM_STEPS = 16
FIRST_STEP = 8  # two warm up, three are measured, and in the next the links are
# Gbit/s and ms of latency: a node's wire, a slow one, one between sites
SPEEDS = [(1.0, 0.5), (0.3, 5.0), (0.1, 20.0)]
TIMEOUT_S = 240.0


class Sleeping(pl.LightningModule):
    """Blocks that sleep in F, I and W."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[block() for _ in range(NUM_BLOCKS)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch ``[B, rows, WIDTH]``."""
        output: Tensor = self.blocks(batch[0])
        return output.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Ends(pl.Callback):
    """Notes when batches end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """One more."""
        self.times.append(time.perf_counter())


def run_rank(folder: Path, name: str, ms: float, kib: int) -> None:
    """One process: trains, and writes the milliseconds from batch to batch; rank 0 also the measured costs."""
    torch.set_num_threads(1)
    sleep_precisely()
    pl.seed_everything(0)  # all ranks of a pipeline load the same batches
    SLEEPS.seconds = ms / 1e3
    rows = kib * 1024 // (4 * WIDTH)
    # W apart needs blocks that keep it back
    module = Sleeping(Block if name == "1f1b" else DelayedBlock)
    strategy = PipelineParallelStrategy(
        schedule=name, num_microbatches=NUM_MICROBATCHES, units=["blocks.*"], save_costs=folder / "costs.json",
        num_profiled_batches=3,
    )  # fmt: skip
    ends = Ends()
    trainer = pl.Trainer(
        accelerator="cpu", devices=PER_NODE, num_nodes=2, strategy=strategy, callbacks=[ends], max_steps=NUM_STEPS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(torch.randn(NUM_STEPS * NUM_MICROBATCHES, rows, WIDTH))
    trainer.fit(module, DataLoader(data, batch_size=NUM_MICROBATCHES))
    periods = [1e3 * (end - start) for start, end in zip(ends.times, ends.times[1:], strict=False)]
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(periods))


def run(nodes: TwoNodes, folder: Path, name: str, ms: float, kib: int) -> dict[str, Any]:
    """Trains on the nodes; returns predicted and measured steps, milliseconds.

    Raises:
        RuntimeError: A node's torchrun failed, or took longer than four minutes.
    """
    folder.mkdir()
    command = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(PER_NODE)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-id", folder.name]
    script = [__file__, "--rank-in", str(folder), "--schedules", name, "--ms", str(ms), "--kib", str(kib)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
    agents = []
    for number, (node, address) in enumerate(zip(nodes.names, ADDRESSES, strict=True)):
        # both have the name of this machine, by which torchrun would look for the node that serves
        inside = ["ip", "netns", "exec", node, sys.executable, *command, "--local-addr", address]
        inside += ["--rdzv-conf", f"is_host={int(number == 0)}", *script]
        with (folder / f"{address}.log").open("w") as log:
            agents.append(subprocess.Popen(inside, env=environment, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and None in (codes := [agent.poll() for agent in agents]) and not any(codes):
        time.sleep(0.1)
    for agent in agents:
        agent.terminate()  # torchrun ends its processes
        agent.wait()
    if any(code != 0 for code in codes):
        raise RuntimeError("\n".join((folder / f"{address}.log").read_text()[-20000:] for address in ADDRESSES))
    costs = StageCosts.from_json(folder / "costs.json")
    num_ranks = 2 * PER_NODE
    program = build_schedule(name, num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text())[FIRST_STEP:] for rank in range(num_ranks)]
    return {
        "schedule": name,
        "p2p_ms": costs.p2p,
        "p2p_back_ms": costs.p2p_back,
        "predicted_ms": max(program.simulate(costs).span_ms),
        "measured_ms": max(statistics.median(periods) for periods in ranks),
        "steps_ms": ranks,
    }


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ms", type=float, default=10.0, help="a block's F, I and W, each")
    parser.add_argument("--kib", type=int, default=512, help="what is sent between stages for a microbatch")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_v"])
    parser.add_argument(
        "--speeds", nargs="+", metavar="GBIT/MS", help="bandwidths and latencies, such as 1/0.5", default=None
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_in is not None:
        run_rank(asked.rank_in, asked.schedules[0], asked.ms, asked.kib)
        return
    speeds = [tuple(map(float, text.split("/"))) for text in asked.speeds] if asked.speeds else SPEEDS
    print("| link, one way | schedule | a message across, ms | step predicted, ms | measured, ms | by predicted |")
    print(f"|{'---|' * 6}")
    rows = []
    for gbit_per_s, latency_ms in speeds:
        with TwoNodes(gbit_per_s, latency_ms) as nodes, tempfile.TemporaryDirectory() as folder:
            for name in asked.schedules:
                row = run(nodes, Path(folder) / name, name, asked.ms, asked.kib)
                rows.append(row | {"gbit_per_s": gbit_per_s, "latency_ms": latency_ms})
                print(
                    f"| {gbit_per_s:g} Gbit/s, {latency_ms:g} ms | {name} | {max(row['p2p_ms']):.1f} "
                    f"| {row['predicted_ms']:.0f} | {row['measured_ms']:.0f} "
                    f"| {row['measured_ms'] / row['predicted_ms']:.3f} |",
                    flush=True,
                )
    if asked.json:
        asked.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
