"""What the functions of a step reach besides its module and can change: globals, closures, classes, default values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pp.split._torch_private import version_of
from lightning_pp.split.side_effects.generators import putting_back
from lightning_pp.split.side_effects.reach import MUTABLE, PLAIN, Reached
from lightning_pp.split.side_effects.step_functions import FunctionsOfStep, UsersCode

# a container with more is copied, but what its entries hold is not looked at
_MAX_ENTRIES_LOOKED_INTO = 1024
# of a container with more, only entries that are added are taken away again
_MAX_ENTRIES_COPIED = 65_536
# larger tensors and arrays are not copied, nor are those in a container of many
_MAX_BYTES = 256 * 1024
_MAX_COPIED_TENSORS = 64
_MISSING = object()
_CODE = frozenset({FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, property, partial})
_WITHOUT_STATE = (PLAIN | _CODE) - {Tensor}


class OutsideState:
    """The state that the functions of a step reach by other ways than its module, found when this is made.

    Args:
        module: The user's module.
        called: Names of methods that are called besides steps and ``forward``.
        held: Other objects whose methods are called, and which are kept as well.
    """

    def __init__(self, module: nn.Module, called: Iterable[str] = (), held: Sequence[Any] = ()) -> None:
        found = FunctionsOfStep(module, called, held)
        self._code = found.code
        self._own = {id(child) for child in module.modules()}
        self._globals = list(found.globals.values())
        self._cells = list(found.cells.values())
        self._defaults = [*found.defaults, *held]
        self._of_functions = [function.__dict__ for function in found.functions]
        self._classes = [(kind, _data_of(kind)) for kind in found.classes]

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Within, functions of the step may run; afterwards all that they reach holds what it held before.

        That is names that they rebind (``global``, ``nonlocal``, attributes of classes and functions), and the
        containers, objects and modules that they reach by names, to any depth. Not put back are what has no attributes
        (files, sockets, iterators), objects of installed packages, tensors and arrays of more than 256 KiB, and
        entries that are overwritten in containers of more than 65,536.
        """
        kept = _Kept(self._code, self._own)
        names = [(namespace, name, namespace.get(name, _MISSING)) for namespace, name in self._globals]
        cells = [(cell, _content_of(cell)) for cell in self._cells]
        classes = [(kind, len(vars(kind)), data, [vars(kind).get(name, _MISSING) for name in data])
                   for kind, data in self._classes]  # fmt: skip
        kept.keep([value for *_, value in names])
        kept.keep([value for _, value in cells])
        kept.keep(self._defaults)
        kept.keep([attributes for attributes in self._of_functions if attributes])
        without = [attributes for attributes in self._of_functions if not attributes]
        for *_, values in classes:
            kept.keep(values)
        try:
            yield
        finally:
            kept.restore()
            for attributes in filter(None, without):
                attributes.clear()
            for namespace, name, value in names:
                if namespace.get(name, _MISSING) is not value:
                    _put_back(namespace.__setitem__, namespace.__delitem__, name, value)
            for cell, content in cells:
                if _content_of(cell) is not content:
                    _put_back(partial(setattr, cell), partial(delattr, cell), "cell_contents", content)
            for kind, size, data, values in classes:
                _restore_class(kind, size, data, values)


