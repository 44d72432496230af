"""The command line of a run that goes on: ``resume=``, and attempts that torchrun makes after one has failed.

The rank 0 decides where a job goes on, and tells the others over the store of torchrun, if there is one. Without one
every rank looks for itself, in a folder that all of them have to see.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_pp.cli import launch
from lightning_pp.cli.earlier_run import EarlierRun, as_override
from lightning_pp.cli.problems import UserError
from lightning_pp.distributed.launcher_store import LauncherStore, launcher_store

_FOLDER = "folder"
_AUTO = "auto"
# set for the processes that Lightning starts with the command line of this one, which says all already
_DECIDED = "LIGHTNING_PP_RESUME_DECIDED"


def with_what_it_resumes(arguments: Sequence[str]) -> list[str]:
    """The command line of this attempt: that of the run to go on with, if there is one to go on with.

    It names the run as ``resume``, the run's folder as Hydra's, and the newest checkpoint as ``ckpt_path``. The process
    goes to the folder where the run was started, from which relative paths count.

    Raises:
        UserError: ``resume=`` names no run that can go on.
    """
    if _DECIDED in os.environ:
        return list(arguments)
    attempt = _attempt()
    named = _value_of("resume", arguments)
    if named in (None, "null") and attempt == 0:
        return list(arguments)
    store = launcher_store()
    if store is None:
        decided = _decide(arguments, named, attempt, None)
    elif launch.is_rank_zero():
        decided = _decide(arguments, named, attempt, store)
        store.tell(_decision(attempt), json.dumps([decided, os.getcwd()]))
    else:
        decided, folder = json.loads(store.wait_for(_decision(attempt)))
        os.chdir(folder)
    if not launch.launched_from_outside():
        os.environ[_DECIDED] = "1"
    return decided


def remember_folder(folder: str) -> None:
    """Tells later attempts of this job, if torchrun makes any, in which folder the run is; for rank 0."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 and launch.is_rank_zero():
        store = launcher_store()
        if store is not None:
            store.tell(_FOLDER, os.path.abspath(folder))


def _decide(arguments: Sequence[str], named: str | None, attempt: int, store: LauncherStore | None) -> list[str]:
    if "--multirun" in arguments or "-m" in arguments:
        if attempt > 0:
            _say(f"attempt {attempt + 1} of the sweep starts it again: runs of a sweep go on one by one, by resume=")
            return list(arguments)
        raise UserError("resume= goes on with one run, not with a sweep: leave --multirun out")
    if named == _AUTO:
        named = _folder_if_saved(arguments)
        arguments = [each for each in arguments if _key(each) != "resume"]
        if named is None and attempt == 0:
            return list(arguments)
    folder = _folder_of_job(arguments, store) if attempt > 0 else None
    if folder is None and named not in (None, "null"):
        folder = named
    if folder is None:
        _say(f"attempt {attempt + 1}: no run of an earlier attempt is known, so it starts from the beginning")
        return list(arguments)
    run = EarlierRun.at(folder)
    return _going_on(run, arguments, attempt)


def _going_on(run: EarlierRun, arguments: Sequence[str], attempt: int) -> list[str]:
    options = [each for each in launch.overrides_last(arguments) if each not in _overrides_in(arguments)]
    overrides = [each for each in _overrides_in(arguments) if _key(each) not in ("resume", "hydra.run.dir")]
    _enter(run)
    composed = run.overrides_to_go_on(overrides)
    chosen = _value_of("ckpt_path", overrides) if attempt == 0 else None
    folder = as_override(str(run.folder))
    if chosen is None:
        position = run.newest_checkpoint()
        if position is None and attempt == 0:
            raise UserError(
                f"The run {run.folder} has saved no checkpoint, so there is nothing to go on from: start it again."
            )
        composed = [each for each in composed if _key(each) != "ckpt_path"]
        if position is None:
            first = [each for each in run.overrides if _key(each) == "ckpt_path"]
            composed += [each for each in overrides if _key(each) == "ckpt_path"] or first
            _say(f"attempt {attempt + 1} starts from the beginning in {run.folder}: nothing was saved yet")
        else:
            composed.append(f"ckpt_path={as_override(position.path)}")
            for reason in position.passed_over:
                _say(f"a checkpoint is passed over: {reason}")
            which = f"attempt {attempt + 1}" if attempt else "the run"
            _say(f"{which} goes on in {run.folder} from {position.path} (step {position.step})")
    if run.config_folder is not None and not any(each in ("--config-dir", "-cd") for each in options):
        options += ["--config-dir", run.config_folder]
    return [*options, *composed, f"resume={folder}", f"hydra.run.dir={folder}"]


def _folder_if_saved(arguments: Sequence[str]) -> str | None:
    """The folder that ``hydra.run.dir`` names, if a run in it has saved a checkpoint: for jobs that start again."""
    folder = _value_of("hydra.run.dir", arguments)
    if folder is None:
        raise UserError(
            "resume=auto goes on with the run in the folder that hydra.run.dir names, if it has saved something. "
            "Give one that all processes see: hydra.run.dir=/data/run"
        )
    started = Path(folder, ".hydra", "hydra.yaml").is_file()
    return folder if started and EarlierRun.at(folder).has_saved() else None


def _enter(run: EarlierRun) -> None:
    here = Path.cwd()
    if run.working_folder == here:
        return
    try:
        os.chdir(run.working_folder)
    except OSError as error:
        raise UserError(
            f"The run {run.folder} was started in {run.working_folder}, from where its paths count, and that cannot be "
            f"entered: {error.strerror}."
        ) from error
    sys.path.insert(0, os.getcwd())
    _say(f"relative paths count from {run.working_folder}, where the run was started")


def _folder_of_job(arguments: Sequence[str], store: LauncherStore | None) -> str | None:
    """The folder of the run that earlier attempts of this job have made."""
    told = store.told(_FOLDER) if store is not None else None
    given = _value_of("hydra.run.dir", arguments)
    if told is None and given is not None and Path(given, ".hydra", "hydra.yaml").is_file():
        return given
    return told


def _attempt() -> int:
    """How often this job was started before: again by torchrun, or under torchrun by Slurm."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0
    return sum(int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def _decision(attempt: int) -> str:
    return f"attempt/{attempt}/of/{os.environ.get('WORLD_SIZE')}"


def _overrides_in(arguments: Sequence[str]) -> list[str]:
    return [each for each in arguments if not each.startswith("-") and ("=" in each or each.startswith("~"))]


def _key(override: str) -> str:
    return override.partition("=")[0]


def _value_of(key: str, arguments: Sequence[str]) -> str | None:
    """What the last override of ``key`` gives it, without quotes; None where there is none."""
    values = [each for each in arguments if each.startswith(f"{key}=")]
    if not values:
        return None
    if key == "resume" or key == "hydra.run.dir":
        text = values[-1].partition("=")[2]
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    value = OverridesParser.create().parse_override(values[-1]).value()
    return None if value is None else str(value)


def _say(text: str) -> None:
    if launch.is_rank_zero():
        sys.stderr.write(f"lightning-pp: {text}\n")
        sys.stderr.flush()
