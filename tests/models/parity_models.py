"""Models and data of the parity tests: ordinary LightningModules that know nothing of pipelines.

Every model is tiny, without dropout, and comes with a data set of its own. ``MODELS`` maps a name to its module and
``DATASETS`` to what makes its samples; a sample is a dict of tensors (or a tuple of them) without the batch dimension.

Length letters in comments: B samples, T tokens, D features, C channels, V words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer
from model_parts import Block
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCAB = 32
IGNORED = -100


class SettingsModule(L.LightningModule):
    """What all modules share: one loss for training and validation, and optimizers as the settings ask for.

    Args:
        optimizer: ``"sgd"`` (with momentum), ``"adamw"``, or ``"adamw foreach"`` and ``"adamw fused"`` with that flag.
        lr: Learning rate.
        two_groups: Biases and norms get a group of their own, with another learning rate and no weight decay.
        scheduler: Learning rates change after every optimizer step.
        frozen: The first half of the parameters does not train.
    """

    def __init__(
        self,
        optimizer: str = "sgd",
        lr: float = 0.05,
        two_groups: bool = False,
        scheduler: bool = False,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.lr = lr
        self.two_groups = two_groups
        self.scheduler = scheduler
        self.build()
        if frozen:
            parameters = list(self.parameters())
            for parameter in parameters[: len(parameters) // 2]:
                parameter.requires_grad_(False)

    def build(self) -> None:
        """Makes the layers."""
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        """The mean loss of a batch."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups: Any = trained
        if self.two_groups:
            groups = [
                {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.05},
                {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": self.lr * 3},
            ]
        optimizer: torch.optim.Optimizer
        if self.optimizer_name == "sgd":
            optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=0.9, weight_decay=0.01)
        else:
            # with the usual eps, gradients that are zero but for rounding (of the biases of keys) would make steps
            flags = dict.fromkeys(self.optimizer_name.split()[1:], True)
            optimizer = torch.optim.AdamW(groups, lr=self.lr / 10, eps=1e-6, **flags)
        if not self.scheduler:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.3 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class GPT2(SettingsModule):
    """GPT-2 of transformers, embeddings tied, with the loss that it computes itself (in float32)."""

    def build(self) -> None:
        from transformers_by_hand import gpt2  # transformers take seconds to import

        self.model = gpt2().model

    def loss(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


class GPT2Float64Loss(GPT2):
    """The same model with a loss in the dtype of its logits."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits  # (B, T, V)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


class Llama(SettingsModule):
    """Llama of transformers on padded rows: a mask, and labels that the loss ignores on the padding."""

    def build(self) -> None:
        from transformers_by_hand import llama  # transformers take seconds to import

        self.model = llama().model

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss


class LlamaFloat64Loss(Llama):
    """The same model with a loss in the dtype of its logits."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


class LlamaFloat64Norms(LlamaFloat64Loss):
    """The same model with torch's norm. The norm of transformers computes in float32, and inductor sums in another
    order, so on one device its gradients are 2e-7 from those of uncompiled units; without float32 they are 1e-15.
    """

    def build(self) -> None:
        super().build()
        for module in list(self.model.modules()):
            for name, norm in list(module.named_children()):
                if type(norm).__name__ == "LlamaRMSNorm":
                    setattr(module, name, nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon))


class MixtralFloat64Loss(LlamaFloat64Loss):
    """Mixtral of transformers, whose experts are in parameters of three dimensions, without its balance loss."""

    def build(self) -> None:
        from transformers_by_hand import mixtral  # transformers take seconds to import

        self.model = mixtral().model


def with_other_config(model: nn.Module, name: str, value: int) -> nn.Module:
    """A model of its class with another value in its config."""
    setattr(model.config, name, value)
    return type(model)(model.config)


