"""Finding units in modules of many shapes."""

from __future__ import annotations

import architectures
import pytest
import torch
import transformers_by_hand
from model_parts import Block
from torch import nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.split.unit_calls.units import discover_units


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


ALL_UNITS = {
    "tied_by_hand": ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3"],
    "sequential": ["0", "2", "3", "5"],
    "plain": ["first", "second", "third"],  # nothing repeats: the outermost modules
}
# an encoder and a decoder, the stages of a convolutional net, blocks that are dicts, towers and a dict of heads
SOME_UNITS = {
    "t5": [
        *(f"model.{side}.block.{index}" for side in ("encoder", "decoder") for index in range(3)),
        *("model.encoder.final_layer_norm", "model.shared", "model.lm_head"),
    ],
    "resnet": [*(f"layer{stage}.{block}" for stage in (1, 2, 3) for block in (0, 1)), "conv", "norm", "head"],
    "unet": ["down.0", "middle"],
    "two_towers": ["vision.0", "text.2", "project.image", "project.text", "patches", "words"],
}
ZOO = {**architectures.ARCHITECTURES, **transformers_by_hand.ARCHITECTURES}


@pytest.mark.parametrize("name", ALL_UNITS)
def test_blocks_and_the_modules_around_them_are_units(name: str) -> None:
    assert list(discover_units(ZOO[name][0]())) == ALL_UNITS[name]


@pytest.mark.parametrize("name", SOME_UNITS)
def test_units_of_models_with_several_lists(name: str) -> None:
    units = discover_units(ZOO[name][0]())
    assert set(SOME_UNITS[name]) <= units.keys()
    assert not any(unit.endswith((".relu", ".pool")) for unit in units)


def test_vision_transformer_of_transformers() -> None:
    units = discover_units(transformers_by_hand.vit())
    assert "model.vit.embeddings" in units
    assert len([name for name in units if ".layer" in name and name.rsplit(".", 1)[-1].isdigit()]) == 4


def test_a_block_under_two_names_is_one_unit() -> None:
    module = architectures.ARCHITECTURES["shared_in_list"][0]()
    units = discover_units(module)
    assert list(units) == ["embedding", "layers.0", "layers.1", "layers.3", "head"]
    assert units["layers.1"] is module.alias
    assert discover_units(module, ["layers.2"])["layers.1"] is module.alias
    assert discover_units(module, ["alias"]).keys() >= {"layers.1"}


def test_parameters_of_no_unit_belong_to_none() -> None:
    module = architectures.ARCHITECTURES["root_parameters"][0]()
    units = discover_units(module)
    in_units = {parameter for unit in units.values() for parameter in unit.parameters()}
    assert module.class_token not in in_units
    assert module.positions not in in_units
    assert all(scale not in in_units for scale in module.scales)


def test_modules_without_parameters_are_no_units() -> None:
    module = nn.Sequential(nn.ReLU(), linear(), nn.Dropout(), nn.Sequential(nn.Tanh()), linear())
    assert list(discover_units(module)) == ["1", "4"]


def test_units_are_never_nested() -> None:
    for name, (architecture, _) in ZOO.items():
        units = discover_units(architecture())
        for unit in units:
            assert not any(other != unit and other.startswith(unit + ".") for other in units), name
        assert len(set(map(id, units.values()))) == len(units)


def test_a_list_of_lists_gives_the_modules_that_can_be_called() -> None:
    class Called(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](self[0](x))

    level = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Identity()])
    other = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 4)})])
    module = nn.ModuleList([level, other, Called([nn.Linear(4, 4), nn.Linear(4, 4)])])
    assert list(discover_units(module)) == ["0.0", "0.1", "1.0.a", "2"]


def test_patterns_choose_levels() -> None:
    module = nn.ModuleDict({"a": nn.Sequential(Block(), Block()), "b": nn.Sequential(Block(), Block())})
    assert list(discover_units(module, ["a.*"])) == ["a.0", "a.1", "b"]
    assert list(discover_units(module, ["a"])) == ["a", "b"]
    assert list(discover_units(module, ["a.0.up", "b.?"])) == ["a.0.norm", "a.0.up", "a.0.down", "a.1", "b.0", "b.1"]
    assert list(discover_units(module, "a.[01]")) == ["a.0", "a.1", "b"]


def test_a_pattern_that_matches_nothing_names_what_is_near() -> None:
    module = architectures.ARCHITECTURES["tied_by_hand"][0]()
    with pytest.raises(ConfigurationError) as error:
        discover_units(module, ["blocs.*"])
    message = str(error.value)
    assert "units='blocs.*' matches none of the" in message
    assert "TiedByHand" in message
    assert "blocks." in message


def test_nested_patterns_are_refused() -> None:
    module = architectures.ARCHITECTURES["tied_by_hand"][0]()
    with pytest.raises(ConfigurationError, match=r"'blocks.0' and also 'blocks.0.up', which lies inside it"):
        discover_units(module, ["blocks.0", "blocks.0.up"])


def test_discovery_works_on_meta_and_lets_the_module_be() -> None:
    with torch.device("meta"):
        module = architectures.ARCHITECTURES["mixer"][0]()
    before = dict(module.named_parameters())
    assert "mixers.0" in discover_units(module)
    assert all(before[name] is parameter for name, parameter in module.named_parameters())
