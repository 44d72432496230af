"""The cross entropy of a head in parts is torch's own, to rounding, and what parts cannot serve is found out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pp.split.head.cross_entropy import joined, sums_of_part
from lightning_pp.split.head.deferred_logits import WholeHeadError, deferred
from lightning_pp.split.head.parts import HeadPart, parts_in, with_parts

CLASSES, ROWS, TOKENS, WIDTH = 300, 4, 10, 16
Loss = Callable[[Tensor, Tensor], Tensor]


def head_and_parts(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[nn.Linear, tuple[HeadPart, ...]]:
    torch.manual_seed(3)
    head = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)
    return head, parts_in(with_parts({"head": head}, "head", 3))["head"]


def hidden_and_target(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(ROWS, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    target = torch.randint(0, CLASSES, (ROWS, TOKENS))
    target[0, 3] = target[2, 0] = -100
    return hidden, target


def like_transformers(logits: Tensor, target: Tensor) -> Tensor:
    logits = logits.double()
    shifted = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), shifted.view(-1).to(logits.device), ignore_index=-100)


LOSSES: dict[str, Loss] = {
    "padded labels": like_transformers,
    "shifted and scaled": lambda logits, target: F.cross_entropy(
        (logits[:, :-1] / 2.0).reshape(-1, logits.size(-1)), target[:, 1:].reshape(-1)
    ),
    "classes second, smoothed, summed": lambda logits, target: F.cross_entropy(
        logits.transpose(1, 2), target, reduction="sum", label_smoothing=0.1
    ),
    "each row, some of the batch": lambda logits, target: (
        F.cross_entropy(logits.permute(0, 2, 1)[1:3], target[1:3], reduction="none").square().mean()
    ),
    "capped": lambda logits, target: nn.CrossEntropyLoss()(
        (torch.tanh(logits / 30) * 30)[..., :-1, :].contiguous().flatten(0, 1), target[..., 1:].flatten()
    ),
    "another ignored class": lambda logits, target: F.cross_entropy(
        logits.flatten(0, 1), target.clamp(min=0).flatten(), ignore_index=0, label_smoothing=0.2
    ),
    "rows in another order": lambda logits, target: F.cross_entropy(
        logits.transpose(0, 1).reshape(-1, CLASSES), target.T.flatten()
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_those_of_the_whole_head(loss: Loss, bias: bool) -> None:
    head, parts = head_and_parts(bias=bias)
    hidden, target = hidden_and_target()
    leaves = [hidden, *head.parameters()]
    whole = loss(head(hidden), target)
    in_parts = loss(deferred(parts, (hidden,), {}), target)
    assert in_parts.dtype is whole.dtype
    assert abs(in_parts - whole) < 1e-12 * abs(whole)
    for found, expected in zip(torch.autograd.grad(in_parts, leaves), torch.autograd.grad(whole, leaves), strict=True):
        assert (found - expected).abs().max() < 1e-12 * expected.abs().max()


def test_16_bits_keep_logits_as_they_are_and_sums_in_float32() -> None:
    head, parts = head_and_parts(torch.bfloat16)
    hidden, target = hidden_and_target(torch.bfloat16)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())

    kept: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() == 2 and tensor.shape[0] == ROWS * TOKENS and tensor.shape[1] > WIDTH:
            kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        in_parts = loss(deferred(parts, (hidden,), {}))
    assert set(kept) == {torch.bfloat16}  # logits of a part, not their copies in float32
    whole = loss(head(hidden))
    assert in_parts.dtype is torch.float32
    assert abs(in_parts - whole) < 1e-6 * abs(whole)
    found, expected = (torch.autograd.grad(value, head.weight)[0].double() for value in (in_parts, whole))
    assert (found - expected).norm() < 1e-2 * expected.norm()


def test_masked_classes_have_no_gradient() -> None:
    head, parts = head_and_parts()
    with torch.no_grad():
        head.bias[-100:] = -torch.inf  # all of the last part
    hidden, target = hidden_and_target()
    target.clamp_(max=CLASSES - 101)
    loss = F.cross_entropy(deferred(parts, (hidden,), {}).flatten(0, 1), target.flatten())
    whole = F.cross_entropy(head(hidden).flatten(0, 1), target.flatten())
    for found, expected in zip(
        torch.autograd.grad(loss, [hidden, head.weight]), torch.autograd.grad(whole, [hidden, head.weight]), strict=True
    ):
        assert (found - expected).abs().max() < 1e-12 * expected.abs().max()


def test_sums_do_not_overflow() -> None:
    logits = torch.tensor([[1000.0, 999.0], [-1000.0, -1001.0]], dtype=torch.float64)
    target = torch.tensor([3, 0])
    first = sums_of_part(logits, target, 0, with_total=False)
    both = joined(first, sums_of_part(logits + 1, target, 2, with_total=False))
    expected = torch.logsumexp(torch.cat([logits, logits + 1], 1), 1)
    assert torch.equal(both.log_sum_exp, expected)
    assert both.at_target.tolist() == [1000.0, -1000.0]


OTHER_USES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "argmax": lambda logits, target: logits.argmax(-1),
    "some classes": lambda logits, target: logits[..., :7],
    "rows by a mask": lambda logits, target: logits[target >= 0],
    "a sum with a tensor": lambda logits, target: logits + torch.ones(CLASSES),
    "classes and tokens mixed": lambda logits, target: logits.transpose(1, 2).reshape(ROWS, -1),
    "class weights": lambda logits, target: F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), weight=torch.ones(CLASSES, dtype=torch.float64)
    ),
    "probabilities": lambda logits, target: F.cross_entropy(
        logits.flatten(0, 1), torch.ones(ROWS * TOKENS, CLASSES, dtype=torch.float64)
    ),
    "in place": lambda logits, target: logits.mul_(2.0),
    "data": lambda logits, target: logits.data,
    "print": lambda logits, target: str(logits),
    "log_softmax": lambda logits, target: F.log_softmax(logits, -1),
}


@pytest.mark.parametrize("use", OTHER_USES.values(), ids=OTHER_USES)
def test_other_uses_are_told(use: Callable[[Tensor, Tensor], Any]) -> None:
    _, parts = head_and_parts()
    hidden, target = hidden_and_target()
    with pytest.raises(WholeHeadError, match=r"test_head_parts.py:\d+ in .* uses the logits of 'head' in "):
        use(deferred(parts, (hidden,), {}), target)


def test_a_class_that_is_not_there_is_an_error_as_in_torch() -> None:
    _, parts = head_and_parts()
    hidden, target = hidden_and_target()
    with pytest.raises(IndexError):
        F.cross_entropy(deferred(parts, (hidden,), {}).flatten(0, 1), target.flatten().clamp(min=CLASSES))


def test_parts_cover_all_classes() -> None:
    for number in (1, 2, 7, CLASSES, CLASSES + 5):
        parts = parts_in(with_parts({"head": nn.Linear(2, CLASSES)}, "head", number))["head"]
        assert len(parts) == min(number, CLASSES)
        assert parts[0].first == 0 and parts[-1].last == CLASSES
        assert all(one.last == other.first for one, other in itertools.pairwise(parts))
    parts = parts_in(with_parts({"head": nn.Linear(2, 128_256)}, "head", 13))["head"]
    assert all(part.first % 128 == 0 for part in parts)
