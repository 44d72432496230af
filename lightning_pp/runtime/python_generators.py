"""The global generators of Python and NumPy: seeded for the pipeline's code, and put back as they were.

NumPy's own ``get_state`` and ``set_state`` take apart and put together 624 numbers one by one, about 90 us a step, as
much as several actions of a pipeline. So the words of its Mersenne twister are copied as they lie in memory, at the
address that ``BitGenerator.ctypes`` is documented to give. What they leave out is the second number of a pair of
gaussians, which NumPy holds back: a state with one takes the long way.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_TWISTER_BYTES = 624 * 4 + 4  # uint32_t key[624]; int pos;


@contextmanager
def python_generators_untouched() -> Iterator[None]:
    """Puts the generators of Python and NumPy back on exit, if NumPy is there."""
    state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    restore_numpy = _NUMPY.keep(numpy.random) if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(state)
        if restore_numpy is not None:
            restore_numpy()


def seed_python_generators(seed: int) -> None:
    """Seeds the generators of Python and NumPy."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


class _NumpyGenerator:
    """NumPy's global generator."""

    def __init__(self) -> None:
        # the words of the last state that was found to hold back no gaussian; they seldom change between steps
        self._words_alone = b""

    def keep(self, numpy_random: Any) -> Callable[[], None]:
        """What puts the present state back."""
        address = _twister_address(numpy_random)
        if address is None:
            return partial(numpy_random.set_state, numpy_random.get_state(legacy=False))
        words = ctypes.string_at(address, _TWISTER_BYTES)
        if words != self._words_alone:
            state = numpy_random.get_state(legacy=False)
            if state["has_gauss"]:
                return partial(numpy_random.set_state, state)
            self._words_alone = words
        return partial(_put_back, numpy_random, address, words)


_NUMPY = _NumpyGenerator()


def _twister_address(numpy_random: Any) -> int | None:
    """Where the words of NumPy's Mersenne twister lie; None if it cannot be said, or is another generator."""
    get_bit_generator: Any = getattr(numpy_random, "get_bit_generator", None)  # new in NumPy 1.24
    if get_bit_generator is None:
        return None
    generator = get_bit_generator()
    return int(generator.ctypes.state_address) if type(generator) is numpy_random.MT19937 else None


def _put_back(numpy_random: Any, address: int, words: bytes) -> None:
    if _twister_address(numpy_random) != address:
        raise RuntimeError(
            "NumPy's bit generator was exchanged during a step of the pipeline (numpy.random.set_bit_generator): do it "
            "before training, so that its state can be put back after each step"
        )
    numpy_random.seed(0)  # lets go of a gaussian held back since
    ctypes.memmove(address, words, _TWISTER_BYTES)
