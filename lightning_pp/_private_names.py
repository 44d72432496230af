"""Looking up private names of other packages, so that a version without one is told of at import and by name.

Each layer has its private names of a package in one file, as ``_torch_private.py``. ``tests/test_private_names.py``
holds the others free of them.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any


def private(owner: Any, name: str, *, of: str = "torch", tried: str = "2.11 to 2.13") -> Any:
    """The attribute ``name`` of ``owner``, which ``of`` does not promise to keep.

    Args:
        owner: A module, a class or an object.
        name: The attribute.
        of: The package.
        tried: The versions of the package that were tried.

    Raises:
        ImportError: The installed version has no such name.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise _missing(getattr(owner, "__name__", type(owner).__name__), name, of, tried) from error


def private_of_instances(kind: type, name: str, *, of: str, tried: str) -> None:
    """Checks that the constructor of ``kind`` sets the attribute ``name``, without making an instance.

    The arguments are those of :func:`private`, and so is the error.
    """
    constructor = inspect.unwrap(vars(kind)["__init__"])
    if name not in constructor.__code__.co_names:
        raise _missing(kind.__name__, name, of, tried)


def _missing(where: str, name: str, of: str, tried: str) -> ImportError:
    return ImportError(
        f"lightning_pp uses {where}.{name}, a private name that {of} {version(of)} does not have. "
        f"It was tried with {of} {tried}."
    )
