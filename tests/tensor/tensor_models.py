"""Units of many kinds, with inputs, for tests of tensor parallelism; all in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LENGTH, BATCH = 16, 4, 6, 3


class FusedAttention(nn.Module):
    """Query, key and value in one projection, cut as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (each.view(heads).transpose(1, 2) for each in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
        weights = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
        return self.out((weights @ v).transpose(1, 2).contiguous().view(batch, length, width))


class ViewedAttention(FusedAttention):
    """The same projection cut by a view of five dimensions, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A transformer block with a residual inside."""

    def __init__(self, attention: type[nn.Module] = FusedAttention) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GatedUnit(nn.Module):
    """A gated unit whose two inputs come from one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(()) * 1.5)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value * self.scale)


class Experts(nn.Module):
    """Attention, then experts that tokens are routed to."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = ViewedAttention()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(1, -1)
        result = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            at = (chosen[:, 0] == i).nonzero()[:, 0]
            result = result.index_add(0, at, expert(flat[at]) * weights[at])
        return x + result.view_as(x)


def hidden(seed: int = 1) -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotary(dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(LENGTH, dtype=torch.float64), torch.arange(dim // 2, dtype=torch.float64) + 1)
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos(), angles.sin()


def make(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A unit and the arguments of a call of it."""
    torch.manual_seed(0)
    unit, args, kwargs = _make(name)
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)  # biases and norms that are not zero and one
    if name.endswith("grouped_mm"):  # which fakes have in this dtype only
        return unit.bfloat16(), tuple(each.bfloat16() for each in args), kwargs
    return unit.double(), args, kwargs


def _make(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    own = {"block": lambda: Block(), "viewed": lambda: Block(ViewedAttention), "gated": GatedUnit, "experts": Experts}
    if name in own:
        return own[name](), (hidden(),), {}
    if name.startswith("encoder_layer"):
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True, norm_first="first" in name)
        padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        padding[0, -2:] = True
        return layer, (hidden(),), {"src_key_padding_mask": padding} if "padded" in name else {}
    if name == "decoder_layer":
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True)
        return layer, (hidden(), hidden(2)), {"tgt_mask": mask, "tgt_is_causal": True}
    if name == "multihead":
        return nn.MultiheadAttention(WIDTH, HEADS), (hidden(), hidden(), hidden()), {}
    return _transformer(name)


def _experts(kind: str, implementation: str) -> nn.Module:
    """A router with experts whose matrices are in two parameters, computed by a loop ("eager") or all at once."""
    from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    block: Any
    config: Any
    sizes = {"hidden_size": WIDTH, "num_experts_per_tok": 2, "experts_implementation": implementation}
    if kind.startswith("mixtral"):
        width = 13 if kind.endswith("odd") else 16
        block, config = MixtralSparseMoeBlock, MixtralConfig(num_local_experts=4, intermediate_size=width, **sizes)
    elif kind == "qwen3_moe":
        block, config = Qwen3MoeSparseMoeBlock, Qwen3MoeConfig(num_experts=4, moe_intermediate_size=16, **sizes)
    else:
        block, config = GptOssMLP, GptOssConfig(num_local_experts=4, intermediate_size=16, **sizes)
    unit: nn.Module = block(config)
    with torch.no_grad():
        for parameter in unit.parameters():  # which are not initialised
            parameter.normal_(std=0.5)
    return unit


def _transformer(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    import transformers

    kind, _, attention = name.partition("-")
    if kind in ("mixtral", "mixtral_odd", "qwen3_moe", "gpt_oss"):
        return _experts(kind, attention), (hidden(),), {}
    attention = attention or "sdpa"
    sizes = {"num_hidden_layers": 1, "attn_implementation": attention}
    if kind in ("llama", "llama_one_key_head"):
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        config = transformers.LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=24,
            num_attention_heads=HEADS,
            num_key_value_heads=1 if "one" in kind else 2,
            **sizes,
        )
        mask = torch.full((LENGTH, LENGTH), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        return (
            LlamaDecoderLayer(config, 0),
            (hidden(),),
            {"position_embeddings": rotary(WIDTH // HEADS), "attention_mask": mask},
        )
    if kind == "phi3":  # query, key and value of different widths in one projection, taken by slices
        from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer

        config = transformers.Phi3Config(
            hidden_size=WIDTH,
            intermediate_size=24,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            vocab_size=32,
            pad_token_id=0,
            **sizes,
        )
        return Phi3DecoderLayer(config, 0), (hidden(),), {"position_embeddings": rotary(WIDTH // HEADS)}
    if kind == "gpt2":
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        config = transformers.GPT2Config(
            n_embd=WIDTH, n_head=HEADS, resid_pdrop=0.0, attn_pdrop=0.0, attn_implementation=attention
        )
        return GPT2Block(config, 0), (hidden(),), {}
    if kind == "t5":
        from transformers.models.t5.modeling_t5 import T5Block

        config = transformers.T5Config(
            d_model=WIDTH, d_kv=4, d_ff=32, num_heads=HEADS, dropout_rate=0.0, feed_forward_proj="gated-gelu"
        )
        config.is_decoder = False
        return T5Block(config, has_relative_attention_bias=True, layer_idx=0), (hidden(),), {}
    if kind == "vit":
        from transformers.models.vit.modeling_vit import ViTLayer

        config = transformers.ViTConfig(hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=32, **sizes)
        return ViTLayer(config), (hidden(),), {}
    raise ValueError(name)