class OddGPT2(GPT2Float64Loss):
    """With tied embeddings of an odd number of words, which no even number of ranks divides."""

    def build(self) -> None:
        super().build()
        self.model = with_other_config(self.model, "vocab_size", VOCAB + 1)


class OddLlama(LlamaFloat64Loss):
    """With an embedding and a head of an odd number of words."""

    def build(self) -> None:
        super().build()
        self.model = with_other_config(self.model, "vocab_size", VOCAB + 1)


class ShortLlama(LlamaFloat64Loss):
    """With two layers: for tests in which each layer takes long."""

    def build(self) -> None:
        super().build()
        self.model = with_other_config(self.model, "num_hidden_layers", 2)


class T5(SettingsModule):
    """T5 of transformers: the decoder reads the encoder's output and mask; its loss is in the dtype of the logits."""

    def build(self) -> None:
        from transformers_by_hand import t5  # transformers take seconds to import

        self.model = t5().model

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss


class DemoTransformer(SettingsModule):
    """Lightning's demo model with the step of its ``LightningTransformer``."""

    def build(self) -> None:
        self.model = Transformer(vocab_size=VOCAB, ninp=16, nhead=2, nhid=24, nlayers=2, dropout=0.0)

    def loss(self, batch: Any) -> Tensor:
        inputs, target = batch
        output = self.model(inputs, target)
        return F.nll_loss(output, target.view(-1))


class ResidualMLP(SettingsModule):
    """Blocks in a Sequential, a regression."""

    def build(self) -> None:
        self.blocks = nn.Sequential(nn.Linear(6, 12), *(Block(12) for _ in range(4)), nn.Linear(12, 3))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.blocks(x), y)


class ConvBlock(nn.Module):
    """Convolution, norm, activation. The BatchNorm is meant to be frozen by the module around it."""

    def __init__(self, in_channels: int, out_channels: int, norm: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, out_channels) if norm == "group" else nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(SettingsModule):
    """Two levels down and two up, with skips that cross the cuts; BatchNorm keeps its statistics, as in finetuning."""

    def build(self) -> None:
        self.down = nn.ModuleList([ConvBlock(2, 4, "batch"), ConvBlock(4, 6, "group")])
        self.middle = ConvBlock(6, 6, "batch")
        self.up = nn.ModuleList([ConvBlock(12, 4, "group"), ConvBlock(8, 4, "batch")])
        self.head = nn.Conv2d(4, 2, 1)
        generator = torch.Generator().manual_seed(5)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0.0, 0.1, generator=generator)
                module.running_var.uniform_(0.5, 1.5, generator=generator)
                module.eval()  # Lightning leaves it so

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, skips.pop()], dim=1))
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        return F.l1_loss(self(batch["image"]), batch["target"])


class ViT(SettingsModule):
    """Class token and positions are parameters of the root; the blocks are torch's own encoder layers."""

    def build(self) -> None:
        width = 12
        self.patches = nn.Conv2d(2, width, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.positions = nn.Parameter(torch.randn(1, 5, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, 2, 20, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.patches(image).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1) + self.positions
        return self.head(self.encoder(tokens)[:, 0])

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["image"]), batch["label"], label_smoothing=0.1)


