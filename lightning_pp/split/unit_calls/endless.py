"""Dry runs that do not end: a step decodes until its data say stop, and made-up data never do."""

from __future__ import annotations

from lightning_pp.errors import SplitError
from lightning_pp.split.record.source_lines import user_line

_CALLS_OF_EACH = 50
_FEWEST_CALLS = 500


def check_ends(unit: str, num_repeated: int, num_units: int) -> None:
    """Raises :class:`SplitError` if a dry run has called ``num_repeated`` units in a row that it had called before.

    ``unit`` is the one that is about to be called, of ``num_units``.
    """
    if num_repeated > max(_FEWEST_CALLS, _CALLS_OF_EACH * num_units):
        raise SplitError(
            f"The dry run of the step on fake data did not end. {user_line()} called {unit!r}, and all of the last "
            f"{num_repeated} calls were of units that had been called before. A pipeline cannot run a step whose "
            "outputs decide how often it calls its units, such as decoding until a stop token. Decode in a Trainer() "
            "on one device, after strategy.gather_module() or from a checkpoint, and leave it out of the steps of the "
            "pipeline (limit_val_batches=0 leaves out validation)."
        )
