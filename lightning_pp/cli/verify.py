"""``lightning-pp-verify``: compares this training as a pipeline with one device, on the CPU, in a minute."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from lightning_pp.cli.hydra_app.application import run_task
from lightning_pp.cli.problems import UserError, check_choices, refused_by, user_errors
from lightning_pp.conf.targets import build, check_targets_of_run
from lightning_pp.versions import answer_version

if TYPE_CHECKING:
    from lightning_pp.verification import Verification

_COMMAND = "lightning-pp-verify"
#: What of the trainer changes the training itself.
_TRAINER = (
    *("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("use_distributed_sampler", "reload_dataloaders_every_n_epochs", "detect_anomaly"),
)
#: One pipeline on the CPU, which starts from the weights that the model is made with.
_STRATEGY = {
    "data_parallel_size": 1,
    "data_parallel_replicate_size": 1,
    "process_group_backend": None,
    "meta_init": False,
    "initial_weights": None,
    "save_costs": None,
    "flight_recorder_dirpath": None,
}


def main() -> None:
    """Entry point of the command."""
    sys.path.insert(0, os.getcwd())  # modules in the user's own folder are found, as with `python -m`
    answer_version(sys.argv[1:], _COMMAND)
    with refused_by(_COMMAND):
        check_choices(sys.argv[1:])
    run_task(_task, "pkg://lightning_pp.conf", "verify", "1.3", _COMMAND)


def _task(config: DictConfig) -> None:
    with refused_by(_COMMAND), user_errors():
        result = verify_config(config)
    sys.stdout.write(f"{result}\n")
    if not result.equal:
        sys.exit(1)


def verify_config(config: DictConfig) -> Verification:
    """:func:`lightning_pp.verify` of what ``config`` builds."""
    from lightning_pp.verification import verify

    check_targets_of_run(config)
    strategy = _plain(config.strategy)
    if not str(strategy.get("_target_")).endswith("PipelineParallelStrategy"):
        raise UserError(f"strategy={strategy.get('_target_')} is not a pipeline, so there is nothing to compare.")
    size, devices = strategy.get("pipeline_parallel_size"), config.trainer.devices
    processes = next((number for number in (size, devices) if isinstance(number, int) and number > 1), 2)
    strategy |= {**_STRATEGY, "pipeline_parallel_size": processes}
    callbacks = [_plain(each) for each in config.callbacks.values() if each is not None]
    result = verify(
        partial(build, _plain(config.model)),
        partial(build, _plain(config.data)),
        partial(build, strategy),
        devices=processes,
        steps=config.steps,
        seed=config.seed,
        callbacks=partial(build, callbacks),
        trainer={name: config.trainer[name] for name in _TRAINER if config.trainer.get(name) is not None},
    )
    if (replicas := config.strategy.get("data_parallel_size")) not in (None, 1, "auto"):
        result.notes.append(f"data_parallel_size=1, not {replicas}: one pipeline is compared")
    return result


def _plain(config: DictConfig) -> Any:
    """A part of the config as plain values, which can be sent to other processes."""
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


if __name__ == "__main__":
    main()
