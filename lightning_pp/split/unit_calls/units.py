"""Finding the units of a model: the submodules that live whole on one stage."""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn

from lightning_pp.errors import ConfigurationError


def discover_units(module: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Names the units of ``module``, in registration order.

    Without ``patterns``, the units are the children of every outermost block list (a ``ModuleList``, ``Sequential`` or
    ``ModuleDict`` in which a class of parameter-owning children repeats: encoder and decoder give two lists, the stages
    of a conv net four) and every other parameter-owning module beside them. A list in a list gives its own children.
    With ``patterns``, the modules whose names match (exactly, or as a shell pattern such as ``model.layers.*``) take
    the place of the block lists.

    A parameter that belongs to no unit (one at the root, say) is owned by the stages that use it.

    Args:
        module: The whole model, usually a LightningModule.
        patterns: Names or shell patterns of modules that must stay whole.

    Returns:
        Fully qualified name to module. Units are never nested in each other.

    Raises:
        ConfigurationError: A pattern matches no module that owns parameters, or two units would be nested.
    """
    if patterns is not None:
        chosen = _match_patterns(module, patterns)
    else:
        chosen = _repeated_blocks(module)
    units: dict[str, nn.Module] = {}
    _collect("", module, chosen, units, seen=set())
    return units


def refine_unit(name: str, unit: nn.Module) -> dict[str, nn.Module]:
    """The units one level below ``unit``, for a unit whose children the user's step calls one by one.

    Children without a forward of their own (lists of modules) give theirs in their place.
    """
    found: dict[str, nn.Module] = {}
    for child_name, child in unit.named_children():
        child_name = f"{name}.{child_name}" if name else child_name
        if _is_callable_module(child):
            found |= {child_name: child} if owns_parameters(child) else {}
        else:
            found |= refine_unit(child_name, child)
    return found


def with_refined(units: Mapping[str, nn.Module], names: Collection[str]) -> dict[str, nn.Module]:
    """``units`` with :func:`refine_unit` of each of ``names`` in its place, no module twice."""
    result: dict[str, nn.Module] = {}
    for name, unit in units.items():
        if name not in names:
            result[name] = unit
            continue
        known = set(result.values())
        result |= {child_name: child for child_name, child in refine_unit(name, unit).items() if child not in known}
    return result


def most_units(module: nn.Module, patterns: Sequence[str] | None = None) -> int:
    """How many units ``module`` has if its step calls every block of a list as such, and everything else in parts.

    A step that calls the parts of blocks one by one has more; only recording it tells.
    """
    blocks = set() if patterns is not None else _repeated_blocks(module)

    def parts(name: str, unit: nn.Module) -> int:
        children = refine_unit(name, unit)
        if unit in blocks or not children:
            return 1
        return sum(parts(child_name, child) for child_name, child in children.items())

    units = discover_units(module, patterns)
    return len(units) if patterns is not None else sum(parts(name, unit) for name, unit in units.items())


def owns_parameters(module: nn.Module) -> bool:
    """Whether ``module`` or one of its submodules has a parameter."""
    return next(module.parameters(), None) is not None


def _match_patterns(module: nn.Module, patterns: Sequence[str]) -> set[nn.Module]:
    if isinstance(patterns, str):
        patterns = [patterns]
    # a module may have several names, and any of them will do
    named = module.named_modules(remove_duplicate=False)
    candidates = {name: child for name, child in named if name and owns_parameters(child)}
    chosen: set[nn.Module] = set()
    names: list[str] = []
    for pattern in patterns:
        # `*` stands for one level, so that `layers.*` does not also match `layers.0.mlp`
        matched = [
            name for name in candidates if fnmatch.fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")
        ] or [name for name in candidates if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            close = difflib.get_close_matches(pattern, candidates, n=5, cutoff=0.3) or list(candidates)[:5]
            raise ConfigurationError(
                f"units={pattern!r} matches none of the {len(candidates)} modules of {type(module).__name__} that own "
                f"parameters. The closest names are: {', '.join(close)}."
            )
        names += matched
        chosen |= {candidates[name] for name in matched}
    for name in names:
        inside = next((other for other in names if name.startswith(other + ".")), None)
        if inside is not None:
            raise ConfigurationError(
                f"units matches {inside!r} and also {name!r}, which lies inside it. A unit lives whole on one stage, "
                "so keep one of the two."
            )
    return chosen


def _repeated_blocks(module: nn.Module) -> set[nn.Module]:
    blocks: set[nn.Module] = set()

    def descend(parent: nn.Module) -> None:
        children = [child for child in parent.children() if owns_parameters(child)]
        if is_block_list(parent):
            blocks.update(refine_unit("", parent).values())
            return
        for child in children:
            descend(child)

    descend(module)
    return blocks


def is_block_list(module: nn.Module) -> bool:
    """Whether ``module`` is a container with several parameter-owning children of one class."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return False
    classes = Counter(type(child) for child in module.children() if owns_parameters(child))
    return bool(classes) and max(classes.values()) >= 2


def _collect(
    name: str, module: nn.Module, chosen: Iterable[nn.Module], units: dict[str, nn.Module], seen: set[nn.Module]
) -> None:
    if module in seen or not owns_parameters(module):
        return
    seen.add(module)
    chosen = set(chosen)
    holds_chosen = any(child in chosen for child in module.modules() if child is not module)
    if module in chosen or (name and not holds_chosen and _is_callable_module(module)):
        units[name] = module
        seen.update(module.modules())
        return
    for child_name, child in module.named_children():
        _collect(f"{name}.{child_name}" if name else child_name, child, chosen, units, seen)


def _is_callable_module(module: nn.Module) -> bool:
    """Lists and dicts of modules have no forward of their own, unless a class derived from them has one."""
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward or not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
