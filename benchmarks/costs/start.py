"""Time from the start of a command to the end of its first batch: plain Lightning, DDP of two, a pipeline of two.

Beside the wall time stands the processor time of both processes together.
Every run is a command of its own, which imports what its way needs: plain Lightning and DDP do not import this package,
which is compiled to bytecode first, as an installation does. The machine has to be idle. What a pipeline may take more
than DDP is ``TARGET``.

Run:
    python benchmarks/costs/start.py [--models gpt llama ...] [--runs 5] [--check]
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

TARGET = 1.0
WAYS = ("plain", "ddp", "pipeline")
MODELS = ("mlp", "gpt", "llama", "vit", "t5")
_BEGUN = "START_BENCHMARK_BEGUN"
_TOLD = "first batch ended after"


def run_one(name: str, way: str) -> None:
    """One training of a batch, in this process and those that Lightning starts; each tells its times."""
    import lightning.pytorch as L
    import torch
    from torch.utils.data import DataLoader

    strategy: Any = {"plain": "auto", "ddp": "ddp"}.get(way)
    if way == "pipeline":
        from lightning_pp import PipelineParallelStrategy

        strategy = PipelineParallelStrategy(num_microbatches=4)

    class Told(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            wall = time.time() - float(os.environ[_BEGUN])
            print(f"{_TOLD} {wall} {time.process_time()}\n", end="", flush=True)

    class Module(L.LightningModule):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Any], index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    L.seed_everything(1)
    model, samples = _model(name)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if way == "plain" else 2,
        strategy=strategy,
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        callbacks=[Told()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(model), DataLoader(samples, batch_size=8))  # type: ignore[arg-type]


def _model(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """A small model of each kind that gives its own loss, and samples for it."""
    import torch

    ids = torch.randint(3, 256, (16, 64))
    text = [{"input_ids": row, "labels": row} for row in ids]
    if name == "mlp":
        return _mlp(), [{"x": row} for row in torch.randn(16, 64)]
    import transformers as hf

    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4}
    makers: dict[str, Callable[[], Any]] = {
        "gpt": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=256, n_embd=64, n_layer=4, n_head=4)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads)),
        "vit": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(image_size=32, patch_size=8, hidden_size=64, intermediate_size=128, num_labels=5, **heads)
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=256, d_model=64, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
    }
    if name == "vit":
        text = [{"pixel_values": image, "labels": torch.tensor(1)} for image in torch.randn(16, 3, 32, 32)]
    return makers[name](), text


def _mlp() -> Any:
    """A stack of small layers, made where torch is imported."""
    from types import SimpleNamespace

    from torch import nn

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))

        def forward(self, x: Any) -> SimpleNamespace:
            for layer in self.layers:
                x = x + layer(x)
            return SimpleNamespace(loss=x.square().mean())

    return Mlp()


def seconds(name: str, way: str) -> tuple[float, float]:
    """What one command takes to the end of its first batch: wall time, and processor time of its processes together."""
    environment = {**os.environ, _BEGUN: str(time.time())}
    command = [sys.executable, __file__, "--one", name, way]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    told = re.findall(rf"{_TOLD} (\S+) (\S+)", finished.stdout)
    if finished.returncode or len(told) != (1 if way == "plain" else 2):
        raise RuntimeError(f"{name}, {way}:\n{finished.stdout}{finished.stderr}")
    return max(float(wall) for wall, _ in told), sum(float(processor) for _, processor in told)


def _row(name: str, times: dict[str, list[tuple[float, float]]], kept: Callable[..., Any]) -> float:
    """One line; the wall seconds that a pipeline takes more than DDP."""
    plain, ddp, pipeline = ([kept(kind) for kind in zip(*times[way], strict=True)] for way in WAYS)
    more = [ours - theirs for ours, theirs in zip(pipeline, ddp, strict=True)]
    columns = "".join(f"{wall:>8.2f},{processor:>6.2f}" for wall, processor in (plain, ddp, pipeline))
    print(f"{name:<8}{columns}{more[0]:>+8.2f},{more[1]:>+6.2f}", flush=True)
    return float(more[0])


def main() -> None:
    """A row a model: medians of the ways, in turns, and what a pipeline takes more than DDP; then the least of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--runs", type=int, default=5, help="commands of each kind")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if a pipeline adds over {TARGET} s to DDP")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        run_one(*options.one)
        return
    import lightning_pp

    compileall.compile_dir(lightning_pp.__path__[0], quiet=1)
    most = 0.0
    print(f"{'model':<8}{'plain, s':>15}{'DDP, s':>15}{'pipeline, s':>15}{'more':>15}    (wall, processor)")
    for name in options.models:
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(options.runs):
            for way in WAYS:
                times[way].append(seconds(name, way))
        more = _row(name, times, statistics.median)
        _row("  least", times, min)
        most = max(most, more)
    if options.check and most > TARGET:
        sys.exit(1)


if __name__ == "__main__":
    main()
