"""Models of litgpt as pipelines of two stages against a plain Trainer: the largest difference in losses and weights.

litgpt asks for an older huggingface_hub than transformers does, so it goes into a folder of its own::

    pip install --no-deps --target /tmp/litgpt litgpt==0.5.13 psutil jsonargparse==4.41.0 docstring-parser
    pip install --no-deps --target /tmp/litgpt typeshed-client
    PYTHONPATH=/tmp/litgpt torchrun --nproc-per-node 2 benchmarks/litgpt_parity.py

The modules know nothing of pipelines and no hint is given. Everything is float64, and so are the norms and rotary
embeddings, which litgpt computes in float32: rounding there is all that would be seen.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy

# the shape of each, made small; every kind of attention, norm, MLP and rotary embedding that litgpt has
NAMES = (
    "pythia-14m",
    "tiny-llama-1.1b",
    "Gemma-2-2b",
    "Gemma-3-1b-it",
    "Mixtral-8x7B-v0.1",
    "phi-2",
    "Qwen3-0.6B",
    "OLMo-2-1124-7B",
    "falcon-7b",
)
VOCABULARY, NUM_LAYERS = 64, 4


def small(name: str) -> Config:
    """The config of that name with few and narrow layers."""
    whole = Config.from_name(name)
    sizes: dict[str, Any] = {"n_layer": NUM_LAYERS, "n_embd": 32, "n_head": 4, "head_size": 8, "intermediate_size": 48}
    sizes |= {"block_size": 64, "vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY}
    shared = whole.n_query_groups != whole.n_head
    sizes["n_query_groups"] = (1 if whole.n_query_groups == 1 else 2) if shared else 4
    if whole.n_expert:
        sizes["n_expert"] = 4
    for field in ("rope_indices", "sliding_window_indices"):
        if getattr(whole, field) is not None:
            sizes[field] = getattr(whole, field)[:NUM_LAYERS]
    return Config.from_name(name, **sizes)


class Pretraining(L.LightningModule):
    """As litgpt's own pretraining module."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = GPT(config)
        self.model.apply(self.model._init_weights)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1].contiguous())
        loss: Tensor = chunked_cross_entropy(logits, batch[:, 1:].contiguous(), chunk_size=0)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Losses(L.Callback):
    """Keeps what every batch came to."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.values.append(float(outputs["loss"]))


def train(name: str, strategy: Any, devices: int) -> tuple[list[float], dict[str, Tensor]]:
    """Six batches of three lengths, the last one smaller."""
    torch.manual_seed(3)
    module, losses = Pretraining(small(name)), Losses()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, VOCABULARY, size, generator=generator) for size in ((4, 13), (4, 17), (3, 9))]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        precision="64-true",
        callbacks=[losses],
        **quiet,  # type: ignore[arg-type]
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return losses.values, {key: value.detach().clone() for key, value in module.named_parameters()}


def main() -> None:
    """Prints a row for each model."""
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torchrun = {key: os.environ.pop(key) for key in list(os.environ) if key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    torchrun |= {key: os.environ.pop(key) for key in list(os.environ) if key.startswith(("TORCHELASTIC_", "GROUP_"))}
    expected = {name: train(name, "auto", 1) for name in NAMES}
    os.environ.update(torchrun)
    for name in NAMES:
        strategy = PipelineParallelStrategy(pipeline_parallel_size=2, num_microbatches=2, schedule="zb_h1")
        losses, mine = train(name, strategy, 2)
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, mine)
        weights = parts[0] | parts[1]
        assert weights.keys() == expected[name][1].keys()
        loss = max(abs(a - b) / abs(b) for a, b in zip(losses, expected[name][0], strict=True))
        pairs = [(weights[key], value) for key, value in expected[name][1].items() if value.abs().max() > 0]
        weight = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        if dist.get_rank() == 0:
            print(f"| {name} | {loss:.1e} | {weight:.1e} |", flush=True)


if __name__ == "__main__":
    main()
