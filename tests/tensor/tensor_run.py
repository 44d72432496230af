"""A unit on several tensor ranks beside the same unit on one."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from tensor_models import make
from torch import Tensor, nn

from lightning_pp.runtime.compilation import CompiledUnits
from lightning_pp.split.data.tree import leaves_of, map_leaves
from lightning_pp.tensor.parts import whole_of
from lightning_pp.tensor.units import TensorParallelUnits


def outcome(unit: nn.Module, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients of inputs; gradients of parameters are left in them."""
    inputs: list[Tensor] = []

    def fresh(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            inputs.append(leaf.detach().clone().requires_grad_())
            return inputs[-1]
        return leaf

    args, kwargs = map_leaves(fresh, (args, kwargs))
    results = [leaf for leaf in leaves_of(unit(*args, **kwargs)) if isinstance(leaf, Tensor)]
    generator = torch.Generator().manual_seed(5)
    total = sum((each * torch.randn(each.shape, generator=generator, dtype=each.dtype)).sum() for each in results)
    assert isinstance(total, Tensor)
    total.backward()
    return [each.detach() for each in results], [torch.zeros_like(e) if e.grad is None else e.grad for e in inputs]


def compare(
    name: str, plan: Any = "auto", observes: bool = True, sequence_parallel: bool = False, backend: str | None = None
) -> dict[str, Any]:
    """The largest difference from one device, with what was cut; compiled with ``backend``."""
    unit, args, kwargs = make(name)
    alone = copy.deepcopy(unit)
    results, input_grads = outcome(alone, args, kwargs)
    # what the grad of a parameter is on one device, by name
    wanted = {n: p.grad for n, p in alone.named_parameters()}
    model = nn.ModuleDict({"unit": unit})
    assert dist.group.WORLD is not None
    units = TensorParallelUnits(model, {"unit": unit}, plan, dist.group.WORLD, sequence_parallel=sequence_parallel)
    if observes:
        units.observe("unit", args, kwargs)
    units.shard()
    counter, compiled = None, None
    if backend is None:
        units.check_next_calls()
    else:
        from torch._dynamo.testing import CompileCounterWithBackend

        counter = CompileCounterWithBackend(backend)
        compiled = CompiledUnits({"unit": unit}, {"backend": counter})
        compiled.attach()
    got, got_grads = outcome(unit, args, kwargs)
    largest, scale = 0.0, max(each.abs().max().item() for each in [*results, *input_grads])
    for want, given in zip([*results, *input_grads], [*got, *got_grads], strict=True):
        largest = max(largest, (want - given).abs().max().item())
    for key, parameter in model.named_parameters():
        want, grad = wanted[key.removeprefix("unit.")], parameter.grad
        if want is None:
            assert grad is None or not grad.any(), key
            continue
        assert grad is not None, key
        if key in units.parts:
            assert parameter.shape == units.parts[key].local_shape != units.parts[key].shape
            grad = whole_of(grad, units.parts[key], dist.group.WORLD)
        largest = max(largest, (want - grad).abs().max().item())
    found = {
        "error": largest,
        "largest": scale,
        "parts": units.parts,
        "report": units.report(),
        "reasons": units.reasons,
    }
    if counter is not None and compiled is not None:
        found |= {"num_graphs": counter.frame_count, "uncompiled": compiled.uncompiled()}
    return found
