"""Inter-unit code draws the same on every stage, units draw their own, and the host's generator stays where it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch

from lightning_pp.runtime.randomness import StepRandomness, step_seeded
from lightning_pp.split.record.step_record import InterUnitDraws

CPU = torch.device("cpu")


def draw(owned: set[int], seed: int = 7) -> tuple[list[float], list[float]]:
    """What inter-unit code and units draw on a stage that owns the calls in ``owned``, of three."""
    between, units = [], []
    randomness = StepRandomness(seed, CPU)
    with randomness.between_units(InterUnitDraws(frozenset({-1, 0, 1, 2}))):
        for call in range(3):
            between.append(torch.rand(()).item())
            if call in owned:
                randomness.enter_unit()
                units.append(torch.rand(()).item())
            randomness.seed_inter_unit(call)
        between.append(torch.rand(()).item())
    return between, units


def test_inter_unit_code_draws_the_same_on_every_stage() -> None:
    torch.manual_seed(1)
    first, first_units = draw({0})
    torch.manual_seed(2)
    second, second_units = draw({1, 2})
    assert first == second
    assert len(set(first)) == 4
    assert not set(first) & set(first_units + second_units)


def test_another_seed_gives_other_draws_between_units() -> None:
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
    with step_seeded(123, CPU):
        inside = torch.rand(1)
    assert torch.equal(torch.cat([before, torch.rand(1)]), expected)
    with step_seeded(123, CPU):
        assert torch.equal(torch.rand(1), inside)


class Normals:
    """NumPy's legacy generator as a host uses it, with an odd number of gaussians drawn before and between steps."""

    def __init__(self, draws_before: int) -> None:
        numpy.random.seed(11)
        random.seed(11)
        self._draw(draws_before)

    def _draw(self, count: int) -> list[float]:
        return [float(numpy.random.standard_normal()) for _ in range(count)] + [random.gauss(0, 1)]

    def drawn(self, steps: Callable[[], None]) -> list[float]:
        """What the host draws around three steps."""
        found: list[float] = []
        for count in (1, 2, 3):
            steps()
            found += self._draw(count)
        return found


@pytest.mark.parametrize("draws_before", [0, 1, 2], ids=["fresh", "holds_a_gaussian", "holds_none"])
@pytest.mark.parametrize("num_drawn", [0, 1, 2, 700])
def test_the_hosts_numpy_and_python_go_on_as_without_steps(draws_before: int, num_drawn: int) -> None:
    def step() -> None:
        with step_seeded(3, CPU):
            for _ in range(num_drawn):
                numpy.random.standard_normal()
                random.gauss(0, 1)

    expected = Normals(draws_before).drawn(lambda: None)
    assert Normals(draws_before).drawn(step) == expected


@pytest.mark.parametrize("num_drawn", [0, 1, 2, 700])
def test_pythons_generator_is_as_before_and_seeded_inside(num_drawn: int) -> None:
    random.seed(3)
    random.gauss(0, 1)  # the second of the pair is held back
    before = random.getstate()
    with step_seeded(3, CPU):
        inside = [random.gauss(0, 1) for _ in range(num_drawn)]
    assert random.getstate() == before
    random.seed(3)
    assert inside == [random.gauss(0, 1) for _ in range(num_drawn)]


def test_generators_of_python_are_seeded_only_where_inter_unit_code_draws_from_them() -> None:
    def drawn(*, in_python: bool) -> tuple[float, float]:
        random.seed(5)
        numpy.random.seed(5)
        with StepRandomness(7, CPU).between_units(InterUnitDraws(frozenset({-1}), in_python=in_python)):
            return random.random(), float(numpy.random.random_sample())

    random.seed(5)
    numpy.random.seed(5)
    as_without_pipeline = (random.random(), float(numpy.random.random_sample()))
    assert drawn(in_python=False) == as_without_pipeline
    assert drawn(in_python=True) == drawn(in_python=True) != as_without_pipeline


def test_units_draw_from_numpy_and_python_by_the_steps_seed() -> None:
    def drawn(seed: int) -> tuple[float, float]:
        with step_seeded(seed, CPU):
            return float(numpy.random.standard_normal()), random.random()

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.fixture
def another_bit_generator() -> Iterator[None]:
    """NumPy's global generator is a PCG64, as a user may want it."""
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(5))
    yield
    numpy.random.set_bit_generator(before)


@pytest.mark.usefixtures("another_bit_generator")
def test_another_bit_generator_of_the_host_goes_on_as_without_steps() -> None:
    expected = numpy.random.get_bit_generator().state
    with step_seeded(3, CPU):
        numpy.random.standard_normal()
    assert numpy.random.get_bit_generator().state == expected


def test_exchanging_numpys_bit_generator_in_a_step_for_another_kind_is_refused() -> None:
    before = numpy.random.get_bit_generator()
    try:
        with pytest.raises(RuntimeError, match="bit generator was replaced during a step"), step_seeded(3, CPU):
            numpy.random.set_bit_generator(numpy.random.PCG64(1))
    finally:
        numpy.random.set_bit_generator(before)


def test_another_generator_of_the_same_kind_goes_on_with_the_hosts_numbers() -> None:
    before = numpy.random.get_bit_generator()
    numpy.random.seed(11)
    expected = float(numpy.random.random_sample())
    numpy.random.seed(11)
    try:
        with step_seeded(3, CPU):
            numpy.random.set_bit_generator(numpy.random.MT19937(1))
        assert float(numpy.random.random_sample()) == expected
    finally:
        numpy.random.set_bit_generator(before)
