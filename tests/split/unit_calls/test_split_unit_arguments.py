"""Units that keep state in objects they are given or convert their own parameters, and code that wraps units."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import text_models as text
import torch
from model_parts import VOCAB, WIDTH, Architecture, Block, next_token_loss, tokens_of
from one_process import OneProcessPipeline, compare
from raw_kernels import RawTanh
from torch import Tensor, nn

from lightning_pp.errors import ConfigurationError, SplitError


class Cache:
    """Keys of all layers, in an object that only the blocks know."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.length = 0

    def update(self, layer: int, key: Tensor) -> Tensor:
        if layer == 0:
            self.length += key.shape[1]
        if len(self.keys) <= layer:
            self.keys.append(key)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], key], dim=1)
        return self.keys[layer]


class CachedExperts(nn.Module):
    """Attends to what its cache holds; what runs after that depends on data."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.key = nn.Linear(WIDTH, WIDTH)
        self.experts = text.RoutedExperts()

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        keys = cache.update(self.layer, self.key(x))
        attended = x + (x @ keys.transpose(1, 2) + torch.zeros(x.shape[1], x.shape[1])).softmax(-1) @ keys
        change, _ = self.experts(attended)
        return attended + change


class Cached(Architecture):
    def __init__(self, reads_others: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(CachedExperts(layer) for layer in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.reads_others = reads_others

    def training_step(self, batch: Any) -> Tensor:
        h, cache = self.embedding(batch), Cache()
        for layer in self.layers:
            h = layer(h, cache)
        assert len(cache.keys) == 3 and cache.length <= batch.shape[1]
        penalty = sum(key.pow(2).mean() for key in cache.keys) if self.reads_others else 0.0
        return next_token_loss(self.head(h), batch) + penalty


@pytest.mark.by_day(1)
@pytest.mark.parametrize("reads_others", [True, False])
def test_what_units_put_into_the_lists_of_an_object_is_there_for_later_ones(reads_others: bool) -> None:
    torch.manual_seed(7)
    compare(lambda: Cached(reads_others), [tokens_of(3), tokens_of(2)], 3)


class InDict(Block):
    """Takes its input from a dict and puts its output in the place."""

    def forward(self, state: dict[str, Tensor]) -> None:  # type: ignore[override]
        state["hidden"] = super().forward(state["hidden"])
        state["norm"] = state["hidden"].norm()


class InDicts(text.SharedInList):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InDict() for _ in range(4))

    def training_step(self, batch: Any) -> Tensor:
        state = {"hidden": self.embedding(batch)}
        norms = []
        for layer in self.layers:
            layer(state)
            norms.append(state["norm"])
        return next_token_loss(self.head(state["hidden"]), batch) + torch.stack(norms).mean()


@pytest.mark.by_day(1)
@pytest.mark.parametrize("num_stages", [4, 2])
def test_what_units_replace_in_a_dict_is_there_for_later_ones(num_stages: int) -> None:
    torch.manual_seed(7)
    compare(InDicts, [tokens_of(3), tokens_of(2)], num_stages, splits_backward=True)


class Converting(Block):
    """Switch Transformers' router sets its own dtype whenever it is called."""

    def forward(self, x: Tensor) -> Tensor:
        self.up = self.up.to(torch.float64)
        self.down.to(torch.float32).to(torch.float64)
        return super().forward(x)


class Conversions(text.SharedInList):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Converting() for _ in range(3))


def test_units_may_convert_their_own_modules() -> None:
    torch.manual_seed(7)
    compare(Conversions, [tokens_of(3)], 3)


class RunsKernel(Block):
    def forward(self, x: Tensor) -> Tensor:
        return RawTanh.apply(super().forward(x))  # type: ignore[no-any-return]


class Kernels(text.SharedInList):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RunsKernel() for _ in range(3))


def test_units_may_launch_raw_kernels() -> None:
    torch.manual_seed(7)
    compare(Kernels, [tokens_of(3)], 3)


class Scale(torch.autograd.Function):
    """Numbers at one address times numbers at another, as a kernel of a norm has its input and its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        row = weight.numel()
        given = (ctypes.c_double * x.numel()).from_address(x.data_ptr())
        scales = (ctypes.c_double * row).from_address(weight.data_ptr())
        result = torch.empty_like(x)
        written = (ctypes.c_double * x.numel()).from_address(result.data_ptr())
        written[:] = [number * scales[place % row] for place, number in enumerate(given)]
        ctx.save_for_backward(x, weight)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).flatten(0, -2).sum(0)


class ScalesFirst(Block):
    """Its kernel gets what the unit gets, and a parameter of the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Scale.apply(x, self.scale))


