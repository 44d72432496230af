"""Memory of setting up models that no process holds whole: a 7B Llama by accounting, a smaller one in real memory.

::

    python benchmarks/memory/large_models.py [plan] [meta] [load]

``plan``: a Llama with 32 layers of width 4096 is made on the meta device and cut by the strategy in each of 4
processes: the bytes that each rank would hold, and the memory that the process took to find out.
``meta``: a Llama of 1.2 GiB with 44 layers is set up by the Trainer in 4 processes under ``meta_init``, in each layout.
``load``: the same, and then filled from one safetensors file with all of it (``initial_weights``).

For the latter two, the figure is the peak of a process's memory from before the model exists to the end of the set-up,
above what the process had after training a small model in the same way, over the bytes of the parameters that it owns.
No optimizer has made its states yet. Memory is the anonymous part (``RssAnon``), sampled every millisecond: the pages
of a mapped file belong to the system's cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

PARTS = ("plan", "meta", "load")
NUM_PROCESSES = 4
LLAMA_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
LLAMA_REAL = {"hidden_size": 768, "num_hidden_layers": 44, "num_attention_heads": 8, "intermediate_size": 2048}
LLAMA_TINY = {"hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 2, "intermediate_size": 64}
VOCABULARY = {"7b": 32000, "real": 4096, "tiny": 512}
Layout = tuple[int, int, Literal["replicate", "full_shard"]]
"""Pipeline and data-parallel ranks, and sharding."""
LAYOUTS: tuple[Layout, ...] = ((4, 1, "replicate"), (1, 4, "replicate"), (2, 2, "full_shard"), (1, 4, "full_shard"))
MIB = 2**20


class PeakMemory:
    """Samples the anonymous memory of this process."""

    def __init__(self) -> None:
        self.before = self.peak = self.now()
        self._stop = threading.Event()

    @staticmethod
    def now() -> int:
        """Bytes of anonymous memory."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    @property
    def added(self) -> int:
        """Bytes of the peak above the start."""
        return self.peak - self.before

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, self.now())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Samples within."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def make_module(config: dict[str, int], vocabulary: int) -> Any:
    """A causal language model that is built in ``configure_model``."""
    from lightning_pp.recipes.causal_lm import CausalLM

    return CausalLM("llama", {**config, "vocab_size": vocabulary, "max_position_embeddings": 2048})


def batch_of(vocabulary: int, num_samples: int) -> dict[str, Any]:
    """Token ids [B, 16]."""
    import torch

    return {"input_ids": torch.randint(vocabulary, (num_samples, 16))}


def bytes_of(module: Any) -> int:
    """Bytes of this process's part of the parameters in a module."""
    parts = [getattr(p, "_local_tensor", p) for p in module.parameters()]
    return sum(part.numel() * part.element_size() for part in parts)


def plan() -> dict[str, float]:
    """Cuts the 7B model, and lets go of what this rank does not own."""
    import torch
    import torch.distributed as dist
    from lightning.pytorch.plugins.precision import Precision

    from lightning_pp.planning.stage_model import assign_stages, record_model
    from lightning_pp.schedule import Placement
    from lightning_pp.split.cut.partition import partition_units
    from lightning_pp.strategy.step.dry_steps import recorded_step

    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")

    def cut(config: dict[str, int], vocabulary: int) -> tuple[int, int]:
        with torch.device("meta"):
            module = make_module(config, vocabulary)
            module.configure_model()
        whole = bytes_of(module)
        step = recorded_step(module, "training_step", batch_of(vocabulary, 1), [0], precision=Precision(), trains=True)
        recording = record_model(
            module, device=device, step=step, with_gradients=True, patterns=None, num_stages=NUM_PROCESSES
        )
        placement = Placement.interleaved(NUM_PROCESSES)
        partition = partition_units(recording.record, placement=placement, num_parameters=recording.num_parameters)
        split = assign_stages(recording, placement=placement, partition=partition)
        split.fake_parameters.release(split.owned_by(rank))
        assert all(parameter.is_meta for parameter in module.parameters())
        return whole, bytes_of(module)

    cut(LLAMA_TINY, VOCABULARY["tiny"])
    memory = PeakMemory()
    with memory.watching():
        whole, own = cut(LLAMA_7B, VOCABULARY["7b"])
    dist.destroy_process_group()
    return {"whole_bytes": whole, "own_bytes": own, "added_bytes": memory.added}


