"""The units of a model with their parameters cut over the tensor axis."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pp.errors import SplitError, enumerate_names
from lightning_pp.split._torch_private import parameters_of
from lightning_pp.split.data.tree import leaves_of, map_leaves
from lightning_pp.split.fakes.parameters import has_data
from lightning_pp.tensor.check import UnitCheck
from lightning_pp.tensor.cuts import Cut, CutError, cut_of, mark
from lightning_pp.tensor.head import HeadOfRanks
from lightning_pp.tensor.parts import TensorPart, part_of, rank_pieces
from lightning_pp.tensor.plans import Plan, Style, check_sizes, inputs_of, matching_styles, recorded_plan, weights_of
from lightning_pp.tensor.region import Region
from lightning_pp.tensor.rules import RULES
from lightning_pp.tensor.tracing import Found, UnitTracer, check_whole


@dataclass(eq=False)
class _Slot:
    """A place where a unit finds a parameter that is cut."""

    owner: nn.Module
    attribute: str
    name: str
    cut: Cut
    local_shape: torch.Size


class TensorParallelUnits:
    """Cuts the parameters of units over the tensor axis and runs the units on the parts.

    Args:
        module: The whole model.
        units: Its units by name; those of this rank are enough.
        plan: ``"auto"``, or styles by pattern (see :func:`~lightning_pp.tensor.plans.matching_styles`).
        group: The tensor ranks.
        whole: Parameters that stay whole, since they are used outside of their unit as well.
        sequence_parallel: Whether norms, dropout and sums between two sharded products of a unit are computed on parts
            of the sequence, which takes less memory. As many bytes are communicated.
        tied: Parameters of several units that are cut all the same: embeddings and the head, along the vocabulary.
        head: The unit that is the last projection; its columns are gathered.

    Attributes:
        parts: How each parameter that is cut lies over the axis, by its full name in ``module``. All others are whole
            on every rank. Known after :meth:`plan`.
        defers_logits: Whether the columns of the head are gathered in training only for other functions than a cross
            entropy. False at first; to be set before units are cut.
        reasons: Why ``"auto"`` left a weight whole that it tried to cut, for the first unit of a kind.

    Raises:
        ConfigurationError: The plan names what does not exist, or sizes do not divide.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Mapping[str, nn.Module],
        plan: Plan,
        group: dist.ProcessGroup,
        whole: Collection[nn.Parameter] = (),
        sequence_parallel: bool = False,
        tied: Collection[nn.Parameter] = (),
        head: str | None = None,
    ) -> None:
        check_sizes(module, plan, group.size())
        self.parts: dict[str, TensorPart] = {}
        self._sequence_parallel = sequence_parallel
        self._module, self._units, self._group, self._plan = module, dict(units), group, plan
        self._calls: dict[str, tuple[Any, Any]] = {}
        self._notes: list[str] = []
        self.reasons: dict[str, str] = {}
        self._forwards: list[CutForward] = []
        self._head, self.defers_logits = head, False
        self._shared = _shared_between(self._units).difference(tied).union(whole)
        self._planned: dict[str, tuple[Found, dict[str, str]]] = {}

    def observe(self, unit: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes the inputs of a call of a unit before :meth:`shard`, real or fake; the first of each unit counts.

        ``"auto"`` finds cuts for the units that were observed. Without any it uses the model's own plan, if there is
        one. A dict plan needs it for projections of query, key and value in one.
        """
        if unit not in self._calls:
            self._calls[unit] = map_leaves(without_data, (tuple(args), dict(kwargs)))

    def shard(self) -> None:
        """Replaces parameters by this rank's parts, and has units run on them: :meth:`plan`, and :meth:`cut` for each.

        Raises:
            ConfigurationError: A unit cannot run with what the plan cuts.
        """
        self.plan()
        for name in self._units:
            self.cut(name)

    def plan(self) -> None:
        """Decides how parameters are cut; nothing is changed yet.

        Raises:
            ConfigurationError: A unit cannot run with what the plan cuts.
        """
        styles = self._styles()
        known: dict[Any, Found] = {}
        for name, unit in self._units.items():
            prefix = f"{name}." if name else ""
            own = {key.removeprefix(prefix): style for key, style in styles.items() if key.startswith(prefix)}
            own = {key: style for key, style in own.items() if unit.get_parameter(key) not in self._shared}
            if not own:
                continue
            found = self._found(name, unit, own, known)
            if found:
                self._planned[name] = found, {key: pattern for key, (_, pattern) in own.items()}
            for key, (dim, segments) in found.items():
                pieces = rank_pieces(segments, self._group.rank(), self._group.size())
                self.parts[prefix + key] = TensorPart(dim, unit.get_parameter(key).shape, pieces)
        names = dict(self._module.named_parameters(remove_duplicate=False))
        known_parts = {names[name]: part for name, part in self.parts.items()}
        self.parts |= {name: known_parts[each] for name, each in names.items() if each in known_parts}
        self._shared, self._calls = set(), {}  # which would keep parameters of other ranks, and a dry run

    def cut(self, name: str) -> None:
        """Replaces parameters of one unit by this rank's parts, and makes it run on them.

        Before, they hold the same whole values on all tensor ranks, or are on the meta device.
        """
        if name in self._planned:
            self._cut(name, self._units[name], *self._planned.pop(name))

    @contextmanager
    def running_on_parts(self) -> Iterator[None]:
        """In the block, units run on parts where their parameters have the shapes of parts, as fakes in a dry run have.

        That is after :meth:`plan`; nothing is cut.
        """
        held = [(unit, vars(unit).get("forward")) for unit in map(self._units.__getitem__, self._planned)]
        try:
            for name, planned in self._planned.items():
                vars(self._units[name])["forward"] = self._forward(name, *planned)
            yield
        finally:
            for unit, forward in held:
                vars(unit).pop("forward", None)
                if forward is not None:
                    vars(unit)["forward"] = forward

    def release(self) -> None:
        """Has units run as ever, once they have whole parameters again."""
        for forward in self._forwards:
            vars(forward.unit).pop("forward", None)

    def check_next_calls(self) -> None:
        """Has each distinct unit run whole once, beside its next call, and compares (see :mod:`.check`)."""
        check = UnitCheck(self._group)
        for forward in self._forwards:
            forward.check = check

    def counted(self) -> tuple[int, dict[str, int]]:
        """The number of parameters, and sizes of the whole ones by name, for the module on this rank."""
        whole: dict[str, int] = {}
        total, seen = 0, set()
        for name, parameter in self._module.named_parameters():
            part = self.parts.get(name)
            total += parameter.numel() if part is None else part.shape.numel()
            if part is None and parameter not in seen:
                seen.add(parameter)
                whole[name] = parameter.numel()
        return total, whole

    def report(self, counted: Sequence[tuple[int, dict[str, int]]] | None = None) -> str:
        """One line that says which weights are whole, with their share of the parameters.

        Args:
            counted: What :meth:`counted` gives on each rank of a pipeline; None: this one is alone.
        """
        counted = [self.counted()] if counted is None else counted
        whole = {name: num for _, own in counted for name, num in own.items()}
        total = sum(num for num, _ in counted)
        listed = enumerate_names(sorted(whole, key=lambda each: -whole[each]), 8)
        share = sum(whole.values()) / total if total else 0.0
        line = f"Tensor parallelism leaves {share:.1%} of the parameters whole on all {self._group.size()} ranks"
        return ". ".join([f"{line}: {listed}" if listed else line, *self._notes]) + "."

    def _styles(self) -> dict[str, tuple[Style, str]]:
        if self._plan != "auto" or self._calls:
            return matching_styles(self._module, self._plan)
        own, unknown = recorded_plan(self._module)
        if unknown:
            self._notes.append(f"Styles of the model's own plan that are not used: {', '.join(unknown)}")
        weights, size = weights_of(self._module), self._group.size()
        return {
            name: (style, pattern)
            for name, (style, pattern) in matching_styles(self._module, own).items()
            # matrices of experts need to be observed
            if weights[name][1].dim() == 2
            and not weights[name][1].shape[weights[name][0] if style == "colwise" else 1 - weights[name][0]] % size
        }

    def _found(
        self, name: str, unit: nn.Module, styles: dict[str, tuple[Style, str]], known: dict[Any, Found]
    ) -> Found:
        call = self._calls.get(name)
        if call is None:
            return _as_planned(unit, styles, self._group.size())
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves_of(call)]
        gathers = name == self._head
        sizes = tuple((n, tuple(p.shape)) for n, p in unit.named_parameters())
        key = type(unit), gathers, sizes, (*shapes, *styles.items())
        if key not in known:
            tracer = UnitTracer(name, unit, styles, self._group, self._sequence_parallel, gathers)
            known[key] = tracer.find(*call)
            self.reasons |= {f"{name}.{each}" if name else each: why for each, why in tracer.reasons.items()}
            if not tracer.is_complete:
                self._notes.append(f"Unit {name!r} cannot run without data, so it is whole")
                if any(style != "auto" for style, _ in styles.values()):
                    known[key] = _as_planned(unit, styles, self._group.size())
        return known[key]

    def _cut(self, name: str, unit: nn.Module, found: Found, patterns: dict[str, str]) -> None:
        prefix = f"{name}." if name else ""
        forward, replaced = self._forward(name, found, patterns), {}
        for key in found:
            whole = unit.get_parameter(key)
            if whole.shape == self.parts[prefix + key].shape:  # else cut with another unit, to which this one is tied
                local = nn.Parameter(part_of(whole.detach(), self.parts[prefix + key]), whole.requires_grad)
                vars(local).update(vars(whole))
                replaced[whole] = local
        for owner in self._module.modules():  # a tied unit of another rank has the parameter as well
            for attribute, parameter in parameters_of(owner).items():
                if parameter in replaced:
                    setattr(owner, attribute, replaced[parameter])
        vars(unit)["forward"] = forward
        self._forwards.append(forward)

    def _forward(self, name: str, found: Found, patterns: dict[str, str]) -> CutForward:
        unit, prefix, slots = self._units[name], f"{name}." if name else "", []
        parts = {key: self.parts[prefix + key] for key in found}
        for key, (dim, segments) in found.items():
            parent, _, attribute = key.rpartition(".")
            patterns.setdefault(key, patterns.get(f"{key.removesuffix('bias')}weight", "auto"))
            cut = Cut(dim, segments, frozenset([key]))
            slots.append(_Slot(unit.get_submodule(parent), attribute, key, cut, parts[key].local_shape))
        region = Region(self._group, RULES, self._sequence_parallel)
        forward = CutForward(name, unit, slots, parts, region, patterns, name == self._head)
        forward.defers = self.defers_logits and name == self._head
        return forward


class CutForward:
    """The replacement of a unit's forward.

    It is an object, so that a copy of the unit gets one of its own.
    """

    def __init__(
        self,
        name: str,
        unit: nn.Module,
        slots: list[_Slot],
        parts: Mapping[str, TensorPart],
        region: Region,
        patterns: Mapping[str, str],
        gathers: bool,
    ) -> None:
        self._patterns, self.is_head = patterns, gathers
        self.defers = False
        self.name, self.unit, self.parts = name, unit, parts
        self.check: UnitCheck | None = None
        self.original = unit.forward
        self.slots, self.region = slots, region

    # torch.compile cannot follow rules that ask how each tensor is cut (see :mod:`.compiling`)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the unit on this rank's parts."""
        has_all_data = self.has_data(args, kwargs)
        if self.check is not None and has_all_data:
            check, self.check = self.check, None
            check.run(self, args, kwargs)
        try:
            if not (self.defers and has_all_data and torch.is_grad_enabled()):
                return self.run(args, kwargs)
            logits = self.run(args, kwargs, joins=False)
            cut = cut_of(logits)
            if cut is None:
                return logits
            return HeadOfRanks(self.name, cut.size, logits, frozenset(), self.region).logits()
        except CutError as error:
            raise SplitError(
                f"Unit {self.name!r} ({type(self.unit).__name__}) cannot run on {self.region.num_ranks} tensor ranks: "
                f"{error}. {self.cuts()} Set the matrices that cause this ({', '.join(sorted(error.origins))}) to "
                "'replicate' in tensor_parallel_plan."
            ) from error

    @staticmethod
    def has_data(args: Any, kwargs: Any) -> bool:
        """Whether no tensor among arguments is a fake or on the meta device."""
        return all(has_data(each) for each in leaves_of((args, kwargs)) if _is_tensor(each))

    def has_parts(self) -> bool:
        """Whether parameters have the shapes of this rank's parts."""
        return all(getattr(slot.owner, slot.attribute).shape == slot.local_shape for slot in self.slots)

    def run(self, args: Any, kwargs: Any, *, is_checked: bool = False, joins: bool = True) -> Any:
        """Runs the unit on this rank's parts.

        Args:
            args: Its arguments.
            kwargs: Its keyword arguments.
            is_checked: Whether dropout is off, and draws nothing.
            joins: Whether the columns of a head are gathered.
        """
        for slot in self.slots:
            parameter = getattr(slot.owner, slot.attribute)
            if cut_of(parameter) is None and parameter.shape == slot.local_shape:
                mark(parameter, slot.cut)
        region = self.region
        region.draws = not is_checked
        with region.entered():
            output = self.original(*args, **kwargs)
        if self.is_head and not joins:
            return output
        output = region.whole_again(output, self.is_head)
        check_whole(output)
        return output

    def cuts(self) -> str:
        """A sentence about the cut parameters and their patterns."""
        by_pattern: dict[str, list[str]] = {}
        for name in self.parts:
            by_pattern.setdefault(self._patterns.get(name, "auto"), []).append(name)
        return "; ".join(f"{pattern!r} cuts {', '.join(names)}" for pattern, names in by_pattern.items()) + "."


def without_data(leaf: Any) -> Any:
    """A tensor of the same shape and dtype on the meta device; not "like" ``leaf``, which may be fake."""
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _as_planned(unit: nn.Module, styles: Mapping[str, tuple[Style, str]], num_ranks: int) -> Found:
    """Cuts in one run each, as the plan says."""
    found: Found = {}
    weights = weights_of(unit)
    for name, (style, _) in styles.items():
        out_dim, weight = weights[name]
        if style == "colwise" and not weight.shape[out_dim] % num_ranks:
            size = weight.shape[out_dim]
            num = 3 if name.endswith("in_proj_weight") else 1
            found[name] = out_dim, (size // num,) * num
            bias = name.removesuffix("weight") + "bias"
            if any(bias == each for each, _ in unit.named_parameters()):
                found[bias] = 0, (size // num,) * num
        elif style == "rowwise":
            dim = inputs_of(weight, out_dim)
            found[name] = dim, (weight.shape[dim],)
    return found


def _shared_between(units: Mapping[str, nn.Module]) -> set[nn.Parameter]:
    """Parameters that more than one unit has; they stay whole."""
    seen: dict[nn.Parameter, str] = {}
    shared = set()
    for name, unit in units.items():
        for parameter in unit.parameters():
            if seen.setdefault(parameter, name) != name:
                shared.add(parameter)
    return shared
