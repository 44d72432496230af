"""Compiles units that run on parts of their parameters.

``torch.compile`` captures a unit's own code as on one device: while it does, stand-ins of whole shapes without memory
are in the places of the parts. The captured functions then run once on fakes, under the rules of the unit's region.
What the rules call is recorded: a graph of functions of parts, in which communication is one operation. That graph is
compiled, and called with the parts. A unit that cannot be captured in one graph runs uncompiled, and :meth:`told` says
so.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lightning_pp.errors import SplitError
from lightning_pp.split._torch_private import FakeTensorMode, parameters_of
from lightning_pp.split.unit_calls import compilation
from lightning_pp.tensor.cuts import cut_of, mark
from lightning_pp.tensor.functions import GROUPS, Moved, RecordedGroup
from lightning_pp.tensor.region import Region
from lightning_pp.tensor.rules import RULES
from lightning_pp.tensor.tracing import check_whole

if TYPE_CHECKING:
    from lightning_pp.tensor.units import CutForward

_Graph = Callable[..., Any]
_MOST_GRAPHS = 16  # of one captured graph, for sizes of inputs


def _move(tensor: Tensor, *where: Any) -> Tensor:
    """What stands in graphs for a move."""
    moved: Tensor = Moved.apply(tensor, *where)  # type: ignore[no-untyped-call]
    return moved


class _Recorder(TorchFunctionMode):
    """A context that notes each function that runs as a call in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.root, self.rests = fx.Graph(), nn.Module(), False
        self._nodes: dict[int, tuple[Any, fx.Node]] = {}  # values are kept, so that no other gets their ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs and notes one function."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        is_answer = isinstance(result, (bool, int, float, str, torch.Size, torch.dtype, torch.device, torch.layout))
        if not is_answer and not self.rests:
            self.note(func, args, kwargs, result)
        return result

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes a call."""
        name = getattr(func, "__name__", "")
        given = self.named(tuple(args)), self.named(dict(kwargs))
        if name == "__get__":
            node = self.graph.call_function(getattr, (*given[0][:1], func.__self__.__name__))
        elif name == "__matmul__":
            node = self.graph.call_function(operator.matmul, *given)
        elif name and getattr(Tensor, name, None) is func:
            node = self.graph.call_method(name, *given)
        else:
            node = self.graph.call_function(func, *given)
        self.know(result, node)

    def know(self, value: Any, node: fx.Node) -> None:
        """``value`` is that of ``node``; a tensor that is known already was edited in place, or is as it was."""
        if isinstance(value, (tuple, list)):
            for i, each in enumerate(value):
                if isinstance(each, (Tensor, tuple, list)):
                    self.know(each, self.graph.call_function(operator.getitem, (node, i)))
        elif value is not None:
            self._nodes.setdefault(id(value), (value, node))

    def named(self, tree: Any) -> Any:
        """Values, with nodes in the places of those that have one."""

        def name(leaf: Any) -> Any:
            if id(leaf) in self._nodes:
                return self._nodes[id(leaf)][1]
            if isinstance(leaf, Tensor):
                raise SplitError(f"uses a tensor of shape {list(leaf.shape)} that no function has made")
            if isinstance(leaf, nn.Module):
                self.root.add_module(f"module_{id(leaf)}", leaf)
                return self.graph.get_attr(f"module_{id(leaf)}")
            return leaf

        return fx.node.map_aggregate(tree, name)


class _Replay(fx.Interpreter):
    """Runs a captured graph; its constants are noted."""

    def __init__(self, module: fx.GraphModule, recorder: _Recorder, mode: FakeTensorMode) -> None:
        super().__init__(module)
        self._recorder, self._mode = recorder, mode

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A constant, as a fake."""
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, Tensor):
            return value
        self._recorder.root.register_buffer(name := str(target).replace(".", "_"), value)
        fake = self._mode.from_tensor(value)
        self._recorder.know(fake, self._recorder.graph.get_attr(name))
        return fake


def on_parts(module: fx.GraphModule, args: tuple[Any, ...], region: Region) -> fx.GraphModule:
    """The graph of what each rank computes, its inputs the tensors of ``args``.

    Args:
        module: Captured with whole sizes.
        args: Its inputs, with parts that are marked for whole parameters.
        region: Of a unit.

    Raises:
        CutError: A function cannot be computed on parts.
    """
    recorder, mode = _Recorder(), FakeTensorMode(allow_non_fake_inputs=True)
    name = region.group.group_name
    GROUPS[name] = region.group

    def record(tensor: Tensor, *where: Any) -> Tensor:
        recorder.rests = True
        moved = _move(tensor, *where, name)
        recorder.rests = False
        recorder.know(moved, recorder.graph.call_function(_move, (recorder.named(tensor), *where, name)))
        return moved

    own = Region(RecordedGroup(region.group, record), RULES, region.sequence_parallel)  # type: ignore[arg-type]
    fakes = []
    for i, arg in enumerate(args):
        fakes.append(mark(mode.from_tensor(arg), cut_of(arg)) if isinstance(arg, Tensor) else arg)
        if isinstance(arg, Tensor):
            recorder.know(fakes[-1], recorder.graph.placeholder(f"input_{i}"))
    with recorder, mode, own.entered():
        output = _Replay(module, recorder, mode).run(*fakes)
    with mode:
        output = own.whole_again(output)
    check_whole(output)
    recorder.graph.output(recorder.named(output))
    return fx.GraphModule(recorder.root, recorder.graph)


