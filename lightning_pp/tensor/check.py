"""Compares a unit on parts with the same unit run whole, on the same input.

The parameters of one unit are gathered over the tensor ranks, the unit runs once whole and once on parts, and both get
the same made-up gradient of their results. Results, gradients of inputs and gradients of parameters have to agree.
Dropout is off in both, and other random draws are the same: generators are set back. Nothing is kept afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lightning_pp.errors import SplitError
from lightning_pp.split.data.tree import leaves_of, map_leaves, own_containers
from lightning_pp.split.side_effects.generators import GeneratorStates
from lightning_pp.tensor.cuts import CutError
from lightning_pp.tensor.parts import part_of, whole_of
from lightning_pp.tensor.rules.elementwise import DROPOUTS
from lightning_pp.tensor.tracing import Inside

if TYPE_CHECKING:
    from lightning_pp.tensor.units import CutForward

# largest difference beside the largest value
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 1e-1,
}


class _WithoutDropout(TorchFunctionMode):
    """A context in which dropout drops nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {**kwargs}
            kwargs.pop("dropout_p", None)
        if name == "multi_head_attention_forward":
            args = (*args[:10], 0.0, *args[11:])
        return func(*args, **kwargs)


class UnitCheck:
    """Checks each distinct unit once, by its class and the shapes of its parameters.

    Args:
        group: The tensor ranks, which all come here with the same call.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._seen: set[Any] = set()

    def __deepcopy__(self, memo: Any) -> UnitCheck:
        """A copy of a unit is checked with it."""
        return self

    def run(self, forward: CutForward, args: Any, kwargs: Any) -> None:
        """Runs ``forward`` on parts and whole.

        Raises:
            SplitError: The two do not agree.
        """
        unit = forward.unit
        key = type(unit), tuple((name, tuple(each.shape), forward.parts.get(name)) for name, each in _named(unit))
        if key in self._seen:
            return
        self._seen.add(key)
        problem = self._compared(forward, args, kwargs)
        verdict = torch.tensor([float(bool(problem))], device=next(unit.parameters()).device)
        dist.all_reduce(verdict, group=self._group)
        if verdict.item():
            problem = problem or "another tensor rank found a difference"
            raise SplitError(
                f"Unit {forward.name!r} ({type(unit).__name__}) computes something else on {self._group.size()} tensor "
                f"ranks than on one: {problem}. {forward.cuts()} Set the matrices that cause this to 'replicate' in "
                "tensor_parallel_plan. Nothing was updated."
            )

    def _compared(self, forward: CutForward, args: Any, kwargs: Any) -> str:
        unit, group = forward.unit, self._group
        device = next(unit.parameters()).device
        generators = GeneratorStates.now(device)
        wholes = {
            name: whole_of(each, forward.parts[name], group) if name in forward.parts else each.detach().clone()
            for name, each in _named(unit)
        }
        buffers: dict[str, Tensor] = {}

        def run_parts(args: Any, kwargs: Any, given: Mapping[str, Tensor]) -> Any:
            inside = Inside(unit, lambda *a, **k: forward.run(a, k, is_checked=True))
            return torch.func.functional_call(inside, {**given, **buffers}, args, kwargs)

        def run_whole(args: Any, kwargs: Any, given: Mapping[str, Tensor]) -> Any:
            inside = Inside(unit, forward.original)
            return torch.func.functional_call(inside, {**given, **buffers}, args, kwargs)

        def outcome(function: Callable[..., Any], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
            buffers.update({f"unit.{name}": each.clone() for name, each in unit.named_buffers()})
            try:
                with _WithoutDropout():
                    return _outcome(function, own, unit, args, kwargs)
            finally:
                generators.put_back(device)

        whole = outcome(run_whole, wholes)
        try:
            parts = outcome(run_parts, dict(_named(unit)))
        except Exception as error:  # of what ran whole
            return str(error) if isinstance(error, CutError) else f"{type(error).__name__}: {error}"
        for name in [name for name in whole if name.startswith("the gradient of parameter")]:
            key = name.rpartition(" ")[2]
            if key in forward.parts:
                whole[name] = part_of(whole[name], forward.parts[key])
        return _difference(parts, whole, _tolerance(unit, args, kwargs))


def _named(unit: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(unit.named_parameters())


def _outcome(
    function: Callable[..., Any], own: Mapping[str, Tensor], unit: nn.Module, args: Any, kwargs: Any
) -> dict[str, Tensor]:
    """Results and gradients of one run, by what they are."""
    needs = {name: each.requires_grad for name, each in _named(unit)}
    own_hooks = saved_tensors_hooks(Tensor.detach, Tensor.detach)  # a checkpoint around the unit would run it again
    with torch.inference_mode(False), torch.enable_grad(), own_hooks:
        given = {f"unit.{name}": each.detach().clone().requires_grad_(needs[name]) for name, each in own.items()}
        inputs: list[Tensor] = []

        def fresh(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            copy = leaf.detach().clone()
            if copy.is_floating_point():
                inputs.append(copy.requires_grad_())
                return copy.view_as(copy)  # a unit may write into what it is given
            return copy

        args, kwargs = map_leaves(fresh, own_containers((args, kwargs)))  # a unit may write into a cache
        outputs = [leaf for leaf in leaves_of(function(args, kwargs, given)) if isinstance(leaf, Tensor)]
        found = {f"result {i}": leaf.detach() for i, leaf in enumerate(outputs)}
        ends = [leaf for leaf in outputs if leaf.requires_grad and leaf.is_floating_point()]
        starts = {f"the gradient of input {i}": each for i, each in enumerate(inputs)}
        trained = {name.removeprefix("unit."): each for name, each in given.items() if each.requires_grad}
        starts |= {f"the gradient of parameter {name}": each for name, each in trained.items()}
        if ends and starts:
            seeds = [_made_up(leaf) for leaf in ends]
            grads = torch.autograd.grad(ends, list(starts.values()), seeds, allow_unused=True)
            found |= {
                name: torch.zeros_like(each) if grad is None else grad
                for (name, each), grad in zip(starts.items(), grads, strict=True)
            }
    return found


def _made_up(like: Tensor) -> Tensor:
    """A gradient of values between -1 and 1, the same on every rank."""
    values = torch.arange(like.numel(), device=like.device, dtype=torch.float64)
    return torch.cos(values * 1.7 + 0.3).to(like.dtype).view(like.shape)


def _tolerance(unit: nn.Module, args: Any, kwargs: Any) -> float:
    """That of the least precise dtype that the unit computes in, autocast's included."""
    tensors = [*unit.parameters(), *(leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor))]
    dtypes = {each.dtype for each in tensors if each.is_floating_point()}
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) and dtypes != {torch.float64}:  # which it leaves alone
        dtypes.add(torch.get_autocast_dtype(device))
    if device != "cpu" and torch.get_float32_matmul_precision() != "highest" and torch.float32 in dtypes:
        dtypes.add(torch.float16)  # which has the precision of TF32
    return max(TOLERANCES.get(dtype, 1e-1) for dtype in dtypes)


