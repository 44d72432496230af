"""Jobs whose ranks fail: processes forked from one that has imported everything, so that each job starts at once.

Run as a program, with a job as its argument, it is one of that job's ranks, whoever has started it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_pp import PipelineParallelStrategy
from lightning_pp.runtime.transport.channels import Transport
from lightning_pp.sharding.stages import ShardedStages
from lightning_pp.strategy.lightning import mesh_strategy

BATCH = 3
_LONGEST_S = 150.0  # a run that does not end, on a host that is busy


def _exhaust() -> None:
    raise MemoryError("cannot allocate 80 GiB")


def _loop() -> None:
    while True:
        time.sleep(0.05)


def _signal_soon() -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()


def _fail() -> None:
    raise ValueError("the user's own error")


FAULTS: dict[str, Callable[[], Any]] = {
    "exception": _fail,
    "memory": _exhaust,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit(0)": lambda: sys.exit(0),
    "loop": _loop,
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "barrier": dist.barrier,
    "pause": lambda: time.sleep(2.5),
    "barrier and SIGTERM": lambda: (_signal_soon(), dist.barrier()),
    "loop and SIGTERM": lambda: (_signal_soon(), _loop()),
}


class Samples(Dataset[Tensor]):
    def __init__(self, job: Job) -> None:
        self.job = job

    def __len__(self) -> int:
        is_short = self.job.fault == "short data" and int(os.environ["FAULT_RANK"]) == self.job.rank
        return 32 if is_short else 64

    def __getitem__(self, index: int) -> Tensor:
        if index >= 8 * BATCH:
            if (self.job.fault, self.job.place) == ("NaN", "loading"):  # all ranks of a pipeline read the same
                return torch.full((6,), float("nan"))
            self.job.reached("loading")
        return torch.full((6,), 1.0 + index / 64)


class GradientFault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reached: Callable[[], float]) -> Tensor:
        ctx.reached = reached
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.reached(), None


class DelayedGradients(nn.Module):
    """Is called where weight gradients are computed."""

    def __init__(self, reached: Callable[[], Any]) -> None:
        super().__init__()
        self.backward_dw = reached

    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(nn.Module):
    def __init__(self, reached: Callable[[str], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.delayed = DelayedGradients(lambda: reached("weight gradient"))
        self.reached = reached

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.reached("forward")
        x = GradientFault.apply(x, lambda: self.reached("backward"))
        return x + torch.tanh(self.delayed(self.linear(x)))


class Job(L.LightningModule):
    """Reaches every place where something can fail, and fails at one of them, on one rank."""

    def __init__(self, fault: str, place: str, rank: int) -> None:
        super().__init__()
        self.fault, self.place, self.rank = fault, place, rank
        self.blocks = nn.Sequential(*(Block(self.reached_in_batch) for _ in range(8)))
        self.runs = False

    def at_batch(self) -> bool:
        return self.runs and self.trainer.training and self.trainer.global_step == BATCH

    def reached_in_batch(self, place: str) -> float:
        """By what the numbers that are at ``place`` are multiplied, if the rank comes to go on."""
        return self.reached(place) if self.at_batch() else 1.0

    def reached(self, place: str) -> float:
        if self.place != place or int(os.environ["FAULT_RANK"]) != self.rank:
            return 1.0
        Path(os.environ["FAULT_FILE"]).write_text(repr(time.time()))
        if self.fault != "NaN":
            FAULTS[self.fault]()
        elif place not in ("forward", "backward"):
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.fill_(float("nan"))
        return float("nan") if self.fault == "NaN" else 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.runs:
            self.reached("dry run")
        elif not torch.is_grad_enabled():
            self.reached("check")
        return self.blocks(batch).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.blocks(batch).pow(2).mean())

    def configure_optimizers(self) -> Any:
        self.reached("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        self.runs = True

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.at_batch():
            self.reached("optimizer")

    def on_validation_batch_end(self, *_: Any) -> None:
        self.reached("validation")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.reached("saving")


class FaultyCallback(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == BATCH:
            module.reached("callback")


def fail_within_the_runtime(module: Job) -> None:
    """Has the module's fault happen after a message is sent, or where the reduction of a stage's gradients begins."""

    def send(transport: Transport, *args: Any) -> None:
        sends(transport, *args)
        module.reached_in_batch("send")

    def reduce(stages: ShardedStages, *args: Any) -> None:
        module.reached_in_batch("reduce")
        reduces(stages, *args)

    sends, reduces = Transport.send, ShardedStages.reduce
    Transport.send, ShardedStages.reduce = send, reduce  # type: ignore[method-assign]


def let_waits_last() -> None:
    """No wait of this process raises, as over NCCL: every group has half an hour, whatever the strategy's time-out."""

    def new_group(*args: Any, timeout: Any = None, **kwargs: Any) -> Any:
        return makes(*args, timeout=timedelta(minutes=30), **kwargs)

    makes, dist.new_group = dist.new_group, new_group
    mesh_strategy.set_timeout = lambda *_: None  # type: ignore[assignment]


