"""The global generators of Python and NumPy: seeded for the pipeline's code, and put back as they were.

Both are Mersenne twisters, and both take a state apart and put it together number by number, 624 of them; twice a step,
with what that leaves in the caches, this takes as long as several actions of a pipeline. So their words are copied as
they lie in memory. NumPy documents the address (``BitGenerator.ctypes``); Python's follow the header of the object, and
are copied only where they have been found to be what ``getstate`` says. What the words leave out is the second number
of a pair of gaussians, which either generator may hold back: Python's is an attribute, and a state of NumPy's with one
takes the long way.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

_TWISTER_BYTES = 624 * 4 + 4  # NumPy: uint32_t key[624]; int pos;  Python: int index; uint32_t state[624];


def keep_python_generators() -> Callable[[], None]:
    """What puts the present states of the generators of Python and NumPy back, of NumPy's if it is there."""
    restore_python = _keep_python()
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return restore_python
    restore_numpy = _NUMPY.keep(numpy.random)

    def restore() -> None:
        restore_python()
        restore_numpy()

    return restore


def seed_python_generators(seed: int) -> None:
    """Seeds the generators of Python and NumPy."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        _NUMPY.seed(numpy.random, seed % (1 << 32))


def _keep_python() -> Callable[[], None]:
    """What puts the present state of Python's generator back."""
    address = _address_of_python()
    if address is None:
        return partial(random.setstate, random.getstate())
    return partial(_put_python_back, address, ctypes.string_at(address, _TWISTER_BYTES), _python_generator().gauss_next)


def _put_python_back(address: int, words: bytes, held_back: float | None) -> None:
    ctypes.memmove(address, words, _TWISTER_BYTES)
    _python_generator().gauss_next = held_back


def _python_generator() -> Any:
    """The generator behind the functions of :mod:`random`."""
    return random.random.__self__  # type: ignore[attr-defined]


@functools.cache
def _address_of_python() -> int | None:
    """Where the words of Python's generator lie; None if they do not lie where CPython has them."""
    generator = _python_generator()
    header = object.__basicsize__
    if sys.implementation.name != "cpython" or type(generator).__basicsize__ < header + _TWISTER_BYTES:
        return None
    _, (*state, index), _ = generator.getstate()
    address = id(generator) + header
    return address if ctypes.string_at(address, _TWISTER_BYTES) == struct.pack("=I624I", index, *state) else None


class _NumpyGenerator:
    """NumPy's global generator."""

    def __init__(self) -> None:
        # the words of the last state that was found to hold back no gaussian; they seldom change between steps
        self._words_alone = b""
        self._seeded_words = b""
        self._last: Any = None
        self._address_of_last: int | None = None

    def keep(self, numpy_random: Any) -> Callable[[], None]:
        """What puts the present state back."""
        address = self._address(numpy_random)
        if address is None:
            return partial(numpy_random.set_state, numpy_random.get_state(legacy=False))
        words = ctypes.string_at(address, _TWISTER_BYTES)
        if words != self._words_alone:
            state = numpy_random.get_state(legacy=False)
            if state["has_gauss"]:
                return partial(numpy_random.set_state, state)
            self._words_alone = words
        return partial(self._put_back, numpy_random, address, words)

    def seed(self, numpy_random: Any, seed: int) -> None:
        """Seeds it."""
        numpy_random.seed(seed)
        address = self._address(numpy_random)
        self._seeded_words = b"" if address is None else ctypes.string_at(address, _TWISTER_BYTES)

    def _address(self, numpy_random: Any) -> int | None:
        """Where the words lie; None if that cannot be said, or it is another generator than the Mersenne twister."""
        get_bit_generator: Any = getattr(numpy_random, "get_bit_generator", None)  # new in NumPy 1.24
        if get_bit_generator is None:
            return None
        generator = get_bit_generator()
        if generator is not self._last:
            is_twister = type(generator) is numpy_random.MT19937
            self._address_of_last = int(generator.ctypes.state_address) if is_twister else None
            self._last = generator
        return self._address_of_last

    def _put_back(self, numpy_random: Any, address: int, words: bytes) -> None:
        if self._address(numpy_random) != address:
            raise RuntimeError(
                "NumPy's bit generator was exchanged during a step of the pipeline (numpy.random.set_bit_generator): "
                "do it before training, so that its state can be put back after each step"
            )
        if ctypes.string_at(address, _TWISTER_BYTES) != self._seeded_words:
            numpy_random.seed(0)  # something was drawn since: lets go of a gaussian that may be held back
        ctypes.memmove(address, words, _TWISTER_BYTES)


_NUMPY = _NumpyGenerator()
