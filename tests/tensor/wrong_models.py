"""Units that a plan cannot cut as it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tensor_models import BATCH, HEADS, LENGTH, WIDTH
from torch import Tensor, nn

COLUMNS, ROWS = {"unit.up": "colwise"}, {"unit.down": "rowwise"}
PAIR = {**COLUMNS, **ROWS}


class Pair(nn.Module):
    """Two products with a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int = 2 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(width, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class LastHeads(nn.Module):
    """Attention whose heads are the last dimension of the view, so that a run of columns is no set of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).view(BATCH, LENGTH, -1, HEADS).permute(0, 3, 1, 2) for each in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1).reshape(x.shape))


class ResidualInside(nn.Module):
    """Adds its input to what is sharded, and normalizes the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.up(x))


def unseen(x: Tensor) -> Tensor:
    """Code in which no function is seen, as in an extension, and which writes into its argument."""
    with torch._C.DisableTorchFunction():
        return x.add_(x.sum(-1, keepdim=True))


class DividedGradient(torch.autograd.Function):
    """Element by element forward, but not backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] / grads[0].norm()


# a unit, its plan, and what the error says
WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, str], str]] = {
    "softmax": (
        lambda: Pair(lambda h: h.softmax(-1)),
        PAIR,
        r"tensor_parallel_plan\['unit.up'\] cannot cut unit.up.weight: in unit 'unit' \(Pair\), softmax is taken over "
        r"dimension 2 of \[3, 6, 32\], which is sharded",
    ),
    "norm": (
        lambda: Pair(lambda h: F.layer_norm(h, h.shape[-1:])),
        PAIR,
        r"layer_norm normalizes over a sharded dimension of \[3, 6, 32\]",
    ),
    "sum": (lambda: Pair(lambda h: h - h.mean()), PAIR, r"mean is taken over all dimensions of \[3, 6, 32\]"),
    "no_rows": (lambda: Pair(F.relu), COLUMNS, r"linear multiplies an input of shape \[3, 6, 32\] that is sharded"),
    "leaves": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
        {"unit.0": "colwise"},
        r"a result leaves the unit sharded in dimension 2 of 16",
    ),
    "reshape": (
        lambda: Pair(lambda h: h.view(BATCH, 2 * WIDTH, LENGTH).relu().view(BATCH, LENGTH, -1)),
        PAIR,
        r"view reshapes \[3, 6, 32\] to \[3, 32, 6\], where dimension 2 is sharded in 2 \(segments \[32\]\)",
    ),
    "last_heads": (
        LastHeads,
        {"unit.[qkv]": "colwise", "unit.out": "rowwise"},
        r"scaled_dot_product_attention has query, key and value of shapes .* sharded in other dimensions than heads",
    ),
    "residual": (ResidualInside, COLUMNS, r"layer_norm normalizes over a sharded dimension of \[3, 6, 16\]"),
    "single": (
        lambda: Pair(lambda h: h * h[..., 3:4]),
        PAIR,
        r"__getitem__ takes \[3, 4\) of a sharded dimension of 32",
    ),
    "unknown": (lambda: Pair(lambda h: torch.fft.fft(h).real), PAIR, r"fft_fft has no rule for sharded tensors"),
    "cumsum": (lambda: Pair(lambda h: h.cumsum(-1)), PAIR, r"cumsum is taken over dimension 2 of \[3, 6, 32\]"),
    "read": (lambda: Pair(lambda h: h if h[0, 0].sum() > 0 else -h), PAIR, r"sum is taken over all dimensions"),
    "two_columns": (lambda: Pair(F.relu), {**COLUMNS, "unit.down": "colwise"}, r"linear multiplies an input"),
    "unseen": (
        lambda: Pair(unseen),
        PAIR,
        r"Unit 'unit' \(Pair\) computes something else on 2 tensor ranks than on one: "
        r"result 0 is -?[\d.e-]+ in place of -?[\d.e-]+",
    ),
    "backward": (
        lambda: Pair(DividedGradient.apply),
        PAIR,
        r"the gradient of input 0 is -?[\d.e-]+ in place of -?[\d.e-]+",
    ),
}
