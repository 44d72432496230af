"""Units as they were before they were sharded."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_pp.sharding._torch_private import forget_sharding
from lightning_pp.split.side_effects.hooks import module_of

_HOOKS_OF = ("torch.distributed.fsdp", "lightning_pp.sharding")


class UnitsBefore:
    """The classes and attributes of units and their submodules before sharding, to remove what sharding adds.

    To be made right before units are sharded, and told of right after it by :meth:`note_added`, so that what the user
    sets later stays.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        inside = dict.fromkeys(child for module in modules for child in module.modules())
        self._classes = {child: type(child) for child in inside}
        self._names = {child: set(vars(child)) for child in inside}

    def note_added(self) -> None:
        """Notes which attributes are new."""
        self._names = {child: vars(child).keys() - names for child, names in self._names.items()}

    def restore(self) -> None:
        """Takes off hooks, attributes and classes that sharding has added; parameters stay what they are."""
        forget_sharding(self._classes)
        for child, original in self._classes.items():
            child.__class__ = original
            attributes = vars(child)
            for name in self._names[child]:
                attributes.pop(name, None)
            for name, hooks in attributes.items():
                if name.endswith("_hooks") and isinstance(hooks, dict):
                    for key, hook in list(hooks.items()):
                        # torch wraps some that are called with the module
                        if module_of(getattr(hook, "hook", hook)).startswith(_HOOKS_OF):
                            del hooks[key]
