"""Small LightningModules under which the tests look at one thing each."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCAB, NUM_CLASSES = 8, 11, 3
NUM_UNITS = 8
UNIT_BYTES = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH)


class Losses(L.Callback):
    """Keeps the loss of each batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class Descends(L.LightningModule):
    """Trains by gradient descent."""

    lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class NotesLosses(Descends):
    """Keeps the loss of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


class Blocks(Descends):
    """A residual stack on vectors; subclasses misbehave."""

    def __init__(self, num_blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x).squeeze(-1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class Residual(Blocks):
    """The stack without its head."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


class Stack(Blocks):
    """The first with a buffer, dropout if wanted, and a list of its losses."""

    def __init__(self, dropout: float = 0.0, num_blocks: int = 4) -> None:
        super().__init__(num_blocks)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.tensor(0.5))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.scale * self.dropout(torch.tanh(block(x)))
        return self.head(x).squeeze(-1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Classifier(L.LightningModule):
    """Four linear layers, a cross entropy; subclasses override steps."""

    def __init__(self, lr: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3)
        )
        self.lr = lr

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log("test_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        self.log("test_accuracy", (logits.argmax(-1) == batch[1]).double().mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"logits": logits, "label": logits.argmax(-1)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class MixedBlock(nn.Module):
    """What a backward can be split on and what it cannot: linears, a convolution, a norm, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, D]`` to the same shape."""
        h = self.norm(x)
        h = h + self.mix(h.transpose(1, 2)).transpose(1, 2)
        return x + self.down(torch.tanh(self.up(h)))


class Tower(Descends):
    """Blocks between an embedding and a head that share their weight; ``sums`` adds them up outside of blocks."""

    def __init__(self, num_blocks: int, sums: bool = False) -> None:
        super().__init__()
        self.sums = sums
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        h = self.embedding(tokens)
        for block in self.blocks:
            h = h * 0.5 + block(h) if self.sums else block(h)
        logits = self.head(h[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Unit(nn.Module):
    """Of ``UNIT_BYTES``; its shapes divide by the number of shards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class EvenModule(Descends):
    """Eight equal units."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(NUM_UNITS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for unit in self.units:
            batch = unit(batch)
        return batch.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


class TiedModule(EvenModule):
    """An embedding and a head that may share their weight, around uneven units."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, WIDTH)
        self.head = nn.Linear(WIDTH, 24, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = (batch[..., 0].abs() * 10).long() % 24  # (B, T)
        h = self.embedding(tokens)
        for unit in self.units:
            h = unit(h)
        return F.cross_entropy(self.head(h).transpose(1, 2), tokens)


class TokenModel(NotesLosses):
    """Predicts each token from itself; ``continuous`` takes vectors, and so no token ids, instead."""

    def __init__(self, continuous: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding: nn.Module = nn.Linear(WIDTH, WIDTH) if continuous else nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.embedding(batch["x"])
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, -2), batch["y"].flatten())

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("val_loss", self.loss_of(batch))
