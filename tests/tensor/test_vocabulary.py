"""Embeddings and the last projection cut along the vocabulary: values, gradients, losses, and what is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import WorkerPool
from tensor_models import WIDTH, hidden
from tensor_run import outcome
from torch import Tensor, nn

from lightning_pp.tensor.parts import whole_of
from lightning_pp.tensor.units import TensorParallelUnits

WORDS = 40


def tokens() -> Tensor:
    found = torch.randint(0, WORDS, (3, 6), generator=torch.Generator().manual_seed(2))
    found[0, 0], found[0, 1] = 0, WORDS - 1
    return found


class Summed(nn.Module):
    """An embedding inside of a unit, beside a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        summed: Tensor = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        return summed


EMBEDDINGS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "plain": (lambda: nn.Embedding(WORDS, WIDTH), {"weight"}),
    "padded": (lambda: nn.Embedding(WORDS, WIDTH, padding_idx=WORDS - 1), {"weight"}),
    "inside": (Summed, {"words.weight"}),
    "odd": (lambda: nn.Embedding(WORDS + 1, WIDTH), {"weight"}),
    "odd and padded": (lambda: nn.Embedding(WORDS + 1, WIDTH, padding_idx=WORDS - 1), {"weight"}),
    "renormalized": (lambda: nn.Embedding(WORDS, WIDTH, max_norm=1.0), set()),
    "scaled": (lambda: nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True), set()),
}


def cut(unit: nn.Module, *args: Any, **options: Any) -> TensorParallelUnits:
    assert dist.group.WORLD is not None
    units = TensorParallelUnits(nn.ModuleDict({"unit": unit}), {"unit": unit}, "auto", dist.group.WORLD, **options)
    units.defers_logits = "head" in options
    units.observe("unit", args, {})
    units.shard()
    units.check_next_calls()
    return units


def error_of(unit: nn.Module, units: TensorParallelUnits, alone: nn.Module) -> float:
    largest = 0.0
    for (name, parameter), wanted in zip(unit.named_parameters(), alone.parameters(), strict=True):
        assert parameter.grad is not None and wanted.grad is not None and dist.group.WORLD is not None
        part = units.parts.get(f"unit.{name}")
        grad = parameter.grad if part is None else whole_of(parameter.grad, part, dist.group.WORLD)
        largest = max(largest, (grad - wanted.grad).abs().max().item())
    return largest


def embedded(name: str) -> tuple[set[str], float]:
    torch.manual_seed(0)
    unit = EMBEDDINGS[name][0]().double()
    alone = copy.deepcopy(unit)
    (wanted,), _ = outcome(alone, (tokens(),), {})
    units = cut(unit, tokens())
    (given,), _ = outcome(unit, (tokens(),), {})
    return set(units.parts), max((given - wanted).abs().max().item(), error_of(unit, units, alone))


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings(name: str, pool: WorkerPool) -> None:
    for parts, error in pool.run(embedded, name, process_group=True):
        assert {each.removeprefix("unit.") for each in parts} == EMBEDDINGS[name][1]
        assert error < 1e-9


def out_of_range() -> str:
    unit = nn.Embedding(WORDS, WIDTH)
    cut(unit, tokens())
    unit(tokens())
    with pytest.raises(IndexError) as caught:
        unit(torch.tensor([WORDS]))
    return str(caught.value)


def test_a_word_that_no_rank_has_is_an_error(pool: WorkerPool) -> None:
    assert pool.run(out_of_range, process_group=True) == ["index out of range in self"] * 2


def labels() -> Tensor:
    found = tokens()
    found[1, 3] = -100
    return found


