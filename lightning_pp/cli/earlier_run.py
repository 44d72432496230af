"""An earlier run: the configuration that Hydra left in its folder, and its newest good checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import lightning_pp.conf  # noqa: F401  (importing it registers the schema)
from lightning_pp.checkpoint.reading.newest_good import checkpoints_in, verify
from lightning_pp.checkpoint.reading.open import open_checkpoint
from lightning_pp.checkpoint.storage.location import is_url
from lightning_pp.cli.problems import UserError
from lightning_pp.errors import CheckpointError

# Of what a run is asked, these say where it begins. A run that goes on begins elsewhere.
WHERE_IT_BEGINS = ("resume", "ckpt_path")
_OWN_CONFIG = "lightning_pp.conf"
_MOST_BYTES_COMPARED = 16 << 30


@dataclass(frozen=True)
class Position:
    """Where a training stands in a checkpoint.

    Attributes:
        path: The checkpoint.
        step: Optimizer steps that are done.
        num_epochs: Epochs whose batches are all done.
        passed_over: Why newer ones cannot be gone on from, newest first.
    """

    path: str
    step: int
    num_epochs: int
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class EarlierRun:
    """A run of ``lightning-pp``.

    Attributes:
        folder: Hydra's folder of it, absolute.
        overrides: What it was asked on the command line, in order.
        config: As it was composed then; interpolations are not resolved.
        working_folder: Where it was started: relative paths count from there.
        config_folder: What its ``--config-dir`` was.
    """

    folder: Path
    overrides: tuple[str, ...]
    config: DictConfig
    working_folder: Path
    config_folder: str | None

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> EarlierRun:
        """Reads what Hydra has left in the folder of a run.

        Raises:
            UserError: There is no such folder, or it is not the folder of a run of ``lightning-pp``.
        """
        folder = Path(os.path.abspath(Path(path).expanduser()))
        if not folder.is_dir():
            raise UserError(f"resume={path} is not a folder (looked from {Path.cwd()}). Name a run's output folder.")
        saved = {name: folder / ".hydra" / f"{name}.yaml" for name in ("overrides", "config", "hydra")}
        missing = [file for file in saved.values() if not file.is_file()]
        if missing:
            raise UserError(
                f"resume={path} is not the output folder of a run: {missing[0]} is missing. Name the folder that the "
                "run printed as its output folder. For a checkpoint alone use ckpt_path=."
            )
        try:
            overrides = tuple(str(each) for each in OmegaConf.load(saved["overrides"]))
            config, hydra = OmegaConf.load(saved["config"]), OmegaConf.load(saved["hydra"])
            sources = {str(each.provider): str(each.path) for each in hydra.hydra.runtime.config_sources}
            working_folder = Path(hydra.hydra.runtime.cwd)
        except (OmegaConfBaseException, OSError, ValueError, TypeError) as error:
            raise UserError(
                f"resume={path}: the configuration in {folder / '.hydra'} cannot be read: {error}"
            ) from error
        if str(sources.get("main")).removeprefix("pkg://") != _OWN_CONFIG or not isinstance(config, DictConfig):
            raise UserError(
                f"resume={path} is a run of another program (its configuration is {sources.get('main')}). Resume it "
                "with that program, from a checkpoint."
            )
        given = sources.get("command-line")
        return cls(folder, overrides, config, working_folder, given and given.removeprefix("file://"))

    def overrides_to_go_on(self, overrides: Iterable[str]) -> list[str]:
        """What composes the configuration of this run with ``overrides`` on top.

        They are those of the run, then what has changed since in the files that it was composed of, then ``overrides``.

        Raises:
            UserError: The configuration cannot be composed any more.
        """
        new = list(overrides)
        replaced = {each.key_or_group for each in _parsed(new)} | set(WHERE_IT_BEGINS)
        earlier = [each for each in _parsed(self.overrides) if each.key_or_group not in WHERE_IT_BEGINS]
        kept = [str(each.input_line) for each in earlier if each.key_or_group not in replaced]
        groups = {key.partition("@")[0] for key in replaced}
        changed = [
            text
            for key, text in self._changes_since([str(each.input_line) for each in earlier])
            if not any(key == each or key.startswith(f"{each}.") for each in groups)
        ]
        return [*kept, *changed, *new]

    def _changes_since(self, overrides: list[str]) -> Iterator[tuple[str, str]]:
        """Keys whose values the run's overrides compose to others now, and overrides that give them what they were."""
        search_path = [f"hydra.searchpath=['file://{self.config_folder}']"]
        try:
            with initialize_config_module(config_module="lightning_pp.conf", version_base="1.3"):
                now = compose("config", overrides + (search_path if self.config_folder else []))
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(
                f"The configuration of the run {self.folder} can no longer be composed: {error}\n"
                f"The configuration that it ran with is in {self.folder / '.hydra' / 'config.yaml'}."
            ) from error
        yield from _differences(_plain(self.config), _plain(now))

    def has_saved(self) -> bool:
        """Whether there is a checkpoint, good or not, on this machine; or a URL, where nobody has looked."""
        places = list(self._places())
        return any(map(is_url, places)) or bool(checkpoints_in(self.folder, *places))

    def newest_checkpoint(self) -> Position | None:
        """The newest good checkpoint with all that a training needs, by its time; None if the run has saved none.

        Up to 16 GiB all bytes of one are compared with their checksums here. Larger ones have to be complete; they are
        compared when the ranks read them.

        Raises:
            UserError: There are checkpoints, and none is good; or the run saves at a URL, which is not searched.
        """
        places, refused = list(self._places()), list[str]()
        for location in checkpoints_in(self.folder, *(place for place in places if not is_url(place))):
            path = Path(str(location))
            try:
                if _size_of(path) <= _MOST_BYTES_COMPARED:
                    verify(path)
                return replace(position_of(path), passed_over=tuple(refused))
            except CheckpointError as error:
                refused.append(f"{path}: {error}")
        if refused:
            raise UserError("The run has no checkpoint that can be resumed from:\n  " + "\n  ".join(refused))
        for url in filter(is_url, places):
            raise UserError(f"The run {self.folder} saves at {url}. Name the checkpoint there: ckpt_path={url}/...")
        return None

    def _places(self) -> Iterator[str]:
        """Where the run saves, as far as its configuration names places outside of its folder."""
        sections = [self.config.get("trainer"), *(self.config.get("callbacks") or {}).values()]
        for section, name in product(sections, ("dirpath", "default_root_dir")):
            try:
                place = section.get(name) if isinstance(section, DictConfig) else None
            except OmegaConfBaseException:  # a place that Hydra makes, which is in the run's folder
                continue
            if place is not None:
                yield place if is_url(str(place)) else str(self.working_folder / place)


