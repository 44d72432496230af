"""Tensors whose samples do not lie along dimension 0, as position ids of several axes have them."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
from feature_parts import assert_equal_trees, check_with_weights, make_trainer
from parity_run import Layout, whole_weights
from pool import WorkerPool
from small_models import NotesLosses
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pp import BatchPart, PipelineParallelStrategy
from lightning_pp.errors import ConfigurationError

AXES, LENGTH, VOCAB, WIDTH = 3, 6, 11, 8
NAMED = {"inputs.position_ids": 1}


class Block(nn.Module):
    """Causal attention whose queries and keys are turned by the positions of each axis."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, position_ids: Tensor) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        scale = torch.tensor([0.3, 0.5, 0.7], dtype=h.dtype)
        angle = (position_ids * scale.view(AXES, 1, 1)).sum(0).unsqueeze(-1)
        q, k = q * angle.cos(), k * angle.sin()
        return h + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Decoder(NotesLosses):
    lr = 0.3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.seen: list[Tensor] = []

    def forward(self, batch: Any) -> Tensor:
        inputs = batch["inputs"]
        h = self.embedding(inputs["input_ids"])
        for block in self.blocks:
            h = block(h, inputs["position_ids"])
        return self.head(h)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch).flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss, on_epoch=True, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("val_loss", loss, batch_size=len(logits))
        return logits

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self(batch), "first": batch["inputs"]["position_ids"][0].reshape(-1, LENGTH)}

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs)


class Contrastive(Decoder):
    """A loss over all pairs of samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self(batch).mean(1)
        return nn.functional.cross_entropy(h @ h.t(), torch.arange(len(h)))


class Views(Decoder):
    """Views its position ids, as steps may view what is contiguous."""

    def forward(self, batch: Any) -> Tensor:
        rows = batch["inputs"]["position_ids"].view(-1, LENGTH)
        inputs = {**batch["inputs"], "position_ids": rows.view(AXES, -1, LENGTH)}
        return super().forward({**batch, "inputs": inputs})


def loader(sizes: tuple[int, ...]) -> DataLoader[Any]:
    """Batches of so many samples, each with other positions."""
    generator = torch.Generator().manual_seed(2)

    def batch(size: int) -> Any:
        ids = torch.randint(0, VOCAB, (size, LENGTH + 1), generator=generator)
        position_ids = torch.randint(0, 9, (AXES, size, LENGTH), generator=generator)
        inputs = {"input_ids": ids[:, :-1], "position_ids": position_ids}
        return {"inputs": inputs, "labels": ids[:, 1:].contiguous()}

    return DataLoader([batch(size) for size in sizes], batch_size=None)


def train(layout: Layout | None, kind: type[Decoder], sizes: tuple[int, ...], **options: Any) -> tuple[Any, ...]:
    module = kind()
    trainer = make_trainer(layout, **({} if layout is None else {"strategy": layout.strategy(**options)}))
    trainer.fit(module, loader(sizes), loader((3, 5)))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = whole_weights(module)
    return module.losses, module.seen, logged, trainer.predict(module, loader((5, 3))), weights


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("kind", "layout", "sizes", "options"),
    [
        (Views, Layout("zb_v", 2, 1, 3), (3, 6), {}),
        (Decoder, Layout("1f1b", 2, 1, 2), (4, 3), {}),
        (Contrastive, Layout("1f1b", 2, 1, 3), (4, 3), {"whole_batch_loss": True}),
    ],
    ids=str,
)
def test_trains_validates_and_predicts_as_on_one_device(
    pool: WorkerPool, kind: type[Decoder], layout: Layout, sizes: tuple[int, ...], options: Any
) -> None:
    check_with_weights(pool, train, layout, kind, sizes, batch_dim=NAMED, **options)


LAYOUT = Layout("1f1b", 2, 1, 2)


def error_of(sizes: tuple[int, ...], options: dict[str, Any]) -> str:
    """In a worker: the error with its notes."""
    with pytest.raises(Exception) as found:  # noqa: PT011
        train(LAYOUT, Decoder, sizes, **options)
    return "\n".join([f"{found.typename}: {found.value}", *getattr(found.value, "__notes__", [])])


def failure(pool: WorkerPool, sizes: tuple[int, ...], **options: Any) -> str:
    """What both ranks are told, notes included."""
    return "\n".join(pool.run(error_of, sizes, options, world_size=2, timeout=60))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [4, 3])
def test_without_the_option_the_error_names_it_and_what_it_says_trains(pool: WorkerPool, size: int) -> None:
    told = failure(pool, (size,))
    advice = re.search(r"samples of (batch\S+), of shape \((.*)\), lie .* than 0, give \S+\(batch_dim=({.*?})\)", told)
    assert advice is not None, told
    assert advice.groups()[:2] == ("batch['inputs']['position_ids']", f"3, {size}, 6")
    given = ast.literal_eval(advice[3])
    losses = train(None, Decoder, (size,))[0]
    for found, *_ in pool.run(train, LAYOUT, Decoder, (size,), batch_dim=given, world_size=2, timeout=60):
        assert_equal_trees(found, losses)


def ids_alone(batch: Any, number: int) -> list[BatchPart]:
    """Cuts everything but position ids, so that the step fails."""
    inputs, labels = batch["inputs"], batch["labels"].chunk(number)
    parts = zip(inputs["input_ids"].chunk(number), labels, strict=True)
    return [BatchPart({"inputs": {**inputs, "input_ids": ids}, "labels": own}, len(ids)) for ids, own in parts]


def test_how_a_function_of_the_user_cuts_is_not_told(pool: WorkerPool) -> None:
    told = failure(pool, (4,), split_batch=ids_alone)
    assert "The step raised RuntimeError" in told and "along dimension 0" not in told


def test_what_does_not_fit_the_batch_is_an_error(pool: WorkerPool) -> None:
    """The other messages are those of :func:`split_batch`, in test_split_microbatch.py."""
    text = (
        "BatchError: batch_dim names dimension 3 of 'inputs.position_ids', whose shape is (3, 4, 6). Name the "
        "dimension along which its samples lie, from 0 to 2."
    )
    assert text in failure(pool, (4,), batch_dim={"inputs.position_ids": 3})


def test_options_that_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match=r"batch_dim=\{'x': '1'\} must be a dict from paths of tensors"):
        PipelineParallelStrategy(2, batch_dim={"x": "1"})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match=r"split_batch= cuts the whole batch, so batch_dim= has no effect"):
        PipelineParallelStrategy(2, batch_dim={"x": 1}, split_batch=lambda batch, number: [batch])