def flat(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda logits: F.cross_entropy(flat(logits), labels().flatten()),
    "shifted": lambda logits: F.cross_entropy(logits[:, :-1].flatten(0, 1), labels()[:, 1:].flatten()),
    "classes second": lambda logits: F.cross_entropy(logits.transpose(1, 2), labels()),
    "ignored": lambda logits: F.cross_entropy(flat(logits), tokens().flatten(), ignore_index=0, reduction="sum"),
    "smoothed": lambda logits: F.cross_entropy(flat((logits / 2).tanh()), labels().flatten(), label_smoothing=0.1),
    "none": lambda logits: F.cross_entropy(flat(logits), labels().flatten(), reduction="none").square().sum(),
    "module": lambda logits: nn.CrossEntropyLoss()(flat(logits.float().double()), labels().flatten()),
    # with all logits, which are gathered
    "z-loss": lambda logits: (
        F.cross_entropy(flat(logits), labels().flatten()) + 0.1 * logits.logsumexp(-1).square().mean()
    ),
    "weighted": lambda logits: F.cross_entropy(
        flat(logits), labels().flatten(), weight=torch.linspace(0, 1, logits.shape[-1], dtype=torch.float64)
    ),
    "log_softmax": lambda logits: F.nll_loss(F.log_softmax(logits[:, 1:], -1).flatten(0, 1), tokens()[:, 1:].flatten()),
    "some classes": lambda logits: logits[..., 3:5].square().sum() + logits.argmax(-1).sum(),
    "classes first": lambda logits: logits.movedim(-1, 0).exp()[:, 0].sum(),
}


def make_head(num_words: int = WORDS) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, num_words).double()


def losses(num_words: int) -> dict[str, float]:
    """The largest error of each loss and its gradients."""
    found = {}
    for name, loss_of in LOSSES.items():
        alone, unit = make_head(num_words), make_head(num_words)
        units = cut(unit, hidden(), head="unit")
        assert set(units.parts) == {"unit.weight", "unit.bias"}
        x, y = hidden().requires_grad_(), hidden().requires_grad_()
        wanted, given = loss_of(alone(x)), loss_of(unit(y))
        wanted.backward()
        given.backward()
        assert x.grad is not None and y.grad is not None
        error = max((wanted - given).abs().item(), (x.grad - y.grad).abs().max().item())
        found[name] = max(error, error_of(unit, units, alone))
    return found


@pytest.mark.parametrize(("num_words", "num_ranks"), [(WORDS, 2), (WORDS + 1, 2), (WORDS + 1, 3)])
def test_losses_of_logits_by_classes(pool: WorkerPool, num_words: int, num_ranks: int) -> None:
    for found in pool.run(losses, num_words, world_size=num_ranks, process_group=True):
        # float32 inside of it rounds
        assert {name for name, error in found.items() if error > (1e-6 if name == "module" else 1e-9)} == set()


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "div_": lambda logits: logits.div_(2),
    "__setitem__": lambda logits: logits.__setitem__(0, 0.0),
    "retain_grad": lambda logits: logits.retain_grad(),
    "register_hook": lambda logits: logits.register_hook(print),
    "grad": lambda logits: torch.autograd.grad(F.cross_entropy(flat(logits), tokens().flatten()), logits),
}


def edits() -> dict[str, str]:
    unit = make_head()
    cut(unit, hidden(), head="unit")
    said = {}
    for name, edit in EDITS.items():
        with pytest.raises(Exception, match="each tensor rank has the logits of some classes") as caught:
            edit(unit(hidden()))
        said[name] = str(caught.value)
    return said


def test_what_only_whole_logits_can_have_is_refused(pool: WorkerPool) -> None:
    for said in pool.run(edits, process_group=True):
        for name, message in said.items():
            assert f"uses the logits of 'unit' in {name}," in message and "'replicate'" in message


def kept_bytes(defers: bool) -> int:
    """What autograd keeps of a head and its loss, parameters and inputs aside."""
    unit, x = make_head(), hidden().requires_grad_()
    units = cut(unit, x, **({"head": "unit"} if defers else {}))
    assert bool(units.parts) == defers
    unit(x)
    own = {each.untyped_storage().data_ptr() for each in (x, *unit.parameters())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own and tensor.is_floating_point():
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.cross_entropy(flat(unit(x)), labels().flatten())
    return sum(kept.values())


def test_a_rank_keeps_its_part_of_the_logits(pool: WorkerPool) -> None:
    (whole, _), (part, _) = (
        pool.run(kept_bytes, False, process_group=True),
        pool.run(kept_bytes, True, process_group=True),
    )
    rows = labels().numel()
    # a few numbers for each row besides
    assert whole >= rows * WORDS * 8
    assert part <= rows * WORDS * 8 // 2 + 3 * rows * 8
