"""The command line of a resumed run: ``resume=``, and attempts that torchrun makes after a failure.

The rank 0 decides where a job goes on, and tells the others over the store of torchrun, if there is one. Without one
every rank looks for itself, in a folder that all of them have to see.

Which attempt this is, is counted in the store as well. With one torchrun on each node every one counts the failures of
its own processes alone, so their ``TORCHELASTIC_RESTART_COUNT`` differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_pp.cli import launch
from lightning_pp.cli.earlier_run import EarlierRun, as_override
from lightning_pp.cli.problems import UserError
from lightning_pp.distributed.launcher_store import launcher_store, ranks_of_launcher
from lightning_pp.distributed.meeting import TextStore, meet

_RANKS_COME_WITHIN = timedelta(minutes=5)
_COMMAND = "command"
_AUTO = "auto"


def with_what_it_resumes(arguments: Sequence[str]) -> list[str]:
    """The command line of this attempt: that of the run to go on with, if there is one to go on with.

    It names the run as ``resume``, the run's folder as Hydra's, and the newest checkpoint as ``ckpt_path``. The process
    goes to the folder where the run was started, from which relative paths count.

    Raises:
        UserError: ``resume=`` names no run that can go on; or the ranks do not agree on which attempt this is.
    """
    if launch.DECIDED in os.environ:
        return list(arguments)
    named = _value_of("resume", arguments)
    try:
        store = launcher_store()
        if store is not None:
            return _as_rank_zero_decides(arguments, named, store)
    except (ConnectionError, TimeoutError) as error:
        raise UserError(str(error)) from error
    attempt = _attempt_without_store(named)
    if named is None and attempt == 0:
        return list(arguments)
    decided = _decide(arguments, named, attempt, None)
    if not launch.launched_from_outside():
        os.environ[launch.DECIDED] = "1"
    return decided


def remember_folder(folder: str) -> None:
    """Tells later attempts of this job, if torchrun makes any, in which folder the run is; for rank 0."""
    if launch.is_rank_zero() and (store := launcher_store()) is not None and (command := store.read(_COMMAND)):
        store.write(_folder(command), os.path.abspath(folder))


def _as_rank_zero_decides(arguments: Sequence[str], named: str | None, store: TextStore) -> list[str]:
    name, _ = meet(store, *ranks_of_launcher(), _RANKS_COME_WITHIN)
    if launch.is_rank_zero():
        return _decide_for_all(arguments, named, store, f"{name}/decision")
    decided = json.loads(store.wait_for(f"{name}/decision"))
    if "refused" in decided:
        raise UserError(decided["refused"])
    if decided["arguments"] is None:
        return list(arguments)
    os.chdir(decided["folder"])
    return list(decided["arguments"])


def _decide_for_all(arguments: Sequence[str], named: str | None, store: TextStore, decision: str) -> list[str]:
    # a script that torchrun starts may run one command after the other
    command = hashlib.sha256(json.dumps(list(arguments)).encode()).hexdigest()
    store.write(_COMMAND, command)
    attempt = store.count(f"{command}/attempts") - 1 + _restarts_by_slurm()
    if named is None and attempt == 0:
        store.write(decision, json.dumps({"arguments": None}))
        return list(arguments)
    try:
        decided = _decide(arguments, named, attempt, store.read(_folder(command)))
    except UserError as error:
        store.write(decision, json.dumps({"refused": str(error)}))
        raise
    store.write(decision, json.dumps({"arguments": decided, "folder": os.getcwd()}))
    return decided


def _attempt_without_store(named: str | None) -> int:
    """How often this job was started before, as far as this process alone knows, and the others know as well.

    Raises:
        UserError: torchrun may start it again on several nodes, and nothing says where it would go on.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + _restarts_by_slurm()
    if named is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise UserError(
            "On several nodes torchrun may start this job again (--max-restarts). The new processes could not find "
            "the earlier run, because they cannot reach the store of its rendezvous. Give a folder that all nodes "
            "see, hydra.run.dir=/data/run resume=auto; or --max-restarts 0."
        )
    return _restarts_by_slurm()


