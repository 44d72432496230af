"""What is trained: a network of residual blocks on drawn samples. Replace both classes by your own."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """A residual block, [B, width] to [B, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        added: Tensor = self.mlp(self.norm(x))
        return x + added


class Model(L.LightningModule):
    """Tells which of four classes a sample is of. The repeated blocks are what is divided into stages."""

    def __init__(self, width: int = 32, num_layers: int = 4, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The mean loss of a batch, [B, 8] and [B]."""
        x, target = batch
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x), target)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class Data(L.LightningDataModule):
    """Samples whose class is the place of the largest of their first four numbers."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
        self.dataset = TensorDataset(x, x[:, :4].argmax(1))
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled batches; every rank of a pipeline is given the same."""
        return DataLoader(self.dataset, self.batch_size, shuffle=True)
