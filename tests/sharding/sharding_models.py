"""A small model with deferred weight gradients, and the runtime's part of a step: actions in a given order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

WIDTH = 6
NUM_TOKENS = 7
SEQUENCE = 4

ZERO_BUBBLE = "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
ALL_FORWARD_FIRST = "F0 F1 F2 F3 I3 I2 W3 I1 I0 W0 W1 W2"
ONE_BY_ONE = "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3"
# two stages of one rank, the second marked with '
V_PLACEMENT = "F0 F1 F0' F2 I0' F1' I1' W0' I0 W0 F2' W1' I1 I2' W1 I2 W2 W2'"

WeightGradient = tuple[nn.Parameter, Tensor, Tensor]


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, queue: list[WeightGradient]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        if ctx.weight.requires_grad:
            ctx.queue.append((ctx.weight, x, gradient))
        return gradient @ ctx.weight, None, None


class DeferredLinear(nn.Linear):
    """A linear layer whose weight gradient waits in ``queue`` until :func:`run_weight_gradients`."""

    def __init__(self, in_features: int, out_features: int, queue: list[WeightGradient]) -> None:
        super().__init__(in_features, out_features)
        self.queue = queue

    def forward(self, x: Tensor) -> Tensor:
        y = _DeferredLinear.apply(x, self.weight, self.queue)
        return y + self.bias


def run_weight_gradients(queue: list[WeightGradient]) -> None:
    for weight, x, gradient in queue:
        full = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        if weight.grad is None:
            weight.grad = full.to(weight.grad_dtype or full.dtype)
        else:
            weight.grad += full
    queue.clear()


class Block(nn.Module):
    """A residual MLP whose hidden width shards unevenly; with a buffer, and tensors in a dict and a tuple."""

    def __init__(self, queue: list[WeightGradient], use_checkpoint: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = DeferredLinear(WIDTH, 9, queue)
        self.down = DeferredLinear(9, WIDTH, queue)
        self.use_checkpoint = use_checkpoint
        self.num_runs = 0
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("num_calls", torch.tensor(0))

    def body(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        return self.down(torch.tanh(self.up(self.norm(x)))) * self.scale

    def forward(self, inputs: Mapping[str, Tensor], *, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        x = inputs["hidden"]
        with torch.no_grad():
            self.num_calls += 1
        y = checkpoint(self.body, x, use_reentrant=False) if self.use_checkpoint else self.body(x)
        if mask is not None:
            y = y * mask
        auxiliary = y.square().mean()
        # a view, as many real blocks return
        return (x + y).transpose(0, 1), {"auxiliary": auxiliary, "name": "block"}


def _call(block: nn.Module, h: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    y, extra = block({"hidden": h}, **kwargs)
    return y, extra["auxiliary"]


class Model(nn.Module):
    """embed, three blocks (the second called twice) and a head, with inter-unit code code between the calls.

    Args:
        tied: The head uses the weight of the embedding.
        checkpointing: "none", "inside" a block, "around" the call of a block, or that in the "reentrant" way.
    """

    def __init__(self, *, tied: bool = False, checkpointing: str = "none") -> None:
        super().__init__()
        self.queue: list[WeightGradient] = []
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(self.queue, checkpointing == "inside") for _ in range(3))
        self.head = DeferredLinear(WIDTH, NUM_TOKENS, self.queue)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointing = checkpointing
        self.skipped: set[int] = set()
        self.unused = nn.Linear(3, 5)

    def units(self) -> dict[str, nn.Module]:
        blocks = {f"blocks.{index}": block for index, block in enumerate(self.blocks)}
        return {"embed": self.embed, **blocks, "head": self.head, "unused": self.unused}

    def call_block(self, index: int, h: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if index in self.skipped:
            return h, h.new_zeros(())
        block = self.blocks[index]
        if self.checkpointing == "around":
            y, extra = checkpoint(block, {"hidden": h}, use_reentrant=False, **kwargs)
        elif self.checkpointing == "to the end":
            with set_checkpoint_early_stop(False):
                y, extra = checkpoint(block, {"hidden": h}, use_reentrant=False, **kwargs)
        elif self.checkpointing == "reentrant":
            y, auxiliary = checkpoint(_call, block, h, kwargs, use_reentrant=True)
            extra = {"auxiliary": auxiliary}
        else:
            y, extra = block({"hidden": h}, **kwargs)
        y = y.transpose(0, 1)
        if self.checkpointing != "reentrant":
            y += 0.01  # in place, on a view of what the unit gave
        return y, extra["auxiliary"]

    def first_stage(self, tokens: Tensor) -> Tensor:
        mask = (tokens > 1).unsqueeze(-1)
        h = self.embed(tokens)
        h, first = self.call_block(0, h, mask=mask.to(h.dtype))
        h, second = self.call_block(1, h)
        h, third = self.call_block(1, h * 1.1)
        return h + first + 2 * second + 3 * third

    def second_stage(self, h: Tensor, tokens: Tensor) -> Tensor:
        h, auxiliary = self.call_block(2, h)
        logits = self.head(h)
        targets = tokens.roll(-1, dims=1).flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets) + auxiliary

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second_stage(self.first_stage(tokens), tokens)


def make_model(dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options).to(dtype)


def make_microbatches(rank: int, count: int, seed: int = 100) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + rank)
    return [torch.randint(0, NUM_TOKENS, (2, SEQUENCE), generator=generator) for _ in range(count)]


class Runner:
    """Runs actions such as ``F0 F1 I0 W0``; the queue of a microbatch is filled in I and emptied in W."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def run(self, order: str, microbatches: Sequence[Tensor], after: Mapping[str, Any] | None = None) -> float:
        """Runs ``order`` and returns the mean loss; ``after[action]()`` is called after that action."""
        roots: dict[str, tuple[Tensor, Tensor | None]] = {}
        queues: dict[str, list[WeightGradient]] = {}
        model, losses = self.model, []
        two_stages = "'" in order
        hidden: dict[int, Tensor] = {}
        for action in order.split():
            kind, key = action[0], action[1:]
            index = int(key.rstrip("'"))
            tokens = microbatches[index]
            if kind == "F" and two_stages and not key.endswith("'"):
                output = model.first_stage(tokens)
                roots[key] = (output, None)
                hidden[index] = output.detach().requires_grad_()
            elif kind == "F":
                loss = model.second_stage(hidden[index], tokens) if two_stages else model(tokens)
                roots[key] = (loss / len(microbatches), None)
                losses.append(loss.item())
            elif kind == "I":
                root, _ = roots.pop(key)
                is_first_of_two = two_stages and not key.endswith("'")
                torch.autograd.backward(root, hidden.pop(index).grad if is_first_of_two else None)
                queues[key] = list(model.queue)
                model.queue.clear()
            else:
                run_weight_gradients(queues.pop(key))
            if after and action in after:
                after[action]()
        assert not roots
        assert not any(queues.values()) or "W" not in order
        return sum(losses) / len(losses)


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by the name of their operation. (CommDebugMode edits the graph by its module hooks.)"""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func._opname.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def mean_gradients(models: Iterable[Model]) -> dict[str, Tensor | None]:
    """The gradients of several replicas averaged; None if all lack one."""
    found: dict[str, list[Tensor | None]] = {}
    replicas = list(models)
    for model in replicas:
        for name, parameter in model.named_parameters():
            found.setdefault(name, []).append(parameter.grad)
    return {
        name: sum(g for g in gradients if g is not None) / len(replicas)  # type: ignore[misc]
        if any(g is not None for g in gradients)
        else None
        for name, gradients in found.items()
    }


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients by name, gathered from all ranks."""
    full: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        full[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full


def largest_error(actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> float:
    """The largest absolute difference; infinite if a gradient is None on one side only."""
    assert list(actual) == list(expected)
    worst = 0.0
    for name, right in expected.items():
        left = actual[name]
        if (left is None) != (right is None):
            return float("inf")
        if left is not None and right is not None:
            assert left.shape == right.shape, name
            worst = max(worst, (left.double() - right.double()).abs().max().item())
    return worst