def _restarts_by_slurm() -> int:
    """How often Slurm has requeued the job in which torchrun runs."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _folder(command: str) -> str:
    return f"{command}/folder"


def _decide(arguments: Sequence[str], named: str | None, attempt: int, earlier: str | None) -> list[str]:
    """The command line of this attempt; ``earlier`` is the folder of the run that earlier ones have made, if known."""
    if "--multirun" in arguments or "-m" in arguments:
        if attempt > 0:
            _say(f"attempt {attempt + 1} starts the sweep again. Resume the runs of a sweep one by one, with resume=")
            return list(arguments)
        raise UserError("resume= continues one run, not a sweep. Leave --multirun out")
    if named == _AUTO:
        named = _folder_if_saved(arguments)
        arguments = [each for each in arguments if _key(each) != "resume"]
        if named is None and attempt == 0:
            return list(arguments)
    folder = earlier or _folder_with_run(arguments) if attempt > 0 else None
    folder = folder or named
    if folder is None:
        _say(f"attempt {attempt + 1}: no run of an earlier attempt is known, so it starts from the beginning")
        return list(arguments)
    run = EarlierRun.at(folder)
    return _going_on(run, arguments, attempt)


def _going_on(run: EarlierRun, arguments: Sequence[str], attempt: int) -> list[str]:
    options, overrides = launch.split_overrides(arguments)
    overrides = [each for each in overrides if _key(each) not in ("resume", "hydra.run.dir")]
    _enter(run)
    composed = run.overrides_to_go_on(overrides)
    chosen = _value_of("ckpt_path", overrides) if attempt == 0 else None
    folder = as_override(str(run.folder))
    if chosen is None:
        position = run.newest_checkpoint()
        if position is None and attempt == 0:
            raise UserError(f"The run {run.folder} has saved no checkpoint, so it cannot be resumed. Start it again.")
        composed = [each for each in composed if _key(each) != "ckpt_path"]
        if position is None:
            first = [each for each in run.overrides if _key(each) == "ckpt_path"]
            composed += [each for each in overrides if _key(each) == "ckpt_path"] or first
            _say(f"attempt {attempt + 1} starts from the beginning in {run.folder}: nothing was saved yet")
        else:
            composed.append(f"ckpt_path={as_override(position.path)}")
            for reason in position.passed_over:
                _say(f"skipped a checkpoint: {reason}")
            which = f"attempt {attempt + 1}" if attempt else "the run"
            _say(f"{which} continues in {run.folder} from {position.path} (step {position.step})")
    if run.config_folder is not None and not any(each in ("--config-dir", "-cd") for each in options):
        options += ["--config-dir", run.config_folder]
    return [*options, *composed, f"resume={folder}", f"hydra.run.dir={folder}"]


def _folder_if_saved(arguments: Sequence[str]) -> str | None:
    """The folder that ``hydra.run.dir`` names, if a run in it has saved a checkpoint: for jobs that start again."""
    if _value_of("hydra.run.dir", arguments) is None:
        raise UserError(
            "resume=auto continues the run in the folder of hydra.run.dir, if it has saved a checkpoint. Give a folder "
            "that all processes see: hydra.run.dir=/data/run"
        )
    folder = _folder_with_run(arguments)
    return folder if folder is not None and EarlierRun.at(folder).has_saved() else None


def _enter(run: EarlierRun) -> None:
    here = Path.cwd()
    if run.working_folder == here:
        return
    try:
        os.chdir(run.working_folder)
    except OSError as error:
        raise UserError(
            f"The run {run.folder} was started in {run.working_folder}, and its relative paths start there. That "
            f"folder cannot be entered: {error.strerror}."
        ) from error
    sys.path.insert(0, os.getcwd())
    _say(f"relative paths start at {run.working_folder}, where the run was started")


def _folder_with_run(arguments: Sequence[str]) -> str | None:
    """The folder that ``hydra.run.dir`` names, if there is a run in it."""
    given = _value_of("hydra.run.dir", arguments)
    return given if given is not None and Path(given, ".hydra", "hydra.yaml").is_file() else None


def _key(override: str) -> str:
    return override.partition("=")[0]


def _value_of(key: str, arguments: Sequence[str]) -> str | None:
    """What the last override of ``key`` gives it, without quotes; None where there is none."""
    values = [each for each in arguments if each.startswith(f"{key}=")]
    if not values:
        return None
    if key == "resume" or key == "hydra.run.dir":
        text = values[-1].partition("=")[2]
        if key == "resume" and text == "null":
            return None
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    value = OverridesParser.create().parse_override(values[-1]).value()
    return None if value is None else str(value)


def _say(text: str) -> None:
    if launch.is_rank_zero():
        sys.stderr.write(f"lightning-pp: {text}\n")
        sys.stderr.flush()
