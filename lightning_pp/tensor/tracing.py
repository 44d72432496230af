"""Finds how a unit's parameters can be cut, by running it without data and trying.

Each weight that may be cut is cut by columns where its input is whole, and by rows where its input is cut in its last
dimension. Then the unit's own code runs on tensors without data, under the rules it will train with. A function that
cannot be computed on parts names the parameters whose columns reached it. Those are cut in segments where that would
help (a fused query, key and value projection that is split), and left whole otherwise. Then it runs again, until it
gets through.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pp.errors import ConfigurationError
from lightning_pp.split.data.tree import leaves_of, map_leaves, own_containers
from lightning_pp.split.fakes.fake_mode import FakeValueMode
from lightning_pp.tensor.cuts import Cut, CutError, cut_of, mark
from lightning_pp.tensor.parts import TensorPart, rank_pieces
from lightning_pp.tensor.plans import Style, experts_of
from lightning_pp.tensor.region import Region
from lightning_pp.tensor.rules import RULES

Found = dict[str, tuple[int, tuple[int, ...]]]
"""How parameters are cut, by name: the dimension and its segments."""


class Inside(nn.Module):
    """Calls a unit's own forward, past its hooks and past a replaced ``forward``."""

    def __init__(self, unit: nn.Module, forward: Any) -> None:
        super().__init__()
        self.unit = unit
        self._function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the unit computes."""
        return self._function(*args, **kwargs)


class UnitTracer:
    """Finds the cuts of one unit.

    Args:
        name: Its name, for errors.
        unit: The unit, whole. It is not changed.
        styles: Of the weights that may be cut, by their names in the unit, with the pattern that says so.
        group: The tensor ranks.
        sequence_parallel: As of :class:`~lightning_pp.tensor.region.Region`.
        gathers: Whether the unit is the last projection, whose columns are gathered.
    """

    def __init__(
        self,
        name: str,
        unit: nn.Module,
        styles: Mapping[str, tuple[Style, str]],
        group: dist.ProcessGroup,
        sequence_parallel: bool = False,
        gathers: bool = False,
    ) -> None:
        self.name, self.unit, self.group = name, unit, group
        self.is_complete = True
        self.reasons: dict[str, str] = {}  # why a weight is whole that "auto" tried to cut
        self._styles = styles
        self._mode = FakeValueMode()
        self._segments: dict[str, tuple[int, ...]] = {}
        self._whole: set[str] = {name for name, (style, _) in styles.items() if style == "replicate"}
        self._found: Found = {}
        self._columns: list[str] = []
        self._names: dict[int, str] = {}
        self._num_ranks = group.size()
        self._sequence_parallel, self._gathers = sequence_parallel, gathers
        self._experts = {
            f"{prefix}.{name}" if prefix else name: (out_dim, number == len(own) - 1)
            for prefix, child in unit.named_modules()
            for own in [experts_of(child)]
            for number, (name, (out_dim, _)) in enumerate(own.items())
        }
        self._met: set[str] = set()
        self._num_parameters = sum(each.numel() for each in unit.parameters())

    def find(self, args: Any, kwargs: Any) -> Found:
        """The cuts with which the unit runs on inputs of these shapes.

        Raises:
            ConfigurationError: What the user's plan cuts cannot be cut so.
        """
        while True:
            self._found, self._columns = {}, []
            try:
                self._run(args, kwargs)
                unmet = {name for name in self._experts if name in self._found}.difference(self._met)
                if not unmet:
                    return self._found
                self._learn(CutError("no product of them was met without data", frozenset(unmet)))
            except CutError as error:
                self._learn(error)
            except ConfigurationError:
                raise
            except Exception as error:
                if not self._columns:  # the unit's own, on tensors without data
                    self.is_complete = False
                    return {}
                self._learn(CutError(f"{type(error).__name__}: {error}", frozenset(self._columns[-1:])))

    def _run(self, args: Any, kwargs: Any) -> None:
        parameters = {f"unit.{name}": self._fake(each) for name, each in self.unit.named_parameters()}
        self._names = {id(each): name.removeprefix("unit.") for name, each in parameters.items()}
        for name, (out_dim, is_last) in self._experts.items():  # cut before they are met: code takes one of them first
            parameters[f"unit.{name}"] = self._cut_expert(name, parameters[f"unit.{name}"], out_dim, is_last)
        buffers = {f"unit.{name}": self._fake(each) for name, each in self.unit.named_buffers()}
        region = Region(self.group, RULES, self._sequence_parallel, self._adopt)
        args, kwargs = map_leaves(
            lambda leaf: self._fake(leaf) if isinstance(leaf, Tensor) else leaf, own_containers((args, kwargs))
        )
        with torch.no_grad(), self._mode.making_up(), region.entered():
            output = torch.func.functional_call(
                Inside(self.unit, self.unit.forward), {**parameters, **buffers}, args, kwargs
            )
        with torch.no_grad():
            output = region.whole_again(output, self._gathers)
        check_whole(output)

    def _cut_expert(self, name: str, weight: Tensor, out_dim: int, is_last: bool) -> Tensor:
        style = self._styles.get(name, ("replicate", ""))[0]
        is_row = style == "rowwise" or (style == "auto" and is_last)
        dim = 3 - out_dim if is_row else out_dim
        segments = self._segments.get(name, (weight.shape[dim],))
        if style == "replicate" or name in self._whole or any(length % self._num_ranks for length in segments):
            return weight
        self._found[name] = dim, segments
        if not is_row:
            self._columns.append(name)
        return self._narrowed(weight, dim, segments, name)

    def _fake(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() and tensor.device.type == "cpu":
            return tensor.clone()  # masks and counters, which code may read
        with self._mode:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake

    def _adopt(
        self, weight: Tensor, bias: Tensor | None, x: Tensor, out_dim: int, num_groups: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        """Decides how a weight is cut at its first use."""
        own = cut_of(weight)
        self._met |= own.origins if own is not None else set()
        name = self._names.get(id(weight))
        if name is None or name not in self._styles:
            return weight, bias
        if name not in self._found:
            found = self._decide(name, weight, cut_of(x), x.dim() - 1, out_dim, num_groups)
            if found is None:
                return weight, bias
            self._found[name] = found
        dim, segments = self._found[name]
        weight = self._narrowed(weight, dim, segments, name)
        bias_name = self._names.get(id(bias))
        if bias is not None and bias_name is not None and dim == out_dim:
            self._found[bias_name] = 0, segments
            bias = self._narrowed(bias, 0, segments, name)
        return weight, bias

    def _decide(
        self, name: str, weight: Tensor, cut: Cut | None, last: int, out_dim: int, num_groups: int
    ) -> tuple[int, tuple[int, ...]] | None:
        style, pattern = self._styles[name]
        if name in self._whole:
            return None
        cut = None if cut is not None and cut.tokens else cut
        if cut is not None and cut.dim == last and style in ("auto", "rowwise"):
            return 1 - out_dim, cut.segments
        is_table, num_groups = not num_groups, num_groups or 1
        of_vocabulary = weight.shape[0] > weight.shape[1] and 2 * weight.numel() > self._num_parameters
        if (is_table or self._gathers) and style == "auto" and not of_vocabulary:
            return None
        dim = 1 - out_dim if style == "rowwise" or (is_table and style == "auto") else out_dim
        if cut is not None or weight.shape[dim] % num_groups:
            return None
        segments = self._segments.get(name, (weight.shape[dim] // num_groups,) * num_groups)
        of_words = len(segments) == 1 and dim == (0 if is_table else out_dim) and (is_table or self._gathers)
        of_words = of_words and segments[0] >= self._num_ranks  # a vocabulary is cut unevenly where it has to be
        if any(length % self._num_ranks for length in segments) and not of_words:
            if style == "auto":
                return None
            raise ConfigurationError(
                f"tensor_parallel_plan[{pattern!r}] cuts a dimension of {self.name}.{name} with segments "
                f"{list(segments)}, which tensor_parallel_size={self._num_ranks} does not divide."
            )
        if dim == out_dim:
            self._columns.append(name)
        return dim, segments

    def _narrowed(self, whole: Tensor, dim: int, segments: tuple[int, ...], name: str) -> Tensor:
        local_shape = TensorPart(
            dim, whole.shape, rank_pieces(segments, self.group.rank(), self._num_ranks)
        ).local_shape
        return mark(whole.narrow(dim, 0, local_shape[dim]), Cut(dim, segments, frozenset([name])))

    def _learn(self, error: CutError) -> None:
        """Cuts what caused the error in segments, or leaves it whole.

        Raises:
            ConfigurationError: The user's plan says how it is to be cut.
        """
        blamed = {name for name in error.origins if name in self._found} or set(self._found)
        helped = False
        for name in blamed:
            if name not in self._columns:
                continue
            segments = self._found[name][1]
            proposed = _proposed(segments, error.segments)
            if len(proposed) > len(segments) and not any(length % self._num_ranks for length in proposed):
                self._segments[name], helped = proposed, True
        if helped:
            return
        for name in blamed:
            style, pattern = self._styles.get(name, ("auto", ""))
            if style != "auto":
                raise ConfigurationError(
                    f"tensor_parallel_plan[{pattern!r}] cannot cut {self.name}.{name}: in unit {self.name!r} "
                    f"({type(self.unit).__name__}), {error}. Leave it whole with 'replicate', or let 'auto' choose."
                )
        self._whole |= blamed
        self.reasons |= dict.fromkeys(blamed, str(error))


def _proposed(segments: tuple[int, ...], fractions: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """The segments, cut once more at these fractions of their sum; as they are where those are no whole numbers."""
    size = sum(segments)
    if any(size * part % total for part, total in fractions):
        return segments
    ends = {0, *accumulate(segments), *(size * part // total for part, total in fractions)}
    return tuple(stop - start for start, stop in pairwise(sorted(ends)))


def check_whole(output: Any) -> None:
    """Raises where something that a unit returns is cut.

    Raises:
        CutError: It is.
    """
    for leaf in leaves_of(output):
        cut = cut_of(leaf)
        if cut is not None:
            raise CutError(f"a result leaves the unit sharded in dimension {cut.dim} of {cut.size}", cut.origins)
