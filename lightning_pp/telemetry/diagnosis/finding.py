"""One thing that makes a step longer, with what to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """What makes a step longer, what to change, and the simulated gain.

    Attributes:
        cause: One word for it: ``cuts``, ``slow_rank``, ``slow_link``, ``data``, ``microbatches``, ``schedule`` or
            ``weight_gradients``.
        seen: What was measured, a sentence.
        remedy: What to do, words that "saves so much" can follow.
        gain_ms: Simulated, of one step, milliseconds.
        gain_fraction: The same, by the measured time of a step.
        override: What to write on the command line of ``lightning-pp``; empty where no option helps.
        argument: The same as an argument in Python.
    """

    cause: str
    seen: str
    remedy: str
    gain_ms: float
    gain_fraction: float
    override: str = ""
    argument: str = ""

    @property
    def text(self) -> str:
        """All of it, in a line."""
        saved = f"{self.gain_ms:.0f}" if self.gain_ms >= 10 else f"{self.gain_ms:.2g}"
        change = f": {self.override}, in Python {self.argument}" if self.override else ""
        return f"{self.seen} {self.remedy} would save {saved} ms a step ({self.gain_fraction:.0%}){change}."

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with the line."""
        return {**asdict(self), "text": self.text}


def as_option(name: str, value: object) -> tuple[str, str]:
    """An option of the strategy as :attr:`Finding.override`, a list quoted for the shell, and as its ``argument``."""
    text = f"'[{','.join(map(str, value))}]'" if isinstance(value, list) else value
    return f"strategy.{name}={text}", f"{name}={value!r}"