class PartsBackend:
    """A backend of ``torch.compile`` for units in which stand-ins replace their parts.

    Args:
        backend: Compiles graphs of parts.

    Attributes:
        reasons: Why units run uncompiled, by name.
    """

    def __init__(self, backend: Callable[[fx.GraphModule, list[Any]], _Graph]) -> None:
        self.backend = backend
        self.region: Callable[[], Region | None] = lambda: None
        self.num_calls = 0
        self.reasons: dict[str, str] = {}

    def __call__(self, module: fx.GraphModule, example_inputs: list[Any]) -> _Graph:
        """A graph that is compiled for parts when it is called with them."""
        return _PartsGraph(module, self)

    def compiled(self, forward: CutForward, capture: Mapping[str, Any]) -> _Graph:
        """``forward``, compiled with options of ``torch.compile`` for ``capture``."""
        if forward.is_head or capture.get("disable"):
            return forward
        self.region = weakref.ref(forward.region)  # torch keeps backends for ever
        return _CompiledForward(forward, self, {**capture, "fullgraph": True})


class _PartsGraph:
    def __init__(self, module: fx.GraphModule, owner: PartsBackend) -> None:
        self._module, self._owner = module, owner
        self._is_dynamic = any(
            not isinstance(node.meta.get("example_value"), Tensor) for node in module.graph.find_nodes(op="placeholder")
        )
        self._graphs: dict[Any, _Graph] = {}

    def __call__(self, *args: Any) -> Any:
        args = tuple(getattr(arg, "_tensor_part", arg) for arg in args)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        key: Any = tuple(map(cut_of, tensors))
        if self._is_dynamic:
            key = key, tuple(arg.shape if isinstance(arg, Tensor) else arg for arg in args)
        if key not in self._graphs:
            if len(self._graphs) == _MOST_GRAPHS:
                raise SplitError(f"inputs had more than {_MOST_GRAPHS} sizes, each of which is compiled by itself")
            region = self._owner.region()
            assert region is not None
            with saved_tensors_hooks(lambda each: each, lambda each: each):  # checkpoint() would count what is traced
                self._graphs[key] = self._owner.backend(on_parts(self._module, args, region), tensors)
        self._owner.num_calls += 1
        return self._graphs[key](*tensors)


class _CompiledForward:
    """A unit's forward on parts, compiled; uncompiled where it is checked, without data, or cannot be captured."""

    def __init__(self, forward: CutForward, backend: PartsBackend, capture: Mapping[str, Any]) -> None:
        self._forward, self._backend = forward, backend
        self._function = torch.compile(forward.original, backend=backend, **capture)
        self._stand_ins: list[nn.Parameter] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, backend = self._forward, self._backend
        is_eager = forward.check is not None or forward.name in backend.reasons or compilation.num_uncompiled > 0
        if is_eager or not forward.has_parts() or not forward.has_data(args, kwargs):
            return forward(*args, **kwargs)
        before = backend.num_calls
        try:
            with self._standing_in():
                result = self._function(*args, **kwargs)
        except Exception as error:  # before anything has run, a unit can still run uncompiled
            if backend.num_calls > before:
                raise
            backend.reasons[forward.name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            return forward(*args, **kwargs)
        if backend.num_calls == before:
            raise SplitError(
                f"torch.compile did not compile unit {forward.name!r}: it is switched off (TORCH_COMPILE_DISABLE=1, or "
                "torch.compiler.set_stance). Switch it on, or leave out compile."
            )
        return result

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        slots = self._forward.slots
        if not self._stand_ins:
            for slot in slots:
                part = getattr(slot.owner, slot.attribute)
                nan = torch.full((), float("nan"), dtype=part.dtype, device=part.device)
                self._stand_ins.append(nn.Parameter(nan.expand(self._forward.parts[slot.name].shape)))
        places = [(parameters_of(slot.owner), slot.attribute) for slot in slots]
        parts = [getattr(slot.owner, slot.attribute) for slot in slots]
        try:
            for slot, stand_in, part, (place, attribute) in zip(slots, self._stand_ins, parts, places, strict=True):
                stand_in.requires_grad_(part.requires_grad)
                vars(stand_in)["_tensor_part"] = mark(part, slot.cut)
                place[attribute] = stand_in
            yield
        finally:
            for part, stand_in, (place, attribute) in zip(parts, self._stand_ins, places, strict=True):
                place[attribute] = part
                vars(stand_in).pop("_tensor_part", None)