def set_up(
    config: dict[str, int],
    vocabulary: int,
    layout: Layout,
    *,
    weights: str | None = None,
    steps: int = 0,
) -> Any:
    """Has a Trainer set the strategy up, and train some steps; returns the module with what this rank owns."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    from lightning_pp import PipelineParallelStrategy

    pl.seed_everything(1, verbose=False)
    module = make_module(config, vocabulary)
    pipeline, replicas, sharding = layout
    strategy = PipelineParallelStrategy(
        pipeline, replicas, num_microbatches=4, sharding=sharding, meta_init=True, initial_weights=weights
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_PROCESSES,
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.StackDataset(**batch_of(vocabulary, 4 * replicas))
    trainer.fit(module, DataLoader(data, batch_size=4))
    return module


def in_real_memory(layout: Layout, weights: str | None = None, config: dict[str, int] = LLAMA_REAL) -> dict[str, float]:
    """Sets the smaller model up."""
    from lightning_pp.sharding.units.host_memory import return_freed_memory

    set_up(LLAMA_TINY, VOCABULARY["tiny"], layout, steps=1)
    gc.collect()
    return_freed_memory()  # which would otherwise be used again without being counted
    memory = PeakMemory()
    with memory.watching():
        module = set_up(config, VOCABULARY["real"], layout, weights=weights)
    return {"own_bytes": bytes_of(module), "added_bytes": memory.added}


def write_whole(path: Path) -> None:
    """A safetensors file with all of the smaller model's weights."""
    import torch

    from lightning_pp.checkpoint.storage.safetensors_file import write_safetensors

    with torch.device("meta"):
        module = make_module(LLAMA_REAL, VOCABULARY["real"])
        module.configure_model()
    specs = {name: (tuple(value.shape), value.dtype) for name, value in module.model.state_dict().items()}
    write_safetensors(path, specs, lambda name: torch.randn(specs[name][0]) * 0.02, {"format": "pt"})


def launch(what: str, *arguments: str) -> list[dict[str, float]]:
    """Runs this file in every process; their figures by rank."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(NUM_PROCESSES):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_PROCESSES, "LOCAL_WORLD_SIZE": NUM_PROCESSES}
        environment = {**places, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment["TORCHELASTIC_RUN_ID"] = port
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, "--process", what, *arguments],
                env={**os.environ, **{key: str(value) for key, value in environment.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if rank else None,
                text=True,
            )
        )
    figures = []
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{what}: a process ended with {process.returncode}")
        figures.append(json.loads(output.splitlines()[-1]))
    return figures


def report(what: str, figures: list[dict[str, float]]) -> None:
    """Prints a line for each rank."""
    for rank, figure in enumerate(figures):
        own, added = figure["own_bytes"], figure["added_bytes"]
        line = f"{what} rank {rank}: owns {own / MIB:8.1f} MiB, peak memory added {added / MIB:7.1f} MiB"
        if what == "plan":
            whole = figure["whole_bytes"]
            print(f"{line}; {own / whole:.3f} of {whole / MIB:.0f} MiB")
        else:
            print(f"{line}; ratio {added / own:.3f}")


def _part(name: str) -> str:
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PARTS)}")
    return name


def main() -> None:
    """Runs what the command line names, or everything."""
    if sys.argv[1:2] == ["--process"]:
        what, *arguments = sys.argv[2:]
        weights = arguments[1] if len(arguments) > 1 else None
        figure = plan() if what == "plan" else in_real_memory(LAYOUTS[int(arguments[0])], weights)
        print(json.dumps(figure))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # not choices=, which Python before 3.12 holds against an empty list
    parser.add_argument("parts", nargs="*", type=_part, metavar="part", help=f"{', '.join(PARTS)}; by default all")
    for what in parser.parse_args().parts or PARTS:
        if what == "plan":
            report(what, launch(what))
            continue
        with tempfile.TemporaryDirectory() as folder:
            files = []
            if what == "load":
                files = [str(Path(folder) / "model.safetensors")]
                write_whole(Path(files[0]))
            for index, (pipeline, replicas, sharding) in enumerate(LAYOUTS):
                report(f"{what} {pipeline}x{replicas} {sharding:10}", launch(what, str(index), *files))


if __name__ == "__main__":
    main()
