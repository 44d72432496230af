"""Architectures of several models in one, and models that are hardly more than layers.

Length letters in comments: B samples, T tokens, D features, C channels, V words.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from model_parts import VOCAB, WIDTH, Architecture, Block, next_token_loss
from torch import Tensor, nn


class ResidualMLP(Architecture):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 3))

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.layers(x), y)
        self.log("loss", loss)
        return loss


class TeacherStudent(Architecture):
    """A frozen teacher in eval mode; the student is fitted to its logits and features."""

    def __init__(self) -> None:
        super().__init__()

        def make(depth: int) -> nn.Sequential:
            return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *(Block() for _ in range(depth)), nn.Linear(WIDTH, VOCAB))

        self.teacher = make(3).requires_grad_(False)
        self.student = make(2)

    def train(self, mode: bool = True) -> TeacherStudent:
        super().train(mode)
        self.teacher.eval()
        return self

    def training_step(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch).softmax(-1)
        logits = self.student(batch)
        return F.kl_div(logits.log_softmax(-1), target, reduction="batchmean") + next_token_loss(logits, batch)


class Methods(Architecture):
    """An autoencoder whose parts are used by methods of their own, never by ``forward``."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block())
            self.to_mean = nn.Linear(WIDTH, 3)
            self.from_latent = nn.Linear(3, WIDTH)
            self.up = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))

        def encode(self, x: Tensor) -> Tensor:
            return self.to_mean(self.down(x))

        def decode(self, z: Tensor) -> Tensor:
            return self.up(self.from_latent(z))

    def __init__(self) -> None:
        super().__init__()
        self.coder = self.Coder()

    def training_step(self, batch: Any) -> Tensor:
        x, _ = batch
        z = self.coder.encode(x)
        return F.mse_loss(self.coder.decode(z), x) + 1e-2 * z.pow(2).mean()


class Momentum(Architecture):
    """A slow copy of the encoder gives the target (BYOL): one class twice, one of them without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), Block())
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Any) -> Tensor:
        x, _ = batch
        one, other = x, x.flip(-1)
        loss = torch.zeros((), dtype=x.dtype)
        for left, right in ((one, other),):
            with torch.no_grad():
                target = self.target(right)
            loss = loss - F.cosine_similarity(self.predictor(self.online(left)), target).mean()
        return loss


class Mlp(nn.Sequential, Architecture):
    """A model that is itself a Sequential of layers of different kinds."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3))

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.smooth_l1_loss(self(x), y)


class Plain(Architecture):
    """Nothing repeats and nothing is in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 9)
        self.second = nn.Bilinear(9, 9, 6)
        self.third = nn.Linear(6, 3)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.first(x).tanh()
        return F.mse_loss(self.third(self.second(h, h * math.sqrt(2)).relu()), y)


class Wrapped(Architecture):
    """The whole model is one attribute; its class has a forward that does all."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, WIDTH)
            self.body = nn.Sequential(Block(), Block(), Block(), Block())
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.stem(x)))

    class LossModule(nn.Module):
        """A loss with a parameter of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.log_variance = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return ((x - y).pow(2) * torch.exp(-self.log_variance) + self.log_variance).mean()

    def __init__(self) -> None:
        super().__init__()
        self.model = self.Inner()
        self.criterion = self.LossModule()

    def training_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        prediction = self.model(x)
        return {"loss": self.criterion(prediction, y), "prediction": prediction.detach(), "note": None}
