"""Looking up private names of other packages, so that a version without one is told of at import and by name.

Each layer has its private names of torch in one file ``_torch_private.py``. ``tests/test_private_names.py`` holds the
others free of them.
"""

from __future__ import annotations

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
        from importlib.metadata import version

        where = getattr(owner, "__name__", type(owner).__name__)
        raise ImportError(
            f"lightning_pp uses {where}.{name}, a private name that {of} {version(of)} does not have. "
            f"It was tried with {of} {tried}."
        ) from error