class Scales(text.SharedInList):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScalesFirst() for _ in range(3))


def test_raw_kernels_may_get_a_units_input_and_its_parameters() -> None:
    torch.manual_seed(7)
    compare(Scales, [tokens_of(3)], 3)


class KernelAtEnd(text.SharedInList):
    """Its loss is computed by a raw kernel, after the last unit."""

    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for layer in self.layers:
            h = layer(h)
        return next_token_loss(RawTanh.apply(self.head(h)), batch)


def test_the_end_of_a_step_may_launch_raw_kernels() -> None:
    torch.manual_seed(7)
    compare(KernelAtEnd, [tokens_of(3)], 3)


class KernelBetween(text.SharedInList):
    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for layer in self.layers:
            h = RawTanh.apply(layer(h))
        return next_token_loss(self.head(h), batch)


def test_raw_kernels_between_units_are_refused() -> None:
    with pytest.raises(
        SplitError, match=r"in forward reads a value .* 'layers\.1' is called .* Move the read into a unit"
    ):
        compare(KernelBetween, [tokens_of(3)], 2)


class Reversed(torch.autograd.Function):
    """Runs the layers itself, forward and backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        for layer in layers:
            x = layer(x)  # the line that the message names
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Reversible(text.SharedInList):
    def training_step(self, batch: Any) -> Tensor:
        return next_token_loss(self.head(Reversed.apply(self.embedding(batch), self.layers)), batch)


class Vectorised(text.SharedInList):
    def training_step(self, batch: Any) -> Tensor:
        h = self.embedding(batch)
        for layer in self.layers:
            h = torch.func.vmap(layer)(h)  # the line that the message names
        return next_token_loss(self.head(h), batch)


@pytest.mark.parametrize("architecture", [Reversible, Vectorised])
def test_units_inside_what_only_one_stage_can_do_are_refused(architecture: type[Architecture]) -> None:
    with open(__file__) as source:
        lines = [n for n, text in enumerate(source, 1) if text.endswith("# the line that the message names\n")]
    line = lines[architecture is Vectorised]
    with pytest.raises(SplitError, match=rf"{__file__}:{line} in \w+ calls the unit 'layers\.0'.*units="):
        compare(architecture, [tokens_of(3)], 2)


class ScriptedLayer(text.SharedInList):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH))])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'layers\.1' is a TorchScript module.*torch\.compile"):
        compare(lambda: ScriptedLayer().float(), [tokens_of(3)], 2)


class Autoencoder(Architecture):
    """Distributions over what one stage alone knows, in code between units."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), nn.Linear(WIDTH, 2 * WIDTH))
        self.decoder = nn.Sequential(Block(), Block())

    def training_step(self, batch: Tensor) -> Tensor:
        mean, scale = self.encoder(batch).chunk(2, dim=-1)
        latent = torch.distributions.Normal(mean, scale.exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), 1.0)
        divergence = torch.distributions.kl_divergence(latent, prior).mean()
        reconstruction = torch.distributions.Normal(self.decoder(latent.mean), 1.0)
        return divergence - reconstruction.log_prob(batch).mean()


def test_distributions_between_units_are_not_checked_where_their_arguments_are_missing() -> None:
    torch.manual_seed(7)
    compare(Autoencoder, [torch.randn(3, WIDTH).double()], 3)


class Diverged(Autoencoder):
    def training_step(self, batch: Tensor) -> Tensor:
        decoded = self.decoder(self.encoder(batch)[..., :WIDTH]) * torch.nan
        # asked for: whoever compiles something in this process switches the checks of distributions off by default
        return torch.distributions.Normal(decoded, 1.0, validate_args=True).mean.mean()


def test_distributions_are_checked_on_the_stage_that_has_their_arguments() -> None:
    with pytest.raises(ValueError, match="Expected parameter loc"):
        OneProcessPipeline(Diverged, torch.randn(3, WIDTH).double(), 2).forward(torch.randn(3, WIDTH).double())