def _difference(parts: Mapping[str, Tensor], whole: Mapping[str, Tensor], tolerance: float) -> str:
    """The first thing that differs, with numbers; empty if nothing does."""
    scales = {name: _scale(each) for name, each in whole.items()}
    # what is zero but for rounding is measured by others of its kind
    largest: dict[str, float] = {}
    for name, scale in scales.items():
        kind = name.rpartition(" ")[0]
        largest[kind] = max(largest.get(kind, 0.0), scale)
    for name, want in whole.items():
        got = parts.get(name)
        if got is None or got.shape != want.shape:
            return f"{name} has shape {None if got is None else list(got.shape)} in place of {list(want.shape)}"
        if not want.numel() or not want.is_floating_point():
            if not torch.equal(got, want):
                return f"{name} has other integers"
            continue
        finite = want.isfinite() & got.isfinite()
        difference = torch.where(finite, got.double() - want.double(), 0.0).abs()
        at = int(difference.argmax())
        scale = max(scales[name], 0.1 * largest[name.rpartition(" ")[0]])
        if difference.max().item() > tolerance * scale:
            return f"{name} is {got.flatten()[at].item():.6g} in place of {want.flatten()[at].item():.6g} at its worst"
        if not torch.equal(want.isfinite(), got.isfinite()):
            return f"{name} is not finite in other places"
    return ""


def _scale(tensor: Tensor) -> float:
    """The largest finite value."""
    return torch.where(tensor.isfinite(), tensor.double(), 0.0).abs().max().item() if tensor.numel() else 0.0
