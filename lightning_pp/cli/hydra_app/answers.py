"""What a command answers without composing a run: ``--version``, and ``--completion`` of a shell."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning_pp.cli.hydra_app.completion import SHELLS, completion_script
from lightning_pp.cli.problems import UserError, print_problem
from lightning_pp.versions import version_line

_CONFIGS = {"lightning-pp": "config", "lightning-pp-plan": "plan", "lightning-pp-verify": "verify"}


def answer_alone(arguments: Sequence[str], command: str) -> None:
    """Answers and ends the process, if that is what ``arguments`` ask for.

    Raises:
        SystemExit: It was answered, or cannot be.
    """
    if "--version" in arguments:
        sys.stdout.write(f"{version_line(command)}\n")
        sys.exit(0)
    if "--completion" not in arguments:
        return
    shell = "".join([*arguments, ""][list(arguments).index("--completion") + 1])
    if shell not in SHELLS:
        print_problem(UserError(f"--completion takes the name of a shell: {' or '.join(SHELLS)}"), command)
        sys.exit(1)
    sys.stdout.write(completion_script(command, _CONFIGS[command]))
    sys.exit(0)
