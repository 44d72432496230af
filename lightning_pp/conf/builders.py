"""Functions that config groups name where no class fits."""

from __future__ import annotations

from datetime import timedelta

from lightning_pp.errors import ConfigurationError


def lightning_strategy(name: str, **pipeline_options: object) -> str:
    """Name one of Lightning's own strategies.

    Args:
        name: A strategy that ``Trainer(strategy=...)`` knows.
        pipeline_options: What a recipe sets for its pipeline; without one it means nothing and is left out, so that
            ``recipe=X strategy=auto`` is the same run on one device.
    """
    return name


def no_logger() -> bool:
    """What ``Trainer(logger=...)`` takes for none."""
    return False


def timeout(seconds: float | None) -> timedelta | None:
    """A time from its seconds; None for none.

    Raises:
        ConfigurationError: No clock can wait so long.
    """
    if seconds is None:
        return None
    try:
        return timedelta(seconds=seconds)
    except (OverflowError, ValueError) as error:
        raise ConfigurationError(f"timeout.seconds={seconds} must be a number of seconds, such as 1800") from error
