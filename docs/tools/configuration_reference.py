"""Writes the page on configuration from groups and schema: ``python docs/tools/configuration_reference.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING as REQUIRED
from omegaconf import OmegaConf

from lightning_pp.conf import schema
from lightning_pp.conf.fields import helps
from lightning_pp.conf.search_path import yaml_folders

DOCUMENT = Path(__file__).parents[1] / "training" / "configuration.md"
CONF, _ = yaml_folders()
GROUPS = ("trainer", "strategy", "schedule", "model", "optimizer", "data", "logger", "callbacks", "launcher")
COMMANDS = {
    "lightning-pp": schema.CommandConf,
    "lightning-pp-plan": schema.PlanConf,
    "lightning-pp-verify": schema.VerifyConf,
}
HEAD = """# Configuration reference

<!-- made by python docs/tools/configuration_reference.py from conf/, its schema, and docstrings of what it builds -->

Every value of a run, by config group. `lightning-pp GROUP=OPTION` chooses an option, `lightning-pp GROUP.FIELD=VALUE`
changes a value, and `lightning-pp --cfg job` prints the result. [Recipes and configuration](recipes.md) has an
introduction. A *required* field needs a value if the option does not set it. `any` means several types, named in the
text. Longer explanations are below the tables.
"""
MOST_WORDS = 30  # of a cell
TYPES = {"Any": "any", "None": "null", "list[str]": "list of str", "list[float]": "list of float"}
TYPES["dict[str, Any]"] = "mapping"


class Option(NamedTuple):
    """One option of a group.

    Attributes:
        name: As it is chosen.
        meaning: The comment at the head of its file.
        bases: What its file is made of: other options of the group, or a schema.
        values: What it sets besides.
    """

    name: str
    meaning: str
    bases: list[str]
    values: dict[str, Any]


def document() -> str:
    """The page of today."""
    commands = "\n".join(_class(conf, f"What `{name}` takes") for name, conf in COMMANDS.items())
    return "\n".join([HEAD, commands, *(_group(name) for name in GROUPS)])


def options(group: str) -> list[Option]:
    """All options of a group, by name."""
    return [_option(path) for path in sorted((CONF / group).glob("*.yaml"))]


def meaning_of(conf: type, field: Field[Any]) -> str:
    """What a field of a schema is for: made of a class, as that says, or as the schema's own docstring says."""
    return str(field.metadata.get("help") or helps(conf)[field.name])


def _option(path: Path) -> Option:
    comments = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    values = {str(key): value for key, value in content.items() if key != "defaults"}
    bases = [str(each) for each in content.get("defaults", []) if each != "_self_"]
    return Option(path.stem, " ".join(line for line in comments if not line.startswith("@")), bases, values)


def _group(group: str) -> str:
    rows = [f"| `{each.name}` | {each.meaning} | {_settings(each)} |" for each in options(group)]
    parts = [f"## {group}\n", "\n".join(["| option | meaning | sets |", "|---|---|---|", *rows]) + "\n"]
    return "\n".join([*parts, *(_class(conf, "Fields") for conf in _schemas(group))])


def _settings(option: Option) -> str:
    what = [f"`{name}={_yaml(value)}`" for name, value in _flat(option.values)]
    own = [f"what `{base}` sets" for base in option.bases if not base.endswith("_schema")]
    return ", ".join([*own, *what]) or "nothing"


def _schemas(group: str) -> Iterator[type]:
    """The classes whose instances an option of the group is checked against, each once."""
    names = {base for each in options(group) for base in each.bases if base.endswith("_schema")}
    registered = {f"{name}_schema": conf for name, conf in _registered(group).items()}
    yield from (registered[name] for name in sorted(names))


def _registered(group: str) -> dict[str, type]:
    schema.register()
    nodes = ConfigStore.instance().repo.get(group, {})
    types = {name: OmegaConf.get_type(node.node) for name, node in nodes.items() if name.endswith("_schema.yaml")}
    return {name.removesuffix("_schema.yaml"): conf for name, conf in types.items() if conf is not None}


def _class(conf: type, title: str) -> str:
    target = next((each.default for each in fields(conf) if each.name == "_target_"), None)
    heading = f"### {title} of `{target}`" if target else f"## {title}"
    rows = [
        row for each in fields(conf) if not each.name.startswith("_") for row in _rows(each, meaning_of(conf, each))
    ]
    cells = [f"| `{name}` | {kind} | {default} | {_parts(meaning)[0]} |" for name, kind, default, meaning in rows]
    more = [f"- `{name}`: {_parts(meaning)[1]}" for name, _, _, meaning in rows if _parts(meaning)[1]]
    lines = [heading, "", "| field | type | default | meaning |", "|---|---|---|---|", *cells]
    return "\n".join([*lines, "", "More on these fields:", "", *more] if more else lines) + "\n"


def _parts(meaning: str) -> tuple[str, str]:
    """The sentences that a cell holds, at least one, and those that stand below the table."""
    sentences = re.split(r"(?<=\.) (?=[A-Z`]|null|true|false)", meaning)
    fitting = [n for n in range(1, len(sentences) + 1) if len(" ".join(sentences[:n]).split()) <= MOST_WORDS]
    kept = max(fitting, default=1)
    return " ".join(sentences[:kept]), " ".join(sentences[kept:])


def _rows(field: Field[Any], meaning: str) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of a field, or of the group within it and of each of its fields."""
    default = field.default if field.default is not MISSING else _factory(field)()
    if not hasattr(default, "_target_"):
        yield field.name, _type(str(field.type)), _default(default), meaning
        return
    yield field.name, "group", "as below", meaning
    for each in fields(default):
        if not each.name.startswith("_"):
            name, kind = f"{field.name}.{each.name}", _type(str(each.type))
            yield name, kind, _default(each.default), meaning_of(type(default), each)


def _factory(field: Field[Any]) -> Any:
    return field.default_factory


def _type(annotation: str) -> str:
    members = getattr(schema, annotation, None)
    if isinstance(members, type) and issubclass(members, Enum):
        return " or ".join(f"`{each.name}`" for each in members)
    return " or ".join(TYPES.get(part, part) for part in annotation.split(" | "))


def _default(value: object) -> str:
    return "required" if value == REQUIRED else f"`{_yaml(value)}`"


def _yaml(value: object) -> str:
    """A value as the command line and the files have it."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(_yaml(each) for each in value)}]"
    if value == "":
        return '""'
    return str(value)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif value == REQUIRED:
            yield f"{prefix}{name}", "???"
        else:
            yield f"{prefix}{name}", value


if __name__ == "__main__":
    DOCUMENT.write_text(document())
