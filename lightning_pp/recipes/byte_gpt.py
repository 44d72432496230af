"""A byte-level GPT: an ordinary LightningModule that trains on one device, or as a pipeline, unchanged.

Shape letters: B sequences, T bytes per sequence, D model width, H heads, V = 256 byte values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pp.recipes.optimization import RecipeModule

NUM_BYTE_VALUES = 256


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a four times wider MLP.

    Args:
        dim: Model width D.
        num_heads: Attention heads H; divides D.
        dropout: Probability of dropping an activation after each of the two branches.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim, bias=False)
        self.mlp_out = nn.Linear(4 * dim, dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations [B, T, D] to activations [B, T, D]."""
        num_sequences, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(num_sequences, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, D / H]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.attention_out(attended.transpose(1, 2).reshape(num_sequences, length, dim)))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        out: Tensor = x + self.dropout(self.mlp_out(hidden))
        return out


class ByteGPT(RecipeModule):
    """GPT over bytes, trained to predict the next byte.

    Args:
        num_layers: Transformer blocks.
        dim: Model width D.
        num_heads: Attention heads H; divides ``dim``.
        max_seq_len: Longest sequence T.
        dropout: Dropout probability.
        learning_rate: Peak of a cosine schedule after the warm-up.
        num_warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: Decay of the matrices; norms and positions are not decayed.
        optimizer: Function that makes the optimizer from parameter groups and ``lr``. None: AdamW.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``.
    """

    def __init__(
        self,
        num_layers: int = 8,
        dim: int = 128,
        num_heads: int = 4,
        max_seq_len: int = 128,
        dropout: float = 0.0,
        learning_rate: float = 3e-3,
        num_warmup_steps: int = 20,
        weight_decay: float = 0.1,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__(learning_rate, num_warmup_steps, weight_decay, optimizer)
        if dim % num_heads:
            raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}: choose num_heads that divides dim")
        self.save_hyperparameters(ignore=["optimizer"])
        self.max_seq_len = max_seq_len
        self.embedding = nn.Embedding(NUM_BYTE_VALUES, dim)
        self.position = nn.Embedding(max_seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, NUM_BYTE_VALUES, bias=False)
        self._initialise(num_layers)

    def _initialise(self, num_layers: int) -> None:
        """GPT-2's initialisation: 0.02 everywhere, smaller where branches join the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            joins_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if joins_residual else 0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map byte values [B, T] (int64) to the next byte's logits [B, T, V]."""
        if input_ids.shape[1] > self.max_seq_len:
            raise ValueError(
                f"sequences of {input_ids.shape[1]} bytes, but the model has {self.max_seq_len} positions: raise "
                "max_seq_len, or shorten the sequences"
            )
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embedding(input_ids) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean next-byte cross-entropy in nats; the sequences [B, T] are inputs and, shifted by one, targets."""
        if len(batch) > 1:
            raise ValueError(
                f"ByteGPT takes input_ids alone, and the batch has {', '.join(batch)}: it has no masks of documents. "
                "Give data.documents=joined, or a model of transformers"
            )
        logits = self(batch["input_ids"][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten())

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The most likely next byte at every position, [B, T]."""
        return self(batch["input_ids"]).argmax(dim=-1)  # type: ignore[no-any-return]

    def _is_decayed(self, name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim >= 2 and not name.startswith("position")
