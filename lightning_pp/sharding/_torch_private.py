"""The private names of torch that sharding uses, and names that differ between its versions; nothing else uses any.

A name that the installed version lacks raises an error at its first use.

FSDP2 is used for two things: sharded parameters and gathering them, both by its public calls. Its module hooks decide
when to gather, free and reduce, from the order in which autograd visits modules; a pipeline has an order of its own, so
they are taken off again. The names of the hooks' handles have been the same from torch 2.13 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer

from lightning_pp._private_names import private, reader_of, uses

_graph_task_id: Callable[[], int] = private("torch._C._current_graph_task_id")
# The number that the next autograd node made in this thread gets. A backward pass visits nodes from high to low numbers
# as far as dependencies allow.
next_node_number: Callable[[], int] = private("torch.autograd._get_sequence_nr")
_from_local: Callable[..., DTensor] = private("torch.distributed.fsdp._fully_shard._fsdp_common._from_local_no_grad")
_DTensorSpec: Callable[..., Any] = private("torch.distributed.tensor._dtensor_spec.DTensorSpec")
_TensorMeta: Callable[..., Any] = private("torch.distributed.tensor._dtensor_spec.TensorMeta")

# In place on a list of tensors in one kernel: list *= tensor; clamping from below and above; copying list to list.
multiply_all_: Callable[[list[Tensor], Tensor], None] = private("torch._foreach_mul_")
clamp_all_min_: Callable[[list[Tensor], float], None] = private("torch._foreach_clamp_min_")
clamp_all_max_: Callable[[list[Tensor], float], None] = private("torch._foreach_clamp_max_")
copy_all_: Callable[[list[Tensor], list[Tensor]], None] = private("torch._foreach_copy_")
# (tensors, p, dtype): the p-norm of each, computed in that dtype
norm_of_each: Callable[[list[Tensor], float, torch.dtype], list[Tensor]] = private("torch._foreach_norm")
# (gradients, found, inverse scale): multiplies by the inverse scale, and sets found to 1 where one is not finite
unscale_all_: Callable[[list[Tensor], Tensor, Tensor], None] = private(
    "torch._amp_foreach_non_finite_check_and_unscale_"
)

# A context in which attributes of a DTensor are read without looking whether its class has a function for that.
as_plain_tensors: Callable[[], AbstractContextManager[None]] = private("torch._C.DisableTorchFunctionSubclass")

# The shard of a DTensor that a rank holds, itself: to_local() makes a view of a parameter's.
shard_itself: Callable[[DTensor], Tensor] = reader_of("torch.distributed.tensor.DTensor._local_tensor")

reduce_scatter, all_gather = dist.reduce_scatter_single, dist.all_gather_single

_states_of_modules: MutableMapping[nn.Module, object] = private(
    "torch.distributed._composable_state._module_state_mapping"
)
_HOOK_HANDLES = ("_pre_forward_hook_handle", "_post_forward_hook_handle")


@uses("torch.distributed.fsdp.FSDPModule._get_fsdp_state")
def shard_together(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    ignored_parameters: Collection[nn.Parameter],
    *,
    cpu_offload: bool = False,
) -> FSDPModule:
    """Shards the parameters of ``modules`` as one group that neither gathers, frees nor reduces by itself.

    Args:
        modules: Modules whose parameters are gathered in one collective; they may share parameters.
        mesh: One dimension (shard) or two (replicate, shard).
        mp_policy: Its ``param_dtype`` is the dtype of gathered parameters.
        ignored_parameters: Parameters that stay as they are.
        cpu_offload: Keep shards on the host, in pinned memory if there is an accelerator.

    Returns:
        The module through which the group is gathered and freed: ``unshard()`` and ``reshard()``.

    Raises:
        RuntimeError: This version of torch keeps FSDP2's hooks under another name.
    """
    fully_shard(
        list(modules) if len(modules) > 1 else modules[0],
        mesh=mesh,
        reshard_after_forward=False,
        mp_policy=mp_policy,
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy(),
        ignored_params=set(ignored_parameters),
    )
    leader = modules[0]
    assert isinstance(leader, FSDPModule)
    state = leader._get_fsdp_state()
    for name in _HOOK_HANDLES:
        handle = getattr(state, name, None)
        if handle is None:
            raise RuntimeError(
                f"FSDP2 of torch {torch.__version__} has no {name}, so its hooks cannot be removed; sharding inside "
                "stages works with torch 2.13 to 2.15"
            )
        handle.remove()
    return leader


def forget_sharding(modules: Iterable[nn.Module]) -> None:
    """Lets ``modules`` be sharded again one day; hooks, attributes and classes of theirs stay."""
    for module in modules:
        _states_of_modules.pop(module, None)


def backward_pass() -> int | None:
    """A number for the backward pass that runs in this thread now, or None outside of one."""
    number = int(_graph_task_id())
    return None if number == -1 else number


@uses("torch.autograd.Variable._execution_engine")
def call_after_backward(function: Callable[[], None]) -> None:
    """Calls ``function`` at the end of the backward pass that runs now."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


@uses("torch.Tensor._base", "torch.autograd.graph.Node._sequence_nr")
def nodes_made_since(number: int, outputs: Iterable[Tensor]) -> list[Node]:
    """The autograd nodes, made since :func:`next_node_number` gave ``number``, that lead back from ``outputs``.

    A view counts by the node of its base as well: editing the view in place replaces the view's own node.
    """
    nodes: dict[int, Node] = {}
    for output in outputs:
        base = output._base
        for tensor in (output,) if base is None else (output, base):
            node = tensor.grad_fn
            if node is not None and node._sequence_nr() >= number:
                nodes[id(node)] = node
    return list(nodes.values())


@uses("torch.Tensor._values")
def sparse_values(gradient: Tensor) -> Tensor:
    """The values that a sparse gradient holds, also of one that is not coalesced, as they lie in it."""
    return gradient._values()


# AgreeingGradScaler overrides the second
@uses("torch.amp.GradScaler._device", "torch.amp.GradScaler._unscale_grads_")
def device_type_of(scaler: GradScaler) -> str:
    """The type of device that ``scaler`` was made for."""
    return scaler._device


@uses("torch.optim.Optimizer._optimizer_step_post_hooks")
def call_first_after_update(
    optimizer: Optimizer, hook: Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
) -> None:
    """Calls ``hook`` after each step of ``optimizer``, before all of the optimizer's other hooks."""
    handle = optimizer.register_step_post_hook(hook)
    cast(Any, optimizer)._optimizer_step_post_hooks.move_to_end(handle.id, last=False)


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """The hooks before and after each step of ``optimizer``."""
    held: Any = optimizer
    return [*held._optimizer_step_pre_hooks.values(), *held._optimizer_step_post_hooks.values()]


@uses("torch.Tensor._backward_hooks", "torch.Tensor._post_accumulate_grad_hooks")
def gradient_hooks(tensor: Tensor) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """The dicts that torch calls hooks from: those of ``register_hook``, and those after accumulation."""
    on_gradient, after_accumulation = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return {} if on_gradient is None else on_gradient, {} if after_accumulation is None else after_accumulation


def dtensor_of(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: Sequence[int]
) -> DTensor:
    """A DTensor with this rank's part, which stays where it is: ``from_local`` moves it to the device of the mesh."""
    return _from_local(local, _DTensorSpec(mesh, tuple(placements), _TensorMeta(shape, tuple(stride), local.dtype)))
