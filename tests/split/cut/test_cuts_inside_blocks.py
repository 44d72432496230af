"""Children of blocks as units: every model of the zoo, cut inside blocks, is the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import architectures
import pytest
import transformers_by_hand
from one_process import OneProcessPipeline, build, compare
from torch import nn

from lightning_pp.split.cut.partition import inseparable_groups
from lightning_pp.split.unit_calls.units import discover_units, is_block_list, refine_unit, with_refined

ZOO: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    name: (zoo.ARCHITECTURES[name][0], zoo.batches_of) for zoo in (architectures, transformers_by_hand)
    for name in zoo.ARCHITECTURES
}  # fmt: skip
# blocks of one layer, and one whose own code goes by its router's values, which no other stage can know
WHOLE = {
    "recurrent", "shared_block", "structured", "fusion", "sequential", "plain", "albert", "mixture_of_experts",
}  # fmt: skip
CUT = [name for name in ZOO if name not in WHOLE]
QUICK = [
    *(("gpt2", 2), ("llama", 3), ("t5", 4), ("vit", 3), ("encoder_decoder", 4), ("resnet_batch_statistics", 3)),
    *(("in_place_edits", 3), ("checkpointed_llama", 2), ("mixtral", 3), ("tied_by_hand", 2), ("shared_in_list", 3)),
]
CASES: list[Any] = [
    *QUICK,
    *(
        pytest.param(name, number, marks=pytest.mark.nightly)
        for name in CUT
        for number in (2, 3, 4)
        if (name, number) not in QUICK
    ),
]


def blocks_of(module: nn.Module) -> list[str]:
    """The units that are one of a list of blocks and have several children."""
    blocks = {child for parent in module.modules() if is_block_list(parent) for child in parent.children()}
    units = discover_units(module)
    return [name for name, unit in units.items() if unit in blocks and len(refine_unit(name, unit)) > 1]


def places_inside(name: str, refined: list[str]) -> list[str]:
    """The children before which a cut may fall, but the first of each block."""
    make, batches_of = ZOO[name]
    record = OneProcessPipeline(make, batches_of(name)[0], 1, refined=refined).split.record
    called = list(record.first_calls())
    first = {next((unit for unit in called if unit.startswith(f"{block}.")), None) for block in refined}
    starts = [group[0] for group in inseparable_groups(record)[1:]]
    return [unit for unit in starts if unit not in first and any(unit.startswith(f"{block}.") for block in refined)]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("name", "num_stages"), CASES)
def test_cuts_inside_blocks_are_the_whole_model(name: str, num_stages: int) -> None:
    make, batches_of = ZOO[name]
    refined = blocks_of(build(make))
    places = places_inside(name, refined)
    points = [places[(cut + 1) * len(places) // num_stages] for cut in range(num_stages - 1)]
    points = list(dict.fromkeys(points))
    assert len(points) == num_stages - 1
    pipeline, _ = compare(
        make, batches_of(name), num_stages, refined=refined, split_points=points, splits_backward=num_stages % 2 == 1
    )
    assert set(pipeline.split.partition.stage_of_unit.values()) == set(range(num_stages))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["llama", "checkpointed_llama"])
def test_a_cut_inside_a_block_sends_one_activation(name: str) -> None:
    """The residual, as a cut between blocks does, whether the block checkpoints itself or not."""
    make, batches_of = ZOO[name]

    def sent(**options: Any) -> int:
        pipeline = OneProcessPipeline(make, batches_of(name)[0], 2, **options)
        return sum(edge.spec.num_bytes for edge in pipeline.split.step_plan().edges)

    first, block, *_, last = blocks_of(build(make))
    after_attention = sent(refined=[block], split_points=[f"{block}.post_attention_layernorm"])
    assert after_attention == sent(split_points=[block])
    assert sent(refined=[first, block], split_points=[last]) == sent(split_points=[last])


def test_lists_inside_a_block_give_their_own_children() -> None:
    units = with_refined(discover_units(build(ZOO["t5"][0])), ["model.decoder.block.0"])
    inside = [name for name in units if name.startswith("model.decoder.block.0")]
    assert inside == [f"model.decoder.block.0.layer.{number}" for number in range(3)]
    assert "model.decoder.block.1" in units
