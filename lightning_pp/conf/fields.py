"""Makes the schema of a class from its own signature and docstring, so that an option is told in one place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, make_dataclass
from functools import partial
from importlib import import_module
from typing import Any

from omegaconf import MISSING

_PLAIN = {"int", "float", "bool", "str", "None", "Any"}
_PATHS = {"Path", "PathLike[str]"}


def conf_of(target: str, given: Mapping[str, tuple[str, Any]] | None = None, base: type = object) -> type[Any]:
    """A dataclass with a field for each argument of a class, its default, its type, and as metadata its ``help``.

    Args:
        target: Where the class is.
        given: Type, and default or function that makes it, of the arguments that YAML has otherwise than Python.
        base: The schema of the class that takes ``**arguments``.
    """
    module, _, name = target.rpartition(".")
    conf_class = getattr(import_module(module), name)
    meanings = helps(conf_class)
    fields: list[Any] = [("_target_", "str", target)]
    for parameter in inspect.signature(conf_class).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        default = MISSING if parameter.default is parameter.empty else parameter.default
        kind, default = (given or {}).get(parameter.name, (_yaml_type(str(parameter.annotation), default), default))
        if isinstance(default, tuple):
            default = partial(list, default)
        made: dict[str, Any] = {"default_factory" if callable(default) else "default": default}
        fields.append((parameter.name, kind, field(**made, metadata={"help": meanings.get(parameter.name, "")})))
    made_class = make_dataclass(f"{name}Conf", fields, bases=(base,))
    made_class.__module__ = "lightning_pp.conf.schema"  # where the names in annotations are looked up
    return made_class


def helps(documented: type) -> dict[str, str]:
    """What the docstrings of a class and its parents say of each argument or attribute, in the words of YAML."""
    return {name: text for each in reversed(documented.__mro__) for name, text in _sections(each)}


def _sections(documented: type) -> Iterator[tuple[str, str]]:
    text = inspect.cleandoc(vars(documented).get("__doc__") or "")
    for section in re.findall(r"^(?:Args|Attributes):\n((?: .*\n?|\n(?= ))*)", text, re.MULTILINE):
        for name, meaning in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
            yield name, _in_yaml(" ".join(meaning.split()))


def _in_yaml(text: str) -> str:
    text = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", text.replace("``", "`"))
    text = re.sub(r'`"([\w.-]+)"`', r"`\1`", text)
    words = {"None": "null", "True": "true", "False": "false"}
    return re.sub(r"(?<!=)\b(None|True|False)\b", lambda found: words[found[0]], text)


def _yaml_type(annotation: str, default: object) -> str:
    """The nearest type that OmegaConf has: one list, or a union of plain types; a path and a word are text."""
    kinds = [each.removeprefix("os.") for each in annotation.split(" | ")]
    is_word = isinstance(default, str) and default != MISSING
    sequence = re.search(r"Sequence\[(\w+)\]", annotation)
    if sequence and not is_word and _PLAIN.issuperset({*kinds} - {sequence[0]}):
        return f"list[{sequence[1]}]" + " | None" * ("None" in kinds)
    # an alias whose values are words is told by its default
    names = ["str" if is_word and re.fullmatch(r"[A-Z]\w+|Literal\[.*\]", each) else each for each in kinds]
    names = [each for each in names if each not in _PATHS]
    return " | ".join(dict.fromkeys(names)) if _PLAIN.issuperset(names) else "Any"
