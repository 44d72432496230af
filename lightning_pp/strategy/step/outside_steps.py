"""Hooks and callbacks that compute with weights of other stages: they may use shapes, but no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_pp.errors import ConfigurationError, add_note
from lightning_pp.split.fakes.fake_mode import FakeValueMode, NeedsDataError
from lightning_pp.split.fakes.parameters import FakeParameters, is_fake
from lightning_pp.split.record.source_lines import innermost_user_line, user_line
from lightning_pp.strategy.lightning.patching import replaced


class OutsideSteps:
    """Limits user code outside of steps that computes from weights of another stage.

    A stage runs the user's step up to its last unit, so there fakes are followed by the values that others send. In a
    hook or a callback nobody sends anything: there a fake that is written into a tensor, back-propagated into a
    gradient or logged is an error that names the line.

    Args:
        module: The user's module.
        mode: Makes its fakes.
    """

    def __init__(self, module: pl.LightningModule, mode: FakeValueMode) -> None:
        self._module = module
        self._mode = mode

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In the block, except in :meth:`in_step`, using a value that this rank does not have raises.

        Raises:
            LostEditError: It is written into a tensor with data, also as a gradient.
            NeedsDataError: It is logged, or its data are read.
            ConfigurationError: A whole ``state_dict`` is loaded into what this rank has of the module.
        """
        log = partial(_log, self._mode, self._module.log)
        load = partial(_load, self._module, self._module.load_state_dict)
        with (
            self._mode.refusing_edits(),
            replaced(self._module, log=log, load_state_dict=load),
            self._mode.refusing_text(),
            _data_reaches_shards(),
        ):
            yield

    def in_step(self) -> AbstractContextManager[None]:
        """In the block, a step runs."""
        return self._mode.refusing_edits(False)


@contextmanager
def _data_reaches_shards() -> Iterator[None]:
    """In the block, ``parameter.data = value`` of a sharded parameter writes into its shard; torch drops the value.

    A value that is no ``DTensor`` is the whole, the same on every rank.
    """
    held, before = cast(Any, torch.Tensor.data), vars(DTensor).get("data")

    def write(parameter: DTensor, value: torch.Tensor) -> None:
        if value.shape != parameter.shape or value.dtype != parameter.dtype:
            held.__set__(parameter, value)
            return
        mesh, placements = parameter.device_mesh, parameter.placements
        own = value if isinstance(value, DTensor) else distribute_tensor(value, mesh, placements, src_data_rank=None)
        with torch.no_grad():
            parameter.copy_(own.redistribute(mesh, placements))

    DTensor.data = property(held.__get__, write)  # type: ignore[assignment]
    try:
        yield
    finally:
        del DTensor.data
        if before is not None:
            DTensor.data = before


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _log(mode: FakeValueMode, log: Callable[..., None], name: str, value: Any, *args: Any, **options: Any) -> None:
    if mode.refuses_edits and isinstance(value, torch.Tensor) and is_fake(value):
        raise NeedsDataError(f"self.log({name!r})", user_line(), in_step=False)
    log(name, value, *args, **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _load(
    module: pl.LightningModule, load: Callable[..., Any], state_dict: Mapping[str, Any], *args: Any, **options: Any
) -> Any:
    try:
        return load(state_dict, *args, **options)
    except RuntimeError as error:
        own = sum(name in state_dict for name in module.state_dict())
        raise ConfigurationError(
            f"{user_line()} loads a state_dict with {len(state_dict)} names. This rank has the parameters of its own "
            f"stages, {own} of these names. Load whole weights by ckpt_path or initial_weights, or after "
            "strategy.gather_module(). Keep averages of weights by Lightning's WeightAveraging."
        ) from error


def refuse_missing_name(error: KeyError, fake_parameters: FakeParameters) -> None:
    """Raises :class:`ConfigurationError` if ``error`` is for the name of a parameter that this rank does not hold."""
    name, num_others = error.args[0] if error.args else None, len(fake_parameters.released)
    if isinstance(name, str) and name in fake_parameters.released:
        raise ConfigurationError(
            f"{innermost_user_line(error)} found no {name!r}, which is a parameter of another stage. On this rank "
            f"named_parameters() and state_dict() have {len(fake_parameters.names) - num_others} of "
            f"{len(fake_parameters.names)} parameters: those of its own stages. Take the names from there, on each "
            "rank. Keep averages of weights by Lightning's WeightAveraging. For all parameters call "
            "strategy.gather_module() after the run."
        ).with_traceback(error.__traceback__) from error


def note_shards(error: RuntimeError) -> None:
    """Adds what to do to torch's error about an operation on a shard and another tensor."""
    if "mixed torch.Tensor and DTensor" in str(error):
        add_note(
            error,
            "Between calls of its unit a parameter is a shard, a DTensor. In a step call the unit itself: head(x), not "
            "head.forward(x). In a hook write to it in place or by parameter.data, or set sharding='replicate' on the "
            "strategy, which keeps parameters whole.",
        )