class _Kept:
    """Containers, attributes of objects, small tensors and arrays, and generators as they are now.

    Args:
        code: Tells whose objects may be looked into.
        own: Identities of the step's own modules, which others look after.
    """

    def __init__(self, code: UsersCode, own: set[int]) -> None:
        self._code = code
        self._seen = set(own)
        self._restore: list[Callable[[], None]] = []

    def keep(self, values: Sequence[Any]) -> None:
        """Keeps ``values`` and all that they hold."""
        waiting = [value for value in values if type(value) not in _WITHOUT_STATE]
        while waiting:
            node = waiting.pop()
            if id(node) in self._seen:
                continue
            self._seen.add(id(node))
            if isinstance(node, (tuple, *MUTABLE)):
                if not isinstance(node, tuple):
                    self._keep_container(node)
                if len(node) <= _MAX_ENTRIES_LOOKED_INTO:
                    waiting += _looked_into(dict.values(node) if isinstance(node, dict) else node)
            elif (restore := _contents_restored(node)) is not None:
                self._restore.append(restore)
            elif (attributes := _attributes_of(node, self._code)) is not None:
                self._restore.append(Reached("", attributes).restore)
                waiting += _looked_into(attributes.values())

    def restore(self) -> None:
        """Puts all back."""
        for restore in self._restore:
            restore()

    def _keep_container(self, node: Any) -> None:
        small = len(node) <= _MAX_ENTRIES_COPIED
        self._restore.append(Reached("", node).restore if small else partial(_shorten, node, len(node)))


def _looked_into(values: Any) -> list[Any]:
    """Those of ``values`` that can hold something that changes; of many tensors none, since they are results."""
    found = [value for value in list(values) if type(value) not in _WITHOUT_STATE]  # other threads may add some
    if len(found) > _MAX_COPIED_TENSORS:
        return [value for value in found if not isinstance(value, Tensor)]
    return found


def _attributes_of(node: Any, code: UsersCode) -> dict[str, Any] | None:
    kind = type(node)
    if isinstance(node, (type, ModuleType, Tensor)):
        return None
    if kind is SimpleNamespace or isinstance(node, nn.Module) or code.is_users(str(kind.__module__)):
        attributes = getattr(node, "__dict__", None)
        return attributes if type(attributes) is dict else None
    return None


def _contents_restored(node: Any) -> Callable[[], None] | None:
    """What puts back the content of a tensor, an array or a generator; None for others and for large ones."""
    if type(node) is Tensor:
        if node.is_meta or node.is_inference() or node.nbytes > _MAX_BYTES:
            return None
        return partial(_restore_tensor, node, version_of(node), node.detach().clone())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and type(node) is numpy.ndarray:
        if node.nbytes > _MAX_BYTES or not node.flags.writeable:
            return None
        return partial(_restore_array, numpy, node, node.copy())
    return putting_back(node)


def _restore_tensor(tensor: Tensor, version: int, content: Tensor) -> None:
    # what is changed through .data has no new version; on a device a comparison would wait for it
    if version_of(tensor) != version or (tensor.device.type == "cpu" and not torch.equal(tensor, content)):
        with torch.no_grad():
            tensor.copy_(content)


def _restore_array(numpy: Any, array: Any, content: Any) -> None:
    if not numpy.array_equal(array, content):
        array[...] = content


def _shorten(container: Any, size: int) -> None:
    """Takes away what was added to a large container, which has its newest entries at its end."""
    if isinstance(container, list):
        del container[size:]
    elif not isinstance(container, set):
        while len(container) > size:
            container.popitem() if isinstance(container, dict) else container.pop()


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def _put_back(put: Callable[[str, Any], Any], delete: Callable[[str], Any], name: str, value: Any) -> None:
    delete(name) if value is _MISSING else put(name, value)


def _data_of(kind: type) -> list[str]:
    """The attributes of a class that are no functions and have no meaning to Python."""
    code = (FunctionType, classmethod, staticmethod, property)
    return [name for name, value in vars(kind).items() if not name.startswith("__") and not isinstance(value, code)]


def _restore_class(kind: type, size: int, data: Sequence[str], values: Sequence[Any]) -> None:
    before = dict(zip(data, values, strict=True))
    for name, value in before.items():
        if vars(kind).get(name, _MISSING) is not value:
            _put_back(partial(setattr, kind), partial(delattr, kind), name, value)
    if len(vars(kind)) != size:
        for name in set(_data_of(kind)).difference(data):
            delattr(kind, name)