def position_of(path: str | os.PathLike[str]) -> Position:
    """Where the training stands in a checkpoint, which is checked for being complete.

    Raises:
        CheckpointError: It is not complete, cannot be read, or has weights alone.
    """
    content = open_checkpoint(path).content
    if "loops" not in content:
        raise CheckpointError(f"{path} has only weights (save_weights_only), so training cannot be resumed from it.")
    progress: Mapping[str, Any] = content["loops"]["fit_loop"]["epoch_progress"]["current"]
    return Position(os.fspath(path), int(content["global_step"]), int(progress["processed"]))


def why_finished(config: DictConfig, position: Position) -> str | None:
    """Why a training at ``position`` has nothing left to do under ``config``; None where it has."""
    max_steps, max_epochs = config.trainer.get("max_steps"), config.trainer.get("max_epochs")
    if max_steps is not None and 0 <= max_steps <= position.step:
        return f"all {position.step} steps of trainer.max_steps={max_steps} are done. Raise it to train more."
    if max_epochs is not None and 0 <= max_epochs <= position.num_epochs:
        return f"all {position.num_epochs} epochs of trainer.max_epochs={max_epochs} are done. Raise it to train more."
    return None


def _size_of(checkpoint: Path) -> int:
    files = checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]
    return sum(file.stat().st_size for file in files if file.is_file())


def _parsed(overrides: Iterable[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise UserError(str(error)) from error


def _plain(config: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    return {key: value for key, value in plain.items() if key not in WHERE_IT_BEGINS}


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in then.items():
        key = f"{prefix}{name}"
        if name not in now:
            yield key, f"++{key}={as_override(value)}"
        elif isinstance(value, dict) and isinstance(now[name], dict):
            yield from _differences(value, now[name], f"{key}.")
        elif value != now[name]:
            yield key, f"{key}={as_override(value)}"


def as_override(value: object) -> str:
    """A value as Hydra reads it on the right of ``=``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_override(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(as_override, value)) + "]"
    text = str(value).replace("'", "\\'")
    return f"'{text}'"
