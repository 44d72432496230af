"""Architectures for images, and for images and text together.

Length letters in comments: B samples, T tokens, D features, C channels, V words.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from model_parts import VOCAB, WIDTH, Architecture, Block, next_token_loss
from torch import Tensor, nn


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and channels_in == channels
            else nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu_(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet(Architecture):
    """Stem, three stages of two blocks, pooling, head; the statistics of BatchNorm are fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), BasicBlock(8, 8, 1))
        self.layer3 = nn.Sequential(BasicBlock(8, 8, 2), BasicBlock(8, 8, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def train(self, mode: bool = True) -> ResNet:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.head(torch.flatten(self.pool(x), 1))

    def training_step(self, batch: Any) -> Tensor:
        image, label = batch
        logits = self(image)
        self.log("accuracy", (logits.argmax(-1) == label).double().mean())
        return F.cross_entropy(logits, label, label_smoothing=0.1)


class TrainedResNet(ResNet):
    """BatchNorm in training: statistics of the microbatch."""

    def train(self, mode: bool = True) -> ResNet:
        return nn.Module.train(self, mode)


class UNet(Architecture):
    """Skips from the way down to the way up; one scale is read where it is used."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 4, 6, 8]
        self.down = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in itertools.pairwise(widths))
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8))
        self.up = nn.ModuleList(
            nn.ModuleDict({"mix": nn.Conv2d(2 * i, o, 3, padding=1), "norm": nn.GroupNorm(1, o)})
            for i, o in [(8, 6), (6, 4), (4, 4)]
        )
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Conv2d(4, 3, 1)

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x = batch["image"]
        skips = []
        for conv in self.down:
            x = F.silu(conv(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for index, block in enumerate(self.up):
            x = F.interpolate(x, scale_factor=2.0)
            x = block["norm"](block["mix"](torch.cat([x, skips.pop() * self.scale[index]], 1)))
        loss = F.l1_loss(self.head(x), batch["image"])
        return {"loss": loss, "middle": x.detach()}


class Mixer(Architecture):
    """MLP-Mixer: mixes tokens, then channels."""

    class Layer(nn.Module):
        def __init__(self, num_tokens: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.tokens = nn.Sequential(nn.Linear(num_tokens, 6), nn.GELU(), nn.Linear(6, num_tokens))
            self.channels = Block()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.tokens(self.norm(x).mT).mT
            return self.channels(x)

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.mixers = nn.ModuleList(self.Layer(16) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def training_step(self, batch: Any) -> Tensor:
        image, label = batch
        x = self.patches(image).flatten(2).mT
        for mixer in self.mixers:
            x = mixer(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), label)


class TwoTowers(Architecture):
    """Image and text, contrasted: a temperature at the root, similarities within the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.vision = nn.Sequential(*(Block() for _ in range(3)))
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.text = nn.Sequential(*(Block() for _ in range(3)))
        self.project = nn.ModuleDict({"image": nn.Linear(WIDTH, 6), "text": nn.Linear(WIDTH, 6)})
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any) -> Tensor:
        image = self.vision(self.patches(batch["image"]).flatten(2).mT).mean(1)
        text = self.text(self.words(batch["text"])).mean(1)
        image = F.normalize(self.project["image"](image), dim=-1)
        text = F.normalize(self.project["text"](text), dim=-1)
        logits = self.log_scale.exp() * image @ text.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class RootParameters(Architecture):
    """Class token, positions and scales belong to no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 1.0 + i)) for i in range(4))
        self.head = nn.Linear(WIDTH, 5)
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1))

    def training_step(self, batch: Any) -> Tensor:
        image, label = batch
        x = self.patches(image - self.mean).flatten(2).mT
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        return F.cross_entropy(self.head(x[:, 0]), label)


class Fusion(Architecture):
    """Cross attention between two streams, with torch's own attention and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.self_attention = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.cross_attention = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: Any) -> Tensor:
        image = self.patches(batch["image"]).flatten(2).mT
        text = self.words(batch["text"])
        mask = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool).triu(1)
        weights = []
        for layer in range(2):
            q = self.norms[2 * layer](text)
            change, _ = self.self_attention[layer](q, q, q, attn_mask=mask, need_weights=False)
            text = text + change
            change, weight = self.cross_attention[layer](self.norms[2 * layer + 1](text), image, image)
            text = text + change
            weights.append(weight)
        self.log("entropy", -(weights[0] * weights[0].log()).sum(-1).mean())
        return next_token_loss(self.head(text), batch["text"])
