"""What a config may name: code of allowed packages and of the user's own folder, at any depth; nothing else runs."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
from command import run_forked
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from lightning_pp.conf import build
from lightning_pp.errors import ConfigurationError

REFUSED = [
    *("os.system", "posix.system", "builtins.eval", "builtins.exec", "subprocess.run", "functools.partial"),
    *("hydra.utils.instantiate", "importlib.import_module", "pickle.loads", "shutil.rmtree", "pathlib.Path.unlink"),
    # by the name of something that an allowed package has imported
    *("torch.os.system", "torch.sys.path.append", "torch.os.environ.update", "torch.functools.partial"),
    # within allowed packages
    *(
        "torch.load",
        "torch.serialization.load",
        "torch.hub.load",
        "torch.utils.cpp_extension.load",
        "torch._dynamo.run",
    ),
    *("torch.nn.Module.__init__", "lightning_pp.cli.main", "transformers.dynamic_module_utils.init_hf_modules"),
]


@pytest.mark.parametrize("target", REFUSED)
@pytest.mark.parametrize("nested", [False, True])
def test_target_that_is_not_allowed_is_refused_before_anything_is_called(
    target: str, nested: bool, tmp_path: Path
) -> None:
    marker = tmp_path / "called"
    inner = {"_target_": target, "_args_": [f"touch {marker}"]}
    outer = {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.ModuleList", "modules": [inner]}]}
    with pytest.raises(ConfigurationError, match="is refused") as caught:
        build(OmegaConf.create(outer if nested else inner))
    assert f"_target_={target} is refused" in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("look_up", ["get_method", "get_object", "get_class"])
def test_what_a_target_looks_up_is_checked_too(look_up: str) -> None:
    for given in ({"path": "os.system"}, {"_args_": ["os.system"]}):
        with pytest.raises(ConfigurationError, match="os.system is refused: os is not an allowed package"):
            build({"split": {"_target_": f"hydra.utils.{look_up}", **given}})
    assert build({"_target_": f"hydra.utils.{look_up}", "path": "torch.nn.Linear"}) is torch.nn.Linear


def test_targets_made_by_interpolations_are_checked() -> None:
    config = OmegaConf.create({"name": "os.system", "model": {"_target_": "${name}"}})
    with pytest.raises(ConfigurationError, match="os.system is refused"):
        build(config.model)
    config = OmegaConf.create({"model": {"part": "${oc.decode:'{_target_: os.system}'}"}})
    with pytest.raises((ConfigurationError, InstantiationException)):
        build(config.model)


def test_allowed_targets_are_built() -> None:
    built = build({"wait": {"_target_": "datetime.timedelta", "seconds": 3}, "layer": {"_target_": "torch.nn.ReLU"}})
    assert built["wait"] == timedelta(seconds=3) and isinstance(built["layer"], torch.nn.ReLU)
    assert build({"_target_": "torch.zeros", "_args_": [2]}).tolist() == [0, 0]
    assert build(None) is None


def test_environment_adds_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"_target_": "fractions.Fraction", "_args_": [1, 2]}
    with pytest.raises(ConfigurationError, match="LIGHTNING_PP_ALLOWED_PACKAGES=fractions"):
        build(config)
    monkeypatch.setenv("LIGHTNING_PP_ALLOWED_PACKAGES", "other:fractions")
    assert build(config) == 0.5


def test_modules_of_the_folder_where_the_run_starts_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"targets_{folder}.py").write_text("def made():\n    return 'made'\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.chdir(tmp_path / "here")
    assert build({"_target_": "targets_here.made"}) == "made"
    with pytest.raises(ConfigurationError, match="targets_elsewhere is not an allowed package"):
        build({"_target_": "targets_elsewhere.made"})
    assert "targets_elsewhere" not in sys.modules


@pytest.mark.parametrize("module", [os, pytest])
def test_folders_of_python_and_of_packages_are_not_the_users(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"_target_": "shutil.copy", "src": __file__, "dst": str(tmp_path / "copied")}
    folder = Path(module.__file__ or "").parent if module is os else Path(pytest.__file__).parents[1]
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(folder / "pdb.py"), raising=False)
    monkeypatch.chdir(folder)
    for target in (config, {"_target_": "_pytest.main.main"}):
        with pytest.raises(ConfigurationError, match="is refused"):
            build(target)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_is_told_with_its_place() -> None:
    with pytest.raises(ConfigurationError, match=r"layers\.0\._target_=torch\.nn\.Linnear cannot be found"):
        build({"layers": [{"_target_": "torch.nn.Linnear"}]})
    for wrong in (3, "torch..nn", "os.system()", ""):
        with pytest.raises(ConfigurationError, match="is not the dotted name"):
            build({"_target_": wrong})
    with pytest.raises(ConfigurationError, match="_target_ is not given: name the class"):
        build({"_target_": None})


@pytest.mark.parametrize("module", ["lightning_pp", "lightning_pp.cli.plan.command"])
def test_commands_refuse_with_one_sentence(module: str, tmp_path: Path) -> None:
    finished = run_forked(["model._target_=os.system", "logger=none"], tmp_path, module=module)
    assert finished.code == 1
    assert "model._target_=os.system is refused: os is not an allowed package" in finished.output
    assert "Traceback" not in finished.output
