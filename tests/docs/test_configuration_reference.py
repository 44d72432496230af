"""The configuration reference is that of the schema and of the config groups."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import lightning_pp.conf  # noqa: F401  registers the schema
from lightning_pp.schedule import available_schedules

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "configuration_reference", DOCS / "tools" / "configuration_reference.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_today(reference: ModuleType) -> None:
    remedy = "run python docs/tools/configuration_reference.py"
    assert reference.DOCUMENT.read_text() == reference.document(), remedy


def test_every_value_that_a_run_has_is_on_the_page(reference: ModuleType) -> None:
    """Against Hydra: the names and the values of the composed default run, where no recipe has changed them."""
    page = reference.DOCUMENT.read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| [^|]+ \| (?:`([^`]*)`|required|as below) \|", page, re.MULTILINE))
    with initialize_config_module(version_base="1.3", config_module="lightning_pp.conf"):
        config = compose("config")
    strategy = OmegaConf.to_container(config.strategy)
    assert isinstance(strategy, dict)
    del strategy["_target_"]
    for name, value in strategy.items():
        if name not in ("schedule", "num_microbatches", "timeout"):  # set by the recipe; a group
            assert OmegaConf.create(f"x: {rows[name]}").x == value, name
    for group in ("trainer", "model", "data", "logger"):
        assert {str(name) for name in config[group] if not str(name).startswith("_")} <= rows.keys(), group


def test_every_option_is_on_the_page(reference: ModuleType) -> None:
    assert {each.name for each in reference.options("schedule")} == {*available_schedules(), "auto"}
    for group in reference.GROUPS:
        for option in reference.options(group):
            assert option.meaning, f"{group}/{option.name}.yaml has no comment at its head"
            assert f"| `{option.name}` | {option.meaning} |" in reference.DOCUMENT.read_text()
