"""Times of gathers and reductions, and the part for which a rank waited."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist

Kind = Literal["gather", "reduce"]
Key = TypeVar("Key")


@dataclass(eq=False)
class TimedCollective:
    """One collective; moments are nanoseconds of the host's clock, or events on an accelerator.

    Attributes:
        kind: What it is.
        unit: The first of the units that it is for; empty if it is for none in particular.
        begun: When it was started.
        work: What tells whether it is over, until that is known; on a CPU only.
        last_under_way: When it was last seen not to be over; on a CPU only.
        ended: When it was over; None while that is not known.
        waits: When the rank began to wait for it, and when it went on.
    """

    kind: Kind
    unit: str
    begun: Any
    work: dist.Work | None = None
    last_under_way: Any = None
    ended: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class CollectiveTimes:
    """The collectives of one rank in one step.

    Attributes:
        collectives: In the order in which they were started.
        milliseconds: Between two moments.
    """

    collectives: list[TimedCollective]
    milliseconds: Callable[[Any, Any], float]

    def sums_by(self, key: Callable[[str], Key]) -> dict[Key, dict[str, float]]:
        """Sums by ``key`` of the first unit of a collective, in milliseconds; on an accelerator waits for the last.

        ``gather_exposed_ms`` is the time that the rank stood waiting for gathers, ``gather_hidden_ms`` the time that
        they ran before the rank waited for them. ``reduce_exposed_ms`` and ``reduce_hidden_ms`` are of reductions.
        """
        names = [f"{kind}_{part}_ms" for kind in get_args(Kind) for part in ("exposed", "hidden")]
        sums: dict[Key, dict[str, float]] = {}
        for each in self.collectives:
            exposed = sum(self.milliseconds(begun, ended) for begun, ended in each.waits)
            hidden = 0.0
            if each.ended is not None:
                hidden = self.milliseconds(each.begun, each.ended)
                if each.waits:  # what ran while the rank waited is exposed
                    hidden = min(hidden, self.milliseconds(each.begun, each.waits[0][0]))
            of_key = sums.setdefault(key(each.unit), dict.fromkeys(names, 0.0))
            of_key[f"{each.kind}_exposed_ms"] += exposed
            of_key[f"{each.kind}_hidden_ms"] += max(0.0, hidden)
        return sums


class CollectiveClock:
    """Times a rank's gathers and reductions, while asked to.

    On an accelerator by events in streams, read later. On a CPU by the host's clock: there nothing tells when a
    collective has ended, so the clock looks, whenever an action or a unit begins or ends, and takes the middle between
    the last look at which it was under way and the first at which it was over. Gloo's reduce-scatter never says that it
    is over: it counts as under way until the rank waits for it.

    Args:
        device: Where units compute.
        now: A clock in nanoseconds, in place of the host's.

    It is off until :meth:`begin`.
    """

    def __init__(self, device: torch.device, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._is_on = False
        self._device = device
        self._on_host = device.type == "cpu"
        self._now: Callable[[], Any] = now if self._on_host else self._recorded_event
        self._aside: torch.Stream | None = None
        self._collectives: list[TimedCollective] = []
        self._under_way: list[TimedCollective] = []

    def begin(self, *, is_on: bool) -> None:
        """A step begins; its times will be needed, or not."""
        self._is_on = is_on
        self._collectives, self._under_way = [], []

    def start(self, kind: Kind, unit: str = "") -> TimedCollective | None:
        """A collective is about to be started, in the current stream; None if no times are needed."""
        if not self._is_on:
            return None
        timed = TimedCollective(kind, unit, self._now())
        self._collectives.append(timed)
        return timed

    def follow(self, timed: TimedCollective | None, work: dist.Work | None) -> None:
        """It was started; ``work`` tells when it is over: at once if it is None.

        On an accelerator whoever waits for ``work`` has to keep its tensors until then.
        """
        if timed is None or work is None:
            self.end(timed)
        elif self._on_host:
            timed.work, timed.last_under_way = work, timed.begun
            self._under_way.append(timed)
        else:  # in a stream of its own, so that nothing else waits for it
            if self._aside is None:
                self._aside = torch.Stream(self._device)
            with self._aside:
                work.wait()
                self.end(timed)

    def end(self, timed: TimedCollective | None) -> None:
        """It is over when the current stream has come so far."""
        if timed is not None:
            timed.ended = self._now()

    @contextmanager
    def waiting(self, timed: TimedCollective | None) -> Iterator[None]:
        """Around a wait for it."""
        if timed is None:
            yield
            return
        self.look()
        begun = self._now()
        yield
        ended = self._now()
        timed.waits.append((begun, ended))
        if timed.ended is None:
            timed.ended, timed.work = ended, None

    @contextmanager
    def exposed(self, kind: Kind, unit: str = "") -> Iterator[None]:
        """Around a collective that the rank starts and waits for."""
        with self.waiting(self.start(kind, unit)):
            yield

    def look(self) -> None:
        """Sees which collectives have ended."""
        if not self._under_way:
            return
        now = self._now()
        still = []
        for timed in self._under_way:
            if timed.work is None:
                continue
            if timed.work.is_completed():
                timed.ended, timed.work = (timed.last_under_way + now) // 2, None
            else:
                timed.last_under_way = now
                still.append(timed)
        self._under_way = still

    def times(self) -> CollectiveTimes | None:
        """Those of the step that :meth:`begin` has begun; None if they were not needed."""
        return CollectiveTimes(self._collectives, self._milliseconds) if self._is_on else None

    def _recorded_event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _milliseconds(self, begun: Any, ended: Any) -> float:
        if self._on_host:
            return float(ended - begun) / 1e6
        ended.synchronize()
        return float(begun.elapsed_time(ended))
