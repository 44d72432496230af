"""Which outputs a selective checkpoint policy saves, asked as torch's own mode asks it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

Policy: TypeAlias = Callable[..., Any] | list[Any]
"""As :func:`torch.utils.checkpoint.create_selective_checkpoint_contexts` takes it: a function, or a list to save."""

_SAVED = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_knows_output = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters  # newer versions of torch


def saves_output(policy: Policy, func: Any, args: Any, kwargs: Any, output: Any) -> bool:
    """Whether ``policy`` saves what the operation ``func`` gave; offloading policies do not in eager mode."""
    if func in SAC_IGNORED_OPS:
        return False
    if isinstance(policy, list):
        return func in policy
    known = {"op_output": output} if _knows_output else {}
    return policy(SelectiveCheckpointContext(is_recompute=False, **known), func, *args, **kwargs) in _SAVED
