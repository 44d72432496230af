"""What tensor ranks save in one file, log and start from is what one device does, in float64 to 1e-9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from parity_run import QUIET, tensor_difference
from pool import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.recipes.byte_gpt import ByteGPT
from lightning_pp.split.data.tree import entries_of

VOCAB, LENGTH = 32, 8


class TiedLlama(nn.Module):
    """Llama of transformers with grouped heads, whose head is its embedding."""

    def __init__(self) -> None:
        import transformers as hf

        super().__init__()
        config = hf.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
        self.model = hf.LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


class AdaptedLlama(TiedLlama):
    """With adapters of PEFT, which alone are trained."""

    def __init__(self) -> None:
        import peft

        super().__init__()
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        self.model = peft.get_peft_model(self.model, config)


MODELS: dict[str, Any] = {
    "adapted_llama": AdaptedLlama,
    "byte_gpt": lambda: ByteGPT(num_layers=3, dim=16, num_heads=2, max_seq_len=LENGTH),
    "tied_llama": TiedLlama,
}


class Language(L.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.norms: list[dict[str, float]] = []
        self.build()

    def build(self) -> None:
        torch.manual_seed(3)
        self.model = MODELS[self.name]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, on_step=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append({name: float(norm) for name, norm in grad_norm(self, 2).items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class BuiltLate(Language):
    """Makes its layers where they may be without memory."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            super().build()


class Losses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))


def fit(
    name: str, folder: Path, sizes: tuple[int, int] | None, options: dict[str, Any] | None = None
) -> tuple[list[float], list[dict[str, float]]]:
    """The losses, and the norms of gradients, of a training of which the first epoch is saved in a file."""
    where: dict[str, Any] = {"devices": 1}
    if sizes is not None:
        strategy = PipelineParallelStrategy(
            pipeline_parallel_size=sizes[0],
            tensor_parallel_size=sizes[1],
            num_microbatches=2,
            schedule="1f1b",
            save_distributed_checkpoint=False,
            **(options or {}),
            check_first_batches=False,
        )
        where = {"devices": sizes[0] * sizes[1], "strategy": strategy}
    losses = Losses()
    saver = ModelCheckpoint(folder, "saved", every_n_epochs=1, save_top_k=-1)
    callbacks = [losses, EMAWeightAveraging(decay=0.5, use_buffers=False), saver]
    trainer = L.Trainer(
        **{**QUIET, "enable_checkpointing": True},
        **where,
        max_epochs=1,
        gradient_clip_val=0.5,
        precision="64-true",
        callbacks=callbacks,
    )
    module = (BuiltLate if (options or {}).get("meta_init") else Language)(name).double()
    tokens = torch.randint(VOCAB, (12, LENGTH), generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(tokens, batch_size=4))  # type: ignore[arg-type]
    return losses.losses, module.norms


def check_same(found: Any, expected: Any) -> None:
    one, two = dict(entries_of(expected, "")), dict(entries_of(found, ""))
    assert one.keys() == two.keys()
    for place, value in one.items():
        if isinstance(value, Tensor):
            assert tensor_difference(two[place], value) < 1e-9, place


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "sizes", "in_background"),
    [("byte_gpt", (1, 2), True), ("tied_llama", (2, 2), False), ("adapted_llama", (1, 2), False)],
)
def test_a_file_has_what_one_device_saves(
    pool: WorkerPool, tmp_path: Path, name: str, sizes: tuple[int, int], in_background: bool
) -> None:
    losses, norms = fit(name, tmp_path / "one", None)
    for found, found_norms in pool.run(
        fit,
        name,
        tmp_path / "several",
        sizes,
        {"async_checkpoint": in_background},
        world_size=sizes[0] * sizes[1],
        timeout=120,
    ):
        assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-9
        for one, other in zip(found_norms, norms, strict=True):
            assert one.keys() == other.keys()
            assert max(abs(one[key] - value) / value for key, value in other.items()) < 1e-9
    one, several = (torch.load(tmp_path / where / "saved.ckpt", weights_only=True) for where in ("one", "several"))
    for key in ("state_dict", "current_model_state", "optimizer_states"):
        check_same(several[key], one[key])


def test_cut_matrices_start_from_weights_of_a_file(pool: WorkerPool, tmp_path: Path) -> None:
    losses, _ = fit("byte_gpt", tmp_path / "one", None)
    start = Language("byte_gpt")
    torch.save(start.double().state_dict(), tmp_path / "start.pt")
    options = {"meta_init": True, "initial_weights": str(tmp_path / "start.pt")}
    for found, _ in pool.run(fit, "byte_gpt", tmp_path / "several", (1, 2), options, timeout=120):
        assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-9


def fit_with_muon(folder: Path) -> None:
    module = Language("byte_gpt")

    def configure_optimizers() -> torch.optim.Optimizer:
        matrices = [p for p in module.parameters() if p.dim() == 2 and "head" not in str(p.shape)]
        others = [p for p in module.parameters() if all(p is not each for each in matrices)]
        from lightning_pp import CombinedOptimizer

        return CombinedOptimizer(torch.optim.Muon(matrices, 1e-3), torch.optim.AdamW(others, 1e-3))

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    strategy = PipelineParallelStrategy(
        pipeline_parallel_size=1, tensor_parallel_size=2, num_microbatches=2, check_first_batches=False
    )
    trainer = L.Trainer(**QUIET, devices=2, strategy=strategy, max_epochs=1, precision="64-true")
    tokens = torch.zeros(4, LENGTH, dtype=torch.int64)
    trainer.fit(module, DataLoader(tokens, batch_size=4))  # type: ignore[arg-type]


def test_updates_of_whole_matrices_are_refused_by_name(pool: WorkerPool, tmp_path: Path) -> None:
    for message in pool.refusals("ConfigurationError", fit_with_muon, tmp_path, timeout=120):
        assert "Muon may compute an update from a whole matrix" in message
        assert "model.embedding" in message and "'replicate'" in message
