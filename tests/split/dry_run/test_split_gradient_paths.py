"""Steps that steer gradients: hooks on gradients, compiled units, random inter-unit code, edited batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_parts import WIDTH, Block, Small, batches, next_token_loss
from one_process import OneProcessPipeline, compare
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lightning_pp.errors import SplitError


class Reentrant(Small):
    """The kind of checkpointing that hides the graph."""

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return next_token_loss(self.head(h), batch)


class Pairs(Small):
    """Two units, and code after them, in one checkpointed function."""

    use_reentrant = False

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for index in (0, 2):
            h = checkpoint(self.pair, h, index, use_reentrant=self.use_reentrant)
        return next_token_loss(self.head(h), batch)

    def pair(self, h: Tensor, index: int) -> Tensor:
        kept = self.blocks[index](h)
        return torch.sigmoid(self.blocks[index + 1](kept)) * kept


class ReentrantPairs(Pairs):
    use_reentrant = True


class Everything(Small):
    """All units in one checkpointed function, nested in another."""

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        h = checkpoint(self.body, h, use_reentrant=False)
        return next_token_loss(self.head(h), batch)

    def body(self, h: Tensor) -> Tensor:
        h = self.blocks[0](h)
        h = checkpoint(self.inner, h, use_reentrant=False)
        return self.blocks[3](h) * h.tanh()

    def inner(self, h: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[1](h).sin())


class Sequentially(Small):
    def training_step(self, batch: Any) -> Tensor:
        h = checkpoint_sequential(list(self.blocks), 2, self.embedding(batch), use_reentrant=False)
        return next_token_loss(self.head(h), batch)


class CheckpointingInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Inside(Small):
    block = CheckpointingInside


@pytest.mark.by_day(6)
@pytest.mark.parametrize("architecture", [Reentrant, Pairs, ReentrantPairs, Everything, Sequentially, Inside])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_checkpointing_across_units_and_stages(architecture: type[Small], num_stages: int) -> None:
    compare(architecture, batches(), num_stages, splits_backward=num_stages == 3)


def test_checkpointing_is_torchs_own_again_afterwards() -> None:
    before = torch.utils.checkpoint.CheckpointFunction.apply
    compare(Pairs, batches(), 2)
    assert torch.utils.checkpoint.CheckpointFunction.apply == before
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)


def test_a_reentrant_checkpoint_without_trained_input_trains_nothing() -> None:
    """As on one device: its function runs without gradients."""

    class FrozenInput(Reentrant):
        def __init__(self) -> None:
            super().__init__()
            self.embedding.requires_grad_(False)

        def training_step(self, batch: Any) -> Tensor:
            h = checkpoint(self.blocks[0], self.embedding(batch), use_reentrant=True)
            for block in self.blocks[1:]:
                h = block(h)
            return next_token_loss(self.head(h), batch)

    pipeline, _ = compare(FrozenInput, batches(), 2)
    assert all(p.grad is None for p in pipeline.stages[0].module.blocks[0].parameters())


class HookedBetween(Small):
    """A hook on the gradient of a value between units."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for index, block in enumerate(self.blocks):
            h = block(h) * 1.0
            if index == self.place:
                h.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return next_token_loss(self.head(h), batch)


@pytest.mark.parametrize("place", [1, 3])
def test_a_gradient_hook_between_units_is_refused_with_its_line(place: int) -> None:
    with pytest.raises(SplitError) as error:
        compare(lambda: HookedBetween(place), batches(), 2, split_points=["blocks.1"])
    message = str(error.value)
    assert "test_split_gradient_paths.py" in message and "in training_step puts a hook on the gradient" in message
    assert "made before the end of the last unit" in message


def test_hooks_on_the_loss_and_on_the_units_own_tensors_work() -> None:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            out.register_hook(lambda gradient: gradient * 0.5)
            return out

    class Hooked(Small):
        block = Own

        def training_step(self, batch: Any) -> Tensor:
            loss = super().training_step(batch)
            loss.register_hook(lambda gradient: gradient * 2.0)
            return loss

    compare(Hooked, batches(), 3)


