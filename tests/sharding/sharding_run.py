"""The runtime's part of a step on a model with deferred weight gradients: actions in a given order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from deferred_model import Model, WeightGradient, run_weight_gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ZERO_BUBBLE = "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
ALL_FORWARD_FIRST = "F0 F1 F2 F3 I3 I2 W3 I1 I0 W0 W1 W2"
ONE_BY_ONE = "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3"
# two stages of one rank, the second marked with '
V_PLACEMENT = "F0 F1 F0' F2 I0' F1' I1' W0' I0 W0 F2' W1' I1 I2' W1 I2 W2 W2'"


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
