"""Makes the schema of a class from its signature and docstring, so that an option is described in one place.

The class is read from its source file. Importing it would import torch, and typos are reported before that.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, make_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from omegaconf import MISSING

_PLAIN = {"int", "float", "bool", "str", "None", "Any"}
_PATHS = {"Path", "PathLike[str]"}
_ROOT = Path(__file__).parents[2]


def conf_of(target: str, given: Mapping[str, tuple[str, Any]] | None = None, base: type = object) -> type[Any]:
    """A dataclass with a field for each argument of a class, its default, its type, and as metadata its ``help``.

    Args:
        target: Where the class is, in this package.
        given: Type, and default or function that makes it, of the arguments that YAML has otherwise than Python.
        base: The schema of the class that takes ``**arguments``.
    """
    module, _, name = target.rpartition(".")
    conf_class = _Names(module)[name]
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


class _Names(dict[str, Any]):
    """Names that a module of this package defines or imports from this package: values, and outlines of classes.

    The outline of a class has its docstring, its parents of this package, and its ``__init__``, which nobody calls.
    """

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> Any:
        for node in ast.walk(_parsed(self._module)):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if any(one.name == name for one in names):
                    return _Names(module)[name] if module.startswith("lightning_pp.") else object
                case ast.ClassDef(name=found) if found == name:
                    return self._outline(node)
                case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                    return self._value(value)
        raise KeyError(name)

    def _outline(self, node: ast.ClassDef) -> type:
        parents = [self._value(base) for base in node.bases if isinstance(base, ast.Name)]
        inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        body = _Names(self._module)
        exec(compile(ast.Module([*inits], []), self._module, "exec"), {}, body)
        body["__doc__"] = ast.get_docstring(node, clean=False)
        return type(node.name, tuple(parent for parent in parents if parent is not object), body)

    def _value(self, expression: ast.expr) -> Any:
        return eval(compile(ast.Expression(expression), self._module, "eval"), {}, self)


@cache
def _parsed(module: str) -> ast.Module:
    path = _ROOT.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8"))


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