class RootParameters(SettingsModule):
    """Parameters of the root between the blocks, and the embedding's weight used once more at the end."""

    def build(self) -> None:
        width = 12
        self.embedding = nn.Embedding(VOCAB, width)
        self.positions = nn.Parameter(torch.randn(10, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((width,), 1.0 + 0.1 * i)) for i in range(4))
        self.output_bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) * math.sqrt(2.0) + self.positions[: tokens.shape[1]]
        for block, scale in zip(self.blocks, self.scales, strict=True):
            h = block(h) * scale
        return F.linear(h, self.embedding.weight, self.output_bias)

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        return F.cross_entropy(self(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


class Samples(Dataset[Any]):
    """A list of samples."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def _tokens(count: int, generator: torch.Generator, length: int = 9) -> Tensor:
    return torch.randint(1, VOCAB, (count, length), generator=generator)


def _gpt2_samples(count: int, generator: torch.Generator) -> list[Any]:
    return [{"input_ids": row} for row in _tokens(count, generator)]


def _llama_samples(count: int, generator: torch.Generator) -> list[Any]:
    """Rows of 3 to 10 tokens, padded: every microbatch and every replica has another number of tokens."""
    samples = []
    for index, row in enumerate(_tokens(count, generator, 10)):
        length = 3 + (5 * index) % 8
        mask = (torch.arange(10) < length).long()
        labels = torch.where(mask.bool(), row, IGNORED)
        samples.append({"input_ids": row * mask, "attention_mask": mask, "labels": labels})
    return samples


def _t5_samples(count: int, generator: torch.Generator) -> list[Any]:
    """Padded sources and targets, each pair of other lengths."""
    sources, targets = _tokens(count, generator, 8), _tokens(count, generator, 6)
    samples = []
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        mask = (torch.arange(8) < 3 + (3 * index) % 6).long()
        labels = torch.where(torch.arange(6) < 2 + (3 * index) % 5, target, IGNORED)
        samples.append({"input_ids": source * mask, "attention_mask": mask, "labels": labels})
    return samples


def _demo_samples(count: int, generator: torch.Generator) -> list[Any]:
    tokens = _tokens(count, generator, 9)
    return [(row[:-1], row[1:]) for row in tokens]


def _mlp_samples(count: int, generator: torch.Generator) -> list[Any]:
    return [(torch.randn(6, generator=generator), torch.randn(3, generator=generator)) for _ in range(count)]


def _unet_samples(count: int, generator: torch.Generator) -> list[Any]:
    images = torch.randn(count, 2, 8, 8, generator=generator)
    return [{"image": image, "target": image.flip(-1).abs()} for image in images]


def _vit_samples(count: int, generator: torch.Generator) -> list[Any]:
    images = torch.randn(count, 2, 8, 8, generator=generator)
    labels = torch.randint(0, 5, (count,), generator=generator)
    return [{"image": image, "label": label} for image, label in zip(images, labels, strict=True)]


def _root_samples(count: int, generator: torch.Generator) -> list[Any]:
    return [{"tokens": row} for row in _tokens(count, generator, 8)]


MODELS: dict[str, type[SettingsModule]] = {
    "gpt2": GPT2,
    "gpt2_float64_loss": GPT2Float64Loss,
    "llama": Llama,
    "llama_float64_loss": LlamaFloat64Loss,
    "llama_float64_norms": LlamaFloat64Norms,
    "mixtral_float64_loss": MixtralFloat64Loss,
    "odd_gpt2": OddGPT2,
    "odd_llama": OddLlama,
    "short_llama": ShortLlama,
    "t5": T5,
    "demo_transformer": DemoTransformer,
    "residual_mlp": ResidualMLP,
    "unet": UNet,
    "vit": ViT,
    "root_parameters": RootParameters,
}

DATASETS: dict[str, Callable[[int, torch.Generator], list[Any]]] = {
    "gpt2": _gpt2_samples,
    "gpt2_float64_loss": _gpt2_samples,
    "llama": _llama_samples,
    "llama_float64_loss": _llama_samples,
    "llama_float64_norms": _llama_samples,
    "mixtral_float64_loss": _llama_samples,
    "odd_gpt2": _gpt2_samples,
    "odd_llama": _llama_samples,
    "short_llama": _llama_samples,
    "t5": _t5_samples,
    "demo_transformer": _demo_samples,
    "residual_mlp": _mlp_samples,
    "unet": _unet_samples,
    "vit": _vit_samples,
    "root_parameters": _root_samples,
}


def samples_of(model: str, count: int, seed: int) -> Samples:
    """``count`` samples for ``model``."""
    return Samples(DATASETS[model](count, torch.Generator().manual_seed(seed)))
