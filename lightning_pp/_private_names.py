"""Private names of other packages. A missing name raises an error at its first use, not at import.

Each layer keeps its private names of a package in one file, such as ``_torch_private.py``;
``tests/test_private_names.py`` finds others. :func:`private` looks a name up, :func:`reader_of` reads an attribute,
:func:`uses` marks a function that needs a name, and :func:`require` checks names that a class overrides.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from importlib.metadata import version
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, NoReturn, TypeVar

# the versions that pip takes; docs/start/versions.md says with which the suite was run
TRIED = {"torch": "2.13 to 2.15", "lightning": "2.6.4 to 2.6.6", "torchmetrics": "1.9", "omegaconf": "2.3"}

_Function = TypeVar("_Function", bound=Callable[..., Any])


def private(path: str, *others: str) -> Any:
    """The object at ``path``, such as ``"torch.autograd._get_sequence_nr"``.

    Args:
        path: Package, modules, classes and the name.
        others: Paths of the same thing in other versions; the first that exists is taken.

    Returns:
        The object, or a stand-in whose every use raises the :class:`ImportError` of :func:`require`.
    """
    for candidate in (path, *others):
        try:
            return resolve_name(candidate)
        except (ImportError, AttributeError):
            continue
    return _Missing(path, (Exception,), {})


def uses(*paths: str) -> Callable[[_Function], _Function]:
    """Marks a function that uses the private names at ``paths``, also ones that only instances of a class have.

    Where one is missing, calling the function raises the :class:`ImportError` of :func:`require`. Where all are there,
    the function is left as it is.
    """

    def mark(function: _Function) -> _Function:
        missing = next((path for path in paths if not _exists(path)), None)
        return function if missing is None else _Missing(missing, (Exception,), {})  # type: ignore[return-value]

    return mark


def reader_of(path: str) -> Any:
    """A function of an object of the class in ``path``, which returns its private attribute at the end of ``path``.

    It raises as a function that :func:`uses` has marked.
    """
    return uses(path)(attrgetter(path.rpartition(".")[2]))


def require(*paths: str) -> None:
    """Checks names that this package overrides in classes of others, where nothing would call them if they moved.

    Raises:
        ImportError: The installed version of a package has one of them no longer.
    """
    for path in paths:
        if not _exists(path):
            _raise_missing(path)


def _exists(path: str) -> bool:
    """Whether ``path`` is there; also for attributes that only instances of a class have, without making one."""
    owner_path, _, name = path.rpartition(".")
    try:
        owner = resolve_name(owner_path)
    except (ImportError, AttributeError):
        return False
    if hasattr(owner, name):
        return True
    return isinstance(owner, type) and any(_sets(kind, name) for kind in owner.__mro__)


def _sets(kind: type, name: str) -> bool:
    """Whether instances of ``kind`` may get ``name`` by its annotations and its methods."""
    if name in vars(kind).get("__annotations__", {}):
        return True
    codes = (getattr(inspect.unwrap(method), "__code__", None) for method in vars(kind).values() if callable(method))
    named = (code for code in codes if code is not None and name in code.co_names)
    # instructions are pairs of bytes; dis.get_instructions takes milliseconds
    return any(
        (dis.opmap["STORE_ATTR"], code.co_names.index(name) & 0xFF)
        in zip(code.co_code[::2], code.co_code[1::2], strict=True)
        for code in named
    )


def _raise_missing(path: str) -> NoReturn:
    package = path.partition(".")[0]
    raise ImportError(
        f"lightning_pp needs {path}, a private name that {package} {version(package)} does not have. "
        f"Install {package} {TRIED[package]}."
    )


class _Missing(type):
    """The class of stand-ins for missing names. Stand-ins are classes, so that other classes can derive from them."""

    def _raise(cls, *_: Any, **__: Any) -> NoReturn:
        # a class derived from a stand-in has another name than what is missing
        _raise_missing(next(kind.__name__ for kind in reversed(cls.__mro__) if type(kind) is _Missing))

    __call__ = __instancecheck__ = __iter__ = __len__ = __getitem__ = _raise

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        cls._raise()
