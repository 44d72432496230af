"""The program of one rank as integers, for pipelines of a thousand ranks and millions of actions.

An action of kind k (F 0, I 1, W 2, B 3, OFFLOAD 4, RELOAD 5, UNSHARD 6, RESHARD 7, REDUCE 8), stage s and microbatch j
is the code ``(k * num_stages + s) * m + j``; a *row* is ``k * num_stages + s``. The sharding actions have the
microbatch 0. Codes take 8 bytes each where an :class:`Action` takes 80.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from lightning_pp.schedule.program.action import Action, ActionKind

Codes: TypeAlias = npt.NDArray[np.int64]
"""Actions as integers, in the order of a program."""

F, I, W, B, OFFLOAD, RELOAD, UNSHARD, RESHARD, REDUCE = range(9)  # noqa: E741
KIND_OF_INDEX = tuple(ActionKind)
INDEX_OF_KIND = {kind: index for index, kind in enumerate(KIND_OF_INDEX)}


class CodedProgram(Sequence[Action]):
    """A program that makes its actions on access; equal to the tuple of these actions.

    Args:
        codes: The actions, each a code of the module's kind, shape (number of actions), int64.
        num_stages: Stages of the model, which the codes are for.
        num_microbatches: Microbatches of the step, ``m``, which the codes are for.
    """

    __slots__ = ("codes", "num_microbatches", "num_stages")

    def __init__(self, codes: Codes, num_stages: int, num_microbatches: int) -> None:
        self.codes = codes
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        codes.flags.writeable = False

    @classmethod
    def of(cls, program: Sequence[Action], num_stages: int, num_microbatches: int) -> CodedProgram:
        """``program``, whose stages and microbatches are within these sizes, as codes."""
        if isinstance(program, CodedProgram) and program._sizes == (num_stages, num_microbatches):
            return program
        codes = [
            (INDEX_OF_KIND[action.kind] * num_stages + action.stage) * num_microbatches + (action.microbatch or 0)
            for action in program
        ]
        return cls(np.array(codes, dtype=np.int64), num_stages, num_microbatches)

    def parts(self) -> tuple[Codes, Codes, Codes]:
        """For each action the index of its kind, its stage and its microbatch."""
        rows, microbatches = np.divmod(self.codes, self.num_microbatches)
        kinds, stages = np.divmod(rows, self.num_stages)
        return kinds, stages, microbatches

    def with_codes(self, codes: Codes) -> CodedProgram:
        """Another program for the same sizes."""
        return CodedProgram(codes, self.num_stages, self.num_microbatches)

    def below(self, kind: int) -> CodedProgram:
        """Its actions of lower kinds: below OFFLOAD its F, I, W and B, below UNSHARD all but the sharding actions."""
        return self.with_codes(self.codes[self.codes < kind * self.num_stages * self.num_microbatches])

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Action, ...]: ...
    def __getitem__(self, index: int | slice) -> Action | tuple[Action, ...]:
        if isinstance(index, slice):
            return tuple(map(self._action, self.codes[index].tolist()))
        return self._action(int(self.codes[index]))

    def __iter__(self) -> Iterator[Action]:
        return map(self._action, self.codes.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CodedProgram) and self._sizes == other._sizes:
            return np.array_equal(self.codes, other.codes)
        if isinstance(other, (CodedProgram, tuple)):
            return tuple(self) == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.num_stages, self.num_microbatches

    def _action(self, code: int) -> Action:
        row, microbatch = divmod(code, self.num_microbatches)
        kind, stage = divmod(row, self.num_stages)
        return Action(stage, KIND_OF_INDEX[kind], microbatch if kind < UNSHARD else None)


def in_order(*parts: tuple[Codes, Codes]) -> Codes:
    """All codes of ``parts``, by their places.

    Args:
        parts: Codes and, for each, its place in the program, int64; places may have gaps, but no two codes share one.
    """
    codes = np.concatenate([part for part, _ in parts])
    places = np.concatenate([place for _, place in parts])
    return codes[np.argsort(places, kind="stable")]
