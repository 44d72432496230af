"""``lightning-pp-plan``: what a run would look like, without training, in one process and without devices.

One plan, in order::

    Hydra       composes the same config as `lightning-pp`, with what PlanConf adds
    build       data, strategy and model, whose parameters have no memory
    cut         by a dry run on the first batch, through the code that training cuts with
    costs       measured ones, from a file or by running units alone (--measure), or estimates from FLOPs and bytes
    schedules   every one built and simulated under these costs
    report      stages as a tree, memory of each rank, the table of schedules, the chosen one as a picture; files

``lightning-pp-plan --search`` compares plans of all sizes instead: see :mod:`lightning_pp.cli.plan.search`.
``lightning-pp-plan --check my_package.my_module:MyModule`` needs no config: see :mod:`lightning_pp.cli.plan.check`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from omegaconf import DictConfig

from lightning_pp.cli.hydra_app.application import run_task
from lightning_pp.cli.problems import check_choices, refused_by, user_errors
from lightning_pp.versions import answer_version

_COMMAND = "lightning-pp-plan"
_FLAGS = {"--check": "check=true", "--measure": "measure=true", "--search": "search=true"}


def main() -> None:
    """Entry point of the command."""
    sys.path.insert(0, os.getcwd())  # modules in the user's own folder are found, as with `python -m`
    arguments = sys.argv[1:]
    answer_version(arguments, _COMMAND)
    if "--check" in arguments and _names_a_class(arguments):
        check_class(arguments)
        return
    with refused_by(_COMMAND):
        check_choices(arguments)
    sys.argv[1:] = [_FLAGS.get(argument, argument) for argument in arguments]
    run_task(run_plan, "pkg://lightning_pp.conf", "plan", "1.3", _COMMAND)


def _names_a_class(arguments: Sequence[str]) -> bool:
    """Whether what follows ``--check`` is meant as a class (``package.module:Class``), not an override or nothing."""
    following = arguments[list(arguments).index("--check") + 1 :]
    return bool(following) and "=" not in following[0] and not following[0].startswith(("-", "~"))


def check_class(arguments: Sequence[str]) -> None:
    """``--check package.module:Class ...``; what cannot be cut ends the process with code 1."""
    from lightning_pp.cli.plan.check import run_check

    with refused_by(_COMMAND), user_errors():
        run_check(arguments)


def run_plan(config: DictConfig) -> None:
    """Makes and prints the plan that ``config`` asks for; what is wrong with it ends the process with code 1."""
    from lightning_pp.cli.plan.run import make_plan
    from lightning_pp.cli.plan.search.run import search_plans

    with refused_by(_COMMAND), user_errors():
        if config.search:
            search_plans(config)
        else:
            make_plan(config)


if __name__ == "__main__":
    main()