def test_backward_hooks_of_units_run_where_the_unit_is() -> None:
    class Watching(Small):
        def __init__(self) -> None:
            super().__init__()
            self.calls: dict[int, int] = {}
            for index, block in enumerate(self.blocks):
                block.register_full_backward_hook(lambda *_, index=index: self.count(index))

        def count(self, index: int) -> None:
            self.calls[index] = self.calls.get(index, 0) + 1

    pipeline, _ = compare(Watching, batches(), 3)
    counted: dict[int, int] = {}
    for stage in pipeline.stages:
        assert not counted.keys() & stage.module.calls.keys()
        counted.update(stage.module.calls)
    assert counted == dict.fromkeys(range(4), 2)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_units(in_place: bool) -> None:
    class Compiled(Small):
        def __init__(self) -> None:
            super().__init__()
            for index, block in enumerate(self.blocks):
                if in_place:
                    block.compile(backend="eager")
                else:
                    self.blocks[index] = torch.compile(block, backend="eager")

    compare(Compiled, batches(3), 3)


class Diffusion(Small):
    """Noise and time, drawn outside the units, are read at the start, in between and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Tensor] = []

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        time, noise = torch.rand(len(batch), 1, 1, dtype=h.dtype), torch.randn(h.shape, dtype=h.dtype)
        self.draws.append(noise)
        h = h * (1 - time) + noise * time
        for block in self.blocks:
            h = block(h) * time
            h = h + F.dropout(noise, 0.5)
        return (self.head(h).mean(-1) - noise.mean(-1)).pow(2).mean()


def test_noise_is_the_same_on_every_stage_and_new_for_every_microbatch() -> None:
    pipeline = OneProcessPipeline(Diffusion, batches()[0], 3)
    pipeline.run(batches(3, 3), [0.5, 0.5])
    drawn = [stage.module.draws for stage in pipeline.stages]
    for first, second, third in zip(*drawn, strict=True):
        assert torch.equal(first, second) and torch.equal(second, third)
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_a_step_that_edits_its_batch() -> None:
    """It runs on every stage, each time on a batch as it was."""

    class Editing(Small):
        def training_step(self, batch: Any) -> Tensor:
            batch.add_(1).remainder_(24)
            return super().training_step(batch)

    pipeline, _ = compare(Editing, batches(), 3)
    assert pipeline.plans(batches()[0])[0].record.edits_batch


def test_packed_sequences_cross_stages() -> None:
    class Packed(Small):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))

        def training_step(self, batch: Any) -> Tensor:
            lengths = torch.arange(len(batch), 0, -1) + 2
            packed = nn.utils.rnn.pack_padded_sequence(self.embedding(batch), lengths, batch_first=True)
            for layer in self.recurrent:
                packed, _ = layer(packed)
            h, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
            assert lengths.tolist() == [len(batch) - index + 2 for index in range(len(batch))]
            return self.head(h).pow(2).mean()

    pipeline, _ = compare(Packed, batches(), 3)
    edges = pipeline.plans(batches()[0])[0].edges
    assert {edge.spec.dtype for edge in edges} == {torch.float64}  # the lengths are known everywhere


def test_a_unit_called_again_after_later_units_shares_their_stage() -> None:
    class Again(Small):
        def training_step(self, batch: Any) -> Tensor:
            h = self.embedding(batch)
            for _ in range(2):
                for block in self.blocks[:3]:
                    h = block(h)
            return next_token_loss(self.head(self.blocks[3](h)), batch)

    pipeline, _ = compare(Again, batches(), 3)
    stages = pipeline.split.partition.stage_of_unit
    assert stages["blocks.0"] == stages["blocks.1"] == stages["blocks.2"]
    with pytest.raises(SplitError, match=r"blocks.0, blocks.1, blocks.2 must share a stage.*called again"):
        compare(Again, batches(), 5)


def test_a_unit_reached_from_within_others() -> None:
    """A shared layer that units call: every stage that runs one of them holds it."""

    class Borrowing(Block):
        lent: list[nn.Module]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.lent[0](x)

    class Lending(Small):
        block = Borrowing

        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(WIDTH, WIDTH)
            for block in self.blocks:
                block.lent = [self.shared]

    pipeline, _ = compare(Lending, batches(), 3)
    stages = {pipeline.split.partition.stage_of_unit[f"blocks.{index}"] for index in range(4)}
    assert set(pipeline.split.owners["shared.weight"]) == stages