def strategy_of(job: dict[str, Any]) -> Strategy:
    """Lightning's own data parallelism for a job without a pipeline."""
    schedule, pipeline, replicas = job["layout"]
    timeout = timedelta(seconds=job["timeout"])
    if pipeline == 1:
        return DDPStrategy(timeout=timeout)
    return PipelineParallelStrategy(
        pipeline, replicas, 2, schedule=schedule, timeout=timeout, **job.get("strategy", {})
    )


def run_rank(job: dict[str, Any], rank: int, num_ranks: int, port: int, folder: Path) -> None:
    """The life of one rank, in a process of its own."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="job",
        FAULT_RANK=str(rank),
    )  # fmt: skip
    time.sleep(job.get("late", 0.0) * rank)
    train(job, num_ranks, folder)


def train(job: dict[str, Any], num_ranks: int, folder: Path) -> None:
    """What the user's script does."""
    os.environ["FAULT_FILE"] = str(folder / "fault.txt")
    if job.get("waits_for_ever"):
        let_waits_last()
    torch.manual_seed(5)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy_of(job),
        max_epochs=1,
        num_sanity_val_steps=0,
        val_check_interval=6,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[FaultyCallback()],
        default_root_dir=folder,
    )
    module = Job(job["fault"], job["place"], job["rank"])
    fail_within_the_runtime(module)
    trainer.fit(
        module,
        DataLoader(Samples(module), 4, num_workers=job.get("workers", 0)),
        DataLoader(Samples(Job("none", "none", -1)), 4),
    )


def fork_rank(job: dict[str, Any], rank: int, num_ranks: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 0
    try:
        run_rank(job, rank, num_ranks, port, folder)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:  # as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_job(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Exit codes, seconds to the last process's end from the first's and from the fault, and what each has printed."""
    _, pipeline, replicas = job["layout"]
    num_ranks = pipeline * replicas
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    waiting = {fork_rank(job, rank, num_ranks, port, folder): rank for rank in range(num_ranks)}
    codes: dict[int, int] = {}
    ends: list[float] = []
    deadline = time.monotonic() + job.get("longest", _LONGEST_S)
    while waiting and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.02)
            continue
        codes[waiting.pop(pid)] = os.waitstatus_to_exitcode(status)
        ends.append(time.monotonic())
    left, ended = sorted(waiting.values()), time.time()
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    texts = [(folder / f"{rank}.txt").read_text() for rank in range(num_ranks)]
    took = ends[-1] - ends[0] if ends else _LONGEST_S
    fault = folder / "fault.txt"
    since_fault = ended - float(fault.read_text()) if fault.exists() else None
    codes_by_rank = [codes.get(rank) for rank in range(num_ranks)]
    return {"codes": codes_by_rank, "left": left, "took": took, "since_fault": since_fault, "texts": texts}


def run_script(job: dict[str, Any]) -> None:
    """One rank that a launcher has started, which prints to a file of its own."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
    os.environ["FAULT_RANK"] = rank
    folder = Path(job["folder"])
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    _, pipeline, replicas = job["layout"]
    train(job, pipeline * replicas, folder)


def serve(connection: Connection) -> None:
    """Runs the jobs that come through ``connection``, which is closed after the last."""
    from pool_worker import freeze  # a rank that a launcher has started does not find it

    multiprocessing.set_start_method("fork", force=True)  # as in a user's process, for workers of loaders
    torch.set_num_threads(1)
    freeze()
    while True:
        try:
            job, folder = connection.recv()
        except EOFError:
            return
        connection.send(run_job(job, folder))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_script(json.loads(sys.argv[1]))
