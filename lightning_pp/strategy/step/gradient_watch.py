"""Finds hooks that compute over the gradients of several units: a rank has only those of its own stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.stage_model import SplitModel
from lightning_pp.split._torch_private import OperationsMode, schema_of, tree_leaves
from lightning_pp.split.fakes.parameters import is_fake
from lightning_pp.split.record.source_lines import user_line
from lightning_pp.strategy.lightning.callbacks import callbacks_of
from lightning_pp.strategy.lightning.callers import is_of_lightning, is_of_user
from lightning_pp.strategy.lightning.patching import replaced
from lightning_pp.strategy.step.update_hooks import call_within

# not where batches begin and end: there callbacks enter and leave modes of torch, which have to be left in order
_SEE_GRADIENTS = (
    *("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    "optimizer_step",
)
_NUM_WATCHED = 2  # calls that look at gradients; one that reads numbers of several is watched always
_ITEM = torch.ops.aten._local_scalar_dense.default
_UNIT = "_pp_unit_of_gradient"
_SEES = (
    "A hook sees the gradients of its own stages only. For the norm over all stages use "
    "torch.nn.utils.clip_grad_norm_, self.clip_gradients or lightning.pytorch.utilities.grad_norm."
)


@contextmanager
def gradients_watched(module: pl.LightningModule, split: SplitModel, rank: int) -> Iterator[None]:
    """In the block, hooks of the module and of the user's callbacks may not compute over gradients of several units.

    What Python makes of numbers (``.item()``) is not seen: to write into gradients after reading numbers of several
    units is an error, to read them a warning.

    Args:
        module: The user's module.
        split: Knows its units.
        rank: This rank's place in the pipeline.

    Raises:
        ConfigurationError: A hook does, when it does so first.
    """
    names, units = split.fake_parameters.canonical_names, split.fake_parameters.unit_of_parameters(split.units)
    owned = split.owned_by(rank)
    are_several = len({units.get(name) for name in owned}) > 1  # else nothing can tell a layer from the model
    unit_of = {name: units.get(of, of) if are_several else of for name, of in names.items() if of in owned}
    with ExitStack() as attached:
        for owner in (*callbacks_of(module.trainer), module):
            hooks = {name: getattr(type(owner), name, None) for name in _SEE_GRADIENTS}
            own = [name for name, hook in hooks.items() if hook is not None and not is_of_lightning(hook)]
            watches = {name: partial(_Watch(module, unit_of, name).call, getattr(owner, name)) for name in own}
            attached.enter_context(replaced(owner, **watches))
        yield


class _Watch(OperationsMode):  # type: ignore[no-untyped-call]
    """Follows gradients through the operations of one hook."""

    def __init__(self, module: pl.LightningModule, unit_of: Mapping[str, str], hook: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module, self._unit_of_name, self._hook = module, unit_of, hook
        self._num_left, self._looks, self._has_told = _NUM_WATCHED, False, False
        self._units: dict[int | None, str] = {}  # by the address of a gradient
        self._read: dict[str, str] = {}  # unit to line
        self._last_read = ""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the hook."""
        if not self._num_left:
            return function(*args, **kwargs)
        self._read, self._looks = {}, False
        result = call_within(self._following, function, *args, **kwargs)
        if len(self._read) <= 1:
            self._num_left -= self._looks
        elif not self._has_told:
            self._has_told = True
            rank_zero_warn(f"{self._reading} {_SEES} Numbers of one gradient are right.")
        return result

    @contextmanager
    def _following(self) -> Iterator[None]:
        gradients = {name: p.grad for name, p in self._module.named_parameters() if p.grad is not None}
        self._units = {_address(gradient): self._unit_of_name[name] for name, gradient in gradients.items()}
        with self:
            yield
        now = [p.grad for p in self._module.parameters() if p.grad is not None]
        if len(self._read) > 1 and any(_address(gradient) not in self._units for gradient in now):
            raise ConfigurationError(self._text_about_write("sets gradients"))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation."""
        result = func(*args, **kwargs)
        inputs = [self._unit_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        units: list[str | None] = list(dict.fromkeys(filter(None, inputs)))
        if not units:
            return result
        self._looks = True
        if schema_of(func).is_mutable and self._read:
            self._check_write({self._units.get(_address(each)) for each in tree_leaves(args[0])})
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if "_foreach_" in schema_of(func).name or "_fused_" in schema_of(func).name:  # an operation for each place
            units = inputs
        elif len(units) > 1 and _is_called_by_user():
            raise ConfigurationError(
                f"{self._hook} ({user_line()}) computes over the gradients of {len(units)} units ({units[0]!r}, "
                f"{units[1]!r}{', ...' if len(units) > 2 else ''}), which is not what one device computes. {_SEES}"
            )
        elif func is _ITEM and args[0].dtype != torch.bool and _is_called_by_user():
            self._last_read = str(units[0])
            self._read.setdefault(self._last_read, user_line())
        for index, each in enumerate(results if len(units) in (1, len(results)) else ()):
            setattr(each, _UNIT, units[index % len(units)])
        return result

    def _check_write(self, units: set[str | None]) -> None:
        """Raises :class:`ConfigurationError` unless the gradients of ``units`` may be written into after these reads.

        A write may follow a read of a number of the same gradient.
        """
        if units == {self._last_read}:
            self._read.pop(self._last_read, None)
        elif units != {None} and len(self._read) > 1:
            raise ConfigurationError(self._text_about_write(f"writes into gradients ({user_line()})"))

    def _text_about_write(self, writes: str) -> str:
        return (
            f"{self._reading} Then it {writes}, which may not be what one device does. {_SEES} If each gradient is "
            "changed by a number of its own, read that number right before writing. Read other numbers in another "
            "hook, such as on_train_batch_end."
        )

    @property
    def _reading(self) -> str:
        return f"{self._hook} ({next(iter(self._read.values()))}) reads numbers of the gradients of several units."

    def _unit_of(self, leaf: Any) -> str | None:
        unit: str | None = getattr(leaf, _UNIT, None)
        return self._units.get(_address(leaf)) if unit is None else unit


def _address(leaf: Any) -> int | None:
    """Where a tensor lies. ``gradient.data`` lies where the gradient does."""
    if not isinstance(leaf, Tensor) or is_fake(leaf) or leaf.layout is not torch.strided:
        return None
    return (leaf.to_local() if isinstance(leaf, DTensor) else leaf).data_ptr() or None


def _is_called_by_user() -> bool:
    """Whether the user called the operation that runs, and not Lightning or this package."""
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module not in (__name__, OperationsMode.__module__) and module.partition(".")[0] != "torch":
            return is_of_user(frame)
        frame = frame.f_back
    return False
