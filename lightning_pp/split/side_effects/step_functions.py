"""Which functions a step may come to, by the names in their code, and what these name."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property, partial, partialmethod
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_pp.split.side_effects.reach import LIBRARIES, MUTABLE, PLAIN

# what is called from outside of the user's code; other methods count if code that does names them
_CALLED = frozenset({"forward", "training_step", "validation_step", "test_step", "predict_step"})
_MAX_ENTRIES = 1024
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


class UsersCode:
    """Tells the user's code from that of libraries and installed packages.

    Args:
        module: The user's module; the packages of its classes are the user's, wherever they are installed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._own = {kind.__module__.partition(".")[0] for kind in type(module).__mro__} - LIBRARIES

    def is_users(self, name: str) -> bool:
        """Whether the Python module of this name is the user's."""
        top = name.partition(".")[0]
        return top in self._own or not (top in LIBRARIES or _is_installed(top))


@cache
def _is_installed(top: str) -> bool:
    module = sys.modules.get(top)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return top != "__main__" and any(
        "site-packages" in str(place) or "dist-packages" in str(place) for place in places if place
    )


class FunctionsOfStep:
    """The functions of the user's code that the steps of a module may come to, whatever they are called through.

    A function is come to if code names it, or names a method like it of a class that is in reach. Too many is no harm.

    Args:
        module: The user's module.
        called: Names of methods that are called besides steps and ``forward``.
        held: Other objects whose methods are.

    Attributes:
        code: Tells the user's code from others'.
        functions: The functions.
        globals: The namespaces and names of what they name, by identity.
        cells: Of their closures, by identity.
        defaults: Default values of their arguments.
        classes: The user's classes in reach.
    """

    def __init__(self, module: nn.Module, called: Iterable[str] = (), held: Sequence[Any] = ()) -> None:
        self.code = UsersCode(module)
        self.functions: list[FunctionType] = []
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.cells: dict[int, CellType] = {}
        self.defaults: list[Any] = []
        self.classes: dict[type, None] = {}
        self._namespaces: list[dict[str, Any]] = []
        self._names = {*_CALLED, *called}
        # by identity, and kept so that no identity is used again
        self._seen: dict[int, Any] = {}
        self._visit([*module.modules(), *held])
        while self._visit(self._named()):
            pass

    def _named(self) -> list[Any]:
        """Methods of the classes and values of the namespaces in reach, if some code has their names."""
        found = []
        for kind in self.classes:
            for name, value in vars(kind).items():
                if name in self._names or name.startswith("__"):
                    found.append(value)
        for namespace in self._namespaces:
            for name in self._names.intersection(namespace):
                self.globals[id(namespace), name] = (namespace, name)
                found.append(namespace[name])
        return found

    def _visit(self, start: list[Any]) -> bool:
        """Goes through values and what they lead to; whether there was anything new."""
        is_new = False
        waiting = start
        while waiting:
            value = waiting.pop()
            if type(value) in PLAIN or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            is_new = True
            waiting += self._from(value)
        return is_new

    def _from(self, value: Any) -> list[Any]:
        """What one value leads to."""
        if isinstance(value, FunctionType):
            return self._from_function(value)
        if isinstance(value, type):
            return self._from_class(value)
        if isinstance(value, (tuple, *MUTABLE)):
            return list(dict.values(value) if isinstance(value, dict) else value) if len(value) <= _MAX_ENTRIES else []
        if isinstance(value, ModuleType):
            if self.code.is_users(value.__name__):
                self._namespaces.append(vars(value))
            return []
        if isinstance(
            value, (MethodType, partial, partialmethod, property, classmethod, staticmethod, cached_property)
        ):
            names = ("__func__", "__self__", "func", "args", "keywords", "fget", "fset")
            return [getattr(value, name) for name in names if hasattr(value, name)]
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return []
        if isinstance(value, nn.Module) or self.code.is_users(str(type(value).__module__)):
            return [type(value), *attributes.values()]
        return [attributes["__wrapped__"]] if "__wrapped__" in attributes else []  # as functools.cache makes it

    def _from_class(self, kind: type) -> list[Any]:
        users = [each for each in kind.__mro__ if self.code.is_users(str(each.__module__))]
        self.classes.update(dict.fromkeys(users))
        return []

    def _from_function(self, function: FunctionType) -> list[Any]:
        held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        found = [*held, *function.__dict__.values()]  # a library's wrapper leads to what it wraps
        if not self.code.is_users(str(function.__globals__.get("__name__", ""))):
            return [value for value in found if not isinstance(value, Tensor)]
        self.functions.append(function)
        self.cells.update({id(cell): cell for cell in function.__closure__ or ()})
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self.defaults += defaults
        namespace = function.__globals__
        for code in _codes_in(function.__code__):
            may_be_new = _STORE_GLOBAL in code.co_code[::2]
            self._names.update(code.co_names)
            for name in code.co_names:
                if name in namespace or may_be_new:
                    self.globals[id(namespace), name] = (namespace, name)
                    found.append(namespace.get(name))
                found += _imported(name, str(namespace.get("__package__") or ""))
        return found + defaults


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def _imported(name: str, package: str) -> list[ModuleType]:
    """The module that an import within a function names, if it is that; relative to a package as well."""
    names = [name] if name else []
    while package:
        names.append(f"{package}.{name}".rstrip("."))
        package = package.rpartition(".")[0]
    return [sys.modules[each] for each in names if each in sys.modules]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
