"""Hooks that compute over the gradients of all parameters: by torch's functions, or by hand, which is refused."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from feature_parts import Data, assert_equal_trees, make, plain
from feature_parts import make_unchecked_trainer as make_trainer
from parity_run import Layout, whole_weights
from pool import WorkerPool
from small_models import Classifier
from torch import Tensor

LAYOUT = Layout("1f1b", 2, 1, 4)


class NormOfTensors(Classifier):
    """Clips by a norm that is stacked from the parameters' own."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        given = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        total = torch.stack([gradient.norm() for gradient in given]).norm()  # the line
        for gradient in given:
            gradient.mul_((0.1 / (total + 1e-6)).clamp(max=1.0))


class NormOfNumbers(Classifier):
    """The same in Python's numbers."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = 0.0
        for parameter in self.parameters():
            total += parameter.grad.detach().data.norm(2).item() ** 2  # the line
        for parameter in self.parameters():
            parameter.grad.data.mul_(min(1.0, 0.1 / (total**0.5 + 1e-6)))


class NormInClosure(Classifier):
    """Between backward and update, in a closure of its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            length = torch.cat([parameter.grad.flatten() for parameter in self.parameters()]).norm()  # the line
            for parameter in self.parameters():
                parameter.grad.div_(length)
            return loss

        optimizer.step(closure=closure)


class AutoClip(L.Callback):
    """Clips by a percentile of the norms so far."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        squares = [parameter.grad.norm().item() ** 2 for parameter in module.parameters()]  # the line
        self.norms.append(sum(squares) ** 0.5)
        median = sorted(self.norms)[len(self.norms) // 2]
        torch.nn.utils.clip_grad_norm_(module.parameters(), median)


class ClippedByCallback(Classifier):
    def configure_callbacks(self) -> list[L.Callback]:
        return [AutoClip()]


class LogsNumbers(Classifier):
    """Only looks at the numbers."""

    def on_after_backward(self) -> None:
        self.norms = {name: parameter.grad.norm().item() for name, parameter in self.named_parameters()}


class ByTorch(Classifier):
    """By torch's and Lightning's functions, and what goes by one gradient at a time."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in self.parameters():
            length = parameter.grad.norm().item()
            parameter.grad.mul_(min(1.0, 0.2 / length))
        self.log("total", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.05)
        self.clip_gradients(optimizer, gradient_clip_val=0.08, gradient_clip_algorithm="norm")


def train(kind: type[Classifier], layout: Layout | None) -> Any:
    trainer, module = make_trainer(layout, max_epochs=1), make(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, Data(num_train=24))
    said = [str(warning.message) for warning in caught if "numbers of the gradients" in str(warning.message)]
    return {"logged": plain(dict(trainer.callback_metrics)), "weights": whole_weights(module), "said": said}


def line_of(kind: type[Any]) -> str:
    lines, start = inspect.getsourcelines(kind)
    return f"{__file__}:{start + next(index for index, text in enumerate(lines) if '# the line' in text)} in "


@pytest.mark.parametrize(
    ("kind", "of", "text"),
    [
        (NormOfTensors, NormOfTensors, "computes over the gradients of 2 units"),
        (NormInClosure, NormInClosure, "computes over the gradients of 2 units"),
        (NormOfNumbers, NormOfNumbers, "reads numbers of the gradients of several units. Then it writes into"),
        (ClippedByCallback, AutoClip, "reads numbers of the gradients of several units. Then it writes into"),
    ],
)
def test_a_norm_by_hand_is_refused_with_its_line(pool: WorkerPool, kind: Any, of: Any, text: str) -> None:
    told = pool.refusals("ConfigurationError", train, kind, LAYOUT, world_size=2, timeout=60)
    for message in told:
        assert line_of(of) in message and text in message, message
        assert "torch.nn.utils." in message


def test_norms_by_torch_are_those_of_one_device(pool: WorkerPool) -> None:
    expected = train(ByTorch, None)
    weights: dict[str, Tensor] = {}
    for found in pool.run(train, ByTorch, LAYOUT, world_size=2, timeout=60):
        assert_equal_trees(found["logged"], expected["logged"])
        assert found["said"] == []
        weights |= found["weights"]
    assert_equal_trees(weights, expected["weights"])


def test_numbers_of_several_gradients_are_told_of_once(pool: WorkerPool) -> None:
    first, second = pool.run(train, LogsNumbers, LAYOUT, world_size=2, timeout=60)
    assert len(first["said"]) == 1 and second["said"] == []
    assert re.search(r"test_norms_by_hand\.py:\d+ in .*Numbers of one gradient are right", first["said"][0])
