"""The longest span of a step for many costs at once.

Which action needs which is the same whatever they cost. So the turns in which all ranks take their next actions are
found once for a schedule, and then the times of all costs are taken together, on arrays. The numbers are those of
:func:`lightning_pp.schedule.simulation.simulate.step_length`, bit for bit, where messages take no time and nothing is
gathered or reduced.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_pp.schedule.program.program import Programs
from lightning_pp.schedule.simulation.costs import UNIT_COSTS
from lightning_pp.schedule.simulation.engine import CostTables, codes_of, encode
from lightning_pp.schedule.simulation.simulate import step_length
from lightning_pp.schedule.simulation.wide import Actions, Times

_MOST_NUMBERS = 1 << 22
"""Times of actions that are kept at once, 8 bytes each."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Turn:
    """What runs at the same time: one action of each of some ranks.

    Attributes:
        ranks: The ranks.
        rows: Rows of their actions.
        needed: Codes whose ends they wait for.
        published: Codes under which their ends are noted.
        begins: Whether it is the first action of the rank.
    """

    ranks: Indices
    rows: npt.NDArray[np.int32]
    needed: Indices
    published: Indices
    begins: npt.NDArray[np.bool_]


class LongestSpans:
    """Gives the longest span of a step of one schedule for any costs.

    Args:
        schedule: The programs. UNSHARD, RESHARD and REDUCE take no time, and are left out.

    Attributes:
        most_at_once: So many costs are taken together; more take more memory.

    Raises:
        ScheduleError: A rank waits for ever.
    """

    def __init__(self, schedule: Programs) -> None:
        placement, m = schedule.placement, schedule.num_microbatches
        self._num_ranks = placement.num_ranks
        codes = codes_of(schedule) or [
            np.array([code for code in program if code >= 0], dtype=np.int64) for program in encode(schedule)
        ]
        tables = CostTables.build(placement, UNIT_COSTS, whole_batch_loss=schedule.whole_batch_loss)
        actions = Actions.build(codes, tables, placement.rank_of_stage[-1], m)
        self._num_codes, self._always = actions.never + 1, actions.always
        self._turns: list[_Turn] = []
        has_ended = np.zeros(self._num_codes, dtype=bool)
        has_ended[actions.always] = True
        at = actions.first.copy()
        while len(ranks := np.flatnonzero(has_ended[actions.needed[at]])):
            here = at[ranks]
            published = actions.published[here]
            self._turns.append(
                _Turn(ranks, actions.row[here], actions.needed[here], published, here == actions.first[ranks])
            )
            has_ended[published] = True
            at[ranks] += 1
        if sum(len(turn.ranks) for turn in self._turns) < sum(map(len, codes)):
            step_length(schedule, UNIT_COSTS)  # raises, and says which rank waits
        self.most_at_once = max(1, _MOST_NUMBERS // self._num_codes)

    def of(self, times: Times) -> Times:
        """The longest span of each.

        Args:
            times: Of F, I and W on each stage. Shape (3, number of costs, stages).

        Returns:
            The longest span of a rank, in the same unit. Shape (number of costs).
        """
        if not times.shape[1]:
            return np.empty(0)
        parts = np.split(times, range(self.most_at_once, times.shape[1], self.most_at_once), axis=1)
        return np.concatenate([self._of_some(part) for part in parts])

    def _of_some(self, times: Times) -> Times:
        number = times.shape[1]
        of_kind = [kind.T for kind in times]
        duration = np.concatenate([*of_kind, of_kind[1] + of_kind[2]])  # by row
        done = np.empty((self._num_codes, number))
        done[self._always] = 0.0
        clock, began = np.zeros((self._num_ranks, number)), np.zeros((self._num_ranks, number))
        for turn in self._turns:
            begin = np.maximum(clock[turn.ranks], done[turn.needed])
            if turn.begins.any():
                began[turn.ranks[turn.begins]] = begin[turn.begins]
            begin += duration[turn.rows]
            done[turn.published] = clock[turn.ranks] = begin
        return np.asarray((clock - began).max(axis=0))
