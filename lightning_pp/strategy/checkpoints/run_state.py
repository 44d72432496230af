"""The state of a run in a checkpoint beside Lightning's: random numbers, and the loaders of each replica."""

from __future__ import annotations

import io
import logging
import pickle
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_pp.checkpoint.content import CURRENT_MODEL, MODEL, OPTIMIZERS
from lightning_pp.errors import CheckpointError
from lightning_pp.split.data.tree import leaves_of
from lightning_pp.strategy.checkpoints.callback_states import fingerprints_of, give_back, states_of_ranks
from lightning_pp.strategy.checkpoints.data_position import DataPosition

if TYPE_CHECKING:
    from lightning_pp.strategy.engine import PipelineEngine


RUN_STATE = "lightning_pp"
_BEGINS_AGAIN = "A training that is resumed within an epoch begins its data again."
_log = logging.getLogger(__name__)


def own_run_state(checkpoint: dict[str, Any], engine: PipelineEngine, data: DataPosition) -> dict[str, Any]:
    """What to add to a checkpoint; every rank calls it. What cannot be pickled is taken out of it.

    Lightning keeps the loaders' state of rank 0. Where those of the replicas differ, all are kept. Where loaders stand
    that have no state is kept as well.

    Raises:
        CheckpointError: On all ranks: a weight is not finite, and the strategy is to look at that.
    """
    lost, loaders, is_root = Unpicklable(), b"", dist.get_rank() == 0
    held = checkpoint.get(key := engine.module.CHECKPOINT_HYPER_PARAMS_KEY)
    if is_root and isinstance(held, dict) and any(map(_holds_module, held.values())):
        made = engine.module.hparams_initial  # as __init__ got them; by now this rank has only its stages of modules
        checkpoint[key] = {name: made.get(name) if _holds_module(held[name]) else held[name] for name in held}
    lost.take_out(checkpoint, is_root=is_root)
    if engine.rank == 0:
        states, position = _loader_states(checkpoint), data.state()
        if lost.finds(states, "the state of the training loaders", _BEGINS_AGAIN):
            states.clear()
        if lost.finds(position, "the place in the training data", _BEGINS_AGAIN):
            position = None
        loaders = pickle.dumps((states, position))
    callbacks = checkpoint.get("callbacks", {})
    prints = fingerprints_of(callbacks)
    mine = (engine.rank, engine.replica, loaders, engine.finite.bad_weight(), prints, list(lost.texts))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    if bad := [weight for _, _, _, weight, *_ in gathered if weight is not None]:
        raise CheckpointError(
            f"{bad[0]} Nothing is saved, so no good checkpoint is replaced. Resume from the last one. "
            "on_nonfinite='ignore' saves such weights too."
        )
    warned = {what for *_, whats in gathered[: dist.get_rank()] for what in whats}
    for text in (text for what, text in lost.texts.items() if what not in warned):
        warnings.warn(text, stacklevel=2)
    of_replica = {replica: state for rank, replica, state, *_ in gathered if rank == 0}
    own: dict[str, Any] = {"random": engine.random_state()}
    if kept := states_of_ranks(callbacks, [prints for *_, prints, _ in gathered], engine.module):
        own["callbacks"] = kept
    states = [pickle.loads(of_replica[replica]) for replica in sorted(of_replica)]
    if len({pickle.dumps(state) for state, _ in states}) > 1:
        own["loaders"] = [state for state, _ in states]
    if all(position is not None for _, position in states):
        positions = [position for _, position in states]
        own["data"] = positions if len(set(of_replica.values())) > 1 else positions[:1]
        own["num_replicas"] = len(states)
    return {RUN_STATE: own}


def _holds_module(value: Any) -> bool:
    return any(isinstance(leaf, nn.Module) for leaf in leaves_of(value))


def restore_run_state(checkpoint: Mapping[str, Any], engine: PipelineEngine, data: DataPosition) -> None:
    """Continues the random numbers and the data, and hands the trainer the loaders' state of this replica."""
    own = checkpoint.get(RUN_STATE)
    if not isinstance(own, Mapping):
        return
    engine.load_random_state(own["random"])
    if kept := own.get("callbacks"):
        give_back(kept, checkpoint["callbacks"], engine.module)
    if positions := own.get("data"):
        data.resume(positions[engine.replica if engine.replica < len(positions) else 0])
        num_batches, earlier, now = positions[0]["num_batches"], own["num_replicas"], engine.sizes.data_parallel
        if num_batches and earlier != now:
            _log.warning(
                f"The checkpoint was saved after {num_batches} batches with {earlier} replicas, but this run has "
                f"{now}, which share out the data differently. Each continues after {num_batches} batches of its own. "
                "In this epoch some samples may come twice and others not at all."
            )
    loaders = own.get("loaders")
    if loaders is None:
        return
    if len(loaders) == engine.sizes.data_parallel:
        _loader_states(checkpoint)[:] = loaders[engine.replica]
    else:
        _log.warning(
            f"{len(loaders)} replicas saved this checkpoint with their loaders at different places, but this run has "
            f"{engine.sizes.data_parallel} replicas. All of them start where the first replica's loaders were."
        )


def _loader_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    """The states of the training loaders, as Lightning keeps them."""
    fit_loop: Mapping[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    states: list[Any] = fit_loop.get("state_dict", {}).get("combined_loader", [])
    return states


_LOOKED_INTO = ("callbacks", "lr_schedulers", "loops", MODEL, CURRENT_MODEL, OPTIMIZERS)


class _Pickler(pickle.Pickler):
    """Without tensors: they can be pickled, and may be large."""

    def persistent_id(self, held: Any) -> Any:
        return "tensor" if isinstance(held, Tensor) else None


class Unpicklable:
    """The states that one save leaves out; ``texts`` has a warning for each."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def finds(self, value: Any, what: str, means: str) -> bool:
        """Whether ``value`` cannot be pickled, which is noted."""
        try:
            _Pickler(io.BytesIO()).dump(value)
        except Exception as error:  # whatever pickling raises
            why = f"{type(error).__name__}: {re.sub(' at 0x[0-9a-f]+', '', str(error))}"  # one text in every save
            self.texts[what] = f"The checkpoint is saved without {what}: it cannot be pickled ({why}). {means}"
        return what in self.texts

    def take_out(self, checkpoint: dict[str, Any], *, is_root: bool) -> None:
        """Takes out states of callbacks. On the root, entries beside model, optimizers and loops are taken out too."""
        means = "After resuming, the callback has its initial state."
        self._drop(checkpoint.get("callbacks", {}), "the state of the callback {!r}", means)
        if is_root:
            means = "After resuming, the scheduler has the value from configure_optimizers."
            for number, state in enumerate(checkpoint.get("lr_schedulers", [])):
                self._drop(state, f"{{!r}} in the state of learning rate scheduler {number}", means)
            self._drop(checkpoint, "{!r}", "Loading the checkpoint does not restore it.")

    def _drop(self, held: dict[str, Any], what: str, means: str) -> None:
        for key in [key for key in held if key not in _LOOKED_INTO]:
            if self.finds(held[key], what.format(key), means):
                del held[key]
