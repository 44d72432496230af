"""Finding units in modules of many shapes."""

from __future__ import annotations

import architectures
import pytest
import torch
import transformers_by_hand
from model_parts import Block
from torch import nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.split.unit_calls.units import discover_units, is_block_list, owns_parameters, refine_unit


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def test_blocks_of_a_list_and_the_modules_around_it() -> None:
    units = discover_units(architectures.ARCHITECTURES["tied_by_hand"][0]())
    assert list(units) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def test_an_encoder_and_a_decoder_give_two_lists() -> None:
    units = discover_units(transformers_by_hand.t5())
    assert [name for name in units if ".block." in name] == [
        f"model.{side}.block.{index}" for side in ("encoder", "decoder") for index in range(3)
    ]
    assert "model.encoder.final_layer_norm" in units
    assert "model.shared" in units
    assert "model.lm_head" in units


def test_every_stage_of_a_conv_net_gives_its_blocks() -> None:
    units = discover_units(architectures.ARCHITECTURES["resnet"][0]())
    assert [name for name in units if name.startswith("layer")] == [
        f"layer{stage}.{block}" for stage in (1, 2, 3) for block in (0, 1)
    ]
    assert {"conv", "norm", "head"} <= units.keys()


def test_blocks_that_are_dicts_are_taken_apart() -> None:
    """A ModuleDict is not called, its entries are."""
    units = discover_units(architectures.ARCHITECTURES["unet"][0]())
    assert "down.0" in units
    assert "middle" in units
    assert not any(name.endswith((".relu", ".pool")) for name in units)


def test_a_module_that_is_a_sequential() -> None:
    units = discover_units(architectures.ARCHITECTURES["sequential"][0]())
    assert list(units) == ["0", "2", "3", "5"]


def test_two_towers_and_a_dict_of_heads() -> None:
    units = discover_units(architectures.ARCHITECTURES["two_towers"][0]())
    assert {"vision.0", "text.2", "project.image", "project.text", "patches", "words"} <= units.keys()


def test_vision_transformer_of_transformers() -> None:
    units = discover_units(transformers_by_hand.vit())
    assert "model.vit.embeddings" in units
    assert len([name for name in units if ".layer" in name and name.rsplit(".", 1)[-1].isdigit()]) == 4


def test_nothing_that_repeats_gives_the_outermost_modules() -> None:
    assert list(discover_units(architectures.ARCHITECTURES["plain"][0]())) == ["first", "second", "third"]


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
    for name, (architecture, _) in {**architectures.ARCHITECTURES, **transformers_by_hand.ARCHITECTURES}.items():
        units = discover_units(architecture())
        for unit in units:
            assert not any(other != unit and other.startswith(unit + ".") for other in units), name
        assert len(set(map(id, units.values()))) == len(units)


def test_patterns_choose_levels() -> None:
    module = nn.ModuleDict({"a": nn.Sequential(Block(), Block()), "b": nn.Sequential(Block(), Block())})
    assert list(discover_units(module, ["a.*"])) == ["a.0", "a.1", "b"]
    assert list(discover_units(module, ["a"])) == ["a", "b"]
    assert list(discover_units(module, ["a.0.up", "b.?"])) == [
        "a.0.norm",
        "a.0.up",
        "a.0.down",
        "a.1",
        "b.0",
        "b.1",
    ]
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


def test_block_lists() -> None:
    assert is_block_list(nn.ModuleList([linear(), linear()]))
    assert is_block_list(nn.Sequential(nn.Embedding(2, 2), linear(), nn.ReLU(), linear()))
    assert is_block_list(nn.ModuleDict({"a": linear(), "b": linear()}))
    assert not is_block_list(nn.ModuleList([linear(), nn.Embedding(2, 2)]))
    assert not is_block_list(nn.ModuleList([nn.ReLU(), nn.ReLU()]))
    assert not is_block_list(Block())


def test_refining_a_unit() -> None:
    block = Block()
    assert list(refine_unit("blocks.0", block)) == ["blocks.0.norm", "blocks.0.up", "blocks.0.down"]
    assert list(refine_unit("", block)) == ["norm", "up", "down"]
    assert refine_unit("x", nn.Sequential(nn.ReLU(), linear())).keys() == {"x.1"}
    assert owns_parameters(block)
    assert not owns_parameters(nn.ReLU())


def test_discovery_works_on_meta_and_lets_the_module_be() -> None:
    with torch.device("meta"):
        module = architectures.ARCHITECTURES["mixer"][0]()
    before = dict(module.named_parameters())
    assert "mixers.0" in discover_units(module)
    assert all(before[name] is parameter for name, parameter in module.named_parameters())
