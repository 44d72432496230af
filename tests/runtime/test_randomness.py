"""Glue draws the same on every stage, units draw their own, and the host's generator stays where it was."""

from __future__ import annotations

import torch

from lightning_pp.runtime.randomness import StepRandomness, host_generators_untouched
from lightning_pp.split.record import RandomGlue

CPU = torch.device("cpu")


def draw(owned: set[int], seed: int = 7) -> tuple[list[float], list[float]]:
    """What glue and units draw on a stage that owns the calls in ``owned``, of three."""
    glue, units = [], []
    randomness = StepRandomness(seed, CPU)
    with randomness.of_glue(RandomGlue(frozenset({-1, 0, 1, 2}))):
        for call in range(3):
            glue.append(torch.rand(()).item())
            if call in owned:
                randomness.enter_unit()
                units.append(torch.rand(()).item())
            randomness.seed_glue(call)
        glue.append(torch.rand(()).item())
    return glue, units


def test_glue_draws_the_same_on_every_stage() -> None:
    torch.manual_seed(1)
    first, first_units = draw({0})
    torch.manual_seed(2)
    second, second_units = draw({1, 2})
    assert first == second
    assert len(set(first)) == 4
    assert not set(first) & set(first_units + second_units)


def test_another_seed_gives_other_glue() -> None:
    assert draw({0}, seed=7)[0] != draw({0}, seed=8)[0]


def test_units_go_on_with_their_own_stream() -> None:
    torch.manual_seed(1)
    expected = [torch.rand(()).item() for _ in range(4)]
    torch.manual_seed(1)
    _, first = draw({0, 2}, seed=7)
    _, second = draw({0, 2}, seed=8)
    assert first + second == expected


def test_host_generator_is_untouched() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    before = torch.rand(1)
    with host_generators_untouched(123, CPU):
        inside = torch.rand(1)
    assert torch.equal(torch.cat([before, torch.rand(1)]), expected)
    with host_generators_untouched(123, CPU):
        assert torch.equal(torch.rand(1), inside)
