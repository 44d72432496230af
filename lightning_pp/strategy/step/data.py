"""The data that the strategy needs: a first batch to record, and the same draws on all stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_pp.errors import ConfigurationError
from lightning_pp.split.data.tree import own_containers, own_copy
from lightning_pp.split.side_effects.generators import generators_untouched
from lightning_pp.split.side_effects.module_state import preserved_state
from lightning_pp.split.side_effects.reach import Reached, restored
from lightning_pp.strategy._lightning_private import (
    check_iterable,
    data_source_of,
    goes_through_loaders_in_turn,
    prepare_for_training,
    request_dataloader,
    transferred_by_hook,
)
from lightning_pp.strategy.device_queues import advise_pinned_memory
from lightning_pp.strategy.step.first_look import look_at
from lightning_pp.strategy.step.held_output import output_held

_MISSING = object()


class FirstBatch(NamedTuple):
    """A batch to record.

    Attributes:
        batch: As the step will see it, on the device.
        has_several_loaders: Whether the loop goes through several loaders in turn, and tells the step which.
        left: Modules, names and values of the attributes that the hooks that made it have set.
    """

    batch: Any
    has_several_loaders: bool
    left: Sequence[tuple[nn.Module, str, Any]] = ()

    @contextmanager
    def as_hooks_left_it(self) -> Iterator[None]:
        """In the block, the module has the attributes that hooks have set, for a step; afterwards it is as before."""
        before = [(vars(module), name, vars(module).get(name, _MISSING)) for module, name, _ in self.left]
        for module, name, value in self.left:
            vars(module)[name] = value
        try:
            yield
        finally:
            for attributes, name, value in before:
                attributes.pop(name, None)
                if value is not _MISSING:
                    attributes[name] = value


def has_no_batches(trainer: pl.Trainer) -> bool:
    """Whether the trainer runs over no batches, so that Lightning makes no loader (``limit_val_batches=0``)."""
    if trainer.state.fn == TrainerFn.FITTING:
        has_sanity_check = trainer.enable_validation and trainer.num_sanity_val_steps > 0
        return trainer.limit_train_batches == 0 and not has_sanity_check
    limits = {
        TrainerFn.VALIDATING: trainer.limit_val_batches,
        TrainerFn.TESTING: trainer.limit_test_batches,
        TrainerFn.PREDICTING: trainer.limit_predict_batches,
    }
    return limits[trainer.state.fn] == 0  # type: ignore[index]


def first_batch(trainer: pl.Trainer, data_parallel_rank: int = 0) -> FirstBatch:
    """The first batch of what the trainer is about to run over, as the step will see it, on the device.

    The loader is made, and kept: its hook is called once. Its first pass is begun, and kept too (:mod:`first_look`).
    The random generators are as before afterwards. What the transfer hooks print is dropped, and what they change is
    put back.

    Args:
        trainer: The trainer, in ``Strategy.setup``.
        data_parallel_rank: By which workers of the loader are seeded.

    Raises:
        ConfigurationError: The loader is empty.
        TypeError: Lightning's own: it is not iterable.
    """
    with generators_untouched(trainer.strategy.root_device):
        is_training = trainer.state.fn == TrainerFn.FITTING
        loader, item = _looked_at(trainer, _loop_of(trainer), data_parallel_rank, is_training=is_training)
        advise_pinned_memory(item, trainer.strategy.root_device)
        # a copy: hooks write into batches, and a dataset or a stream may hand out the same one again
        batch = own_copy(item)
        batch, left = _transferred(trainer, trainer.precision_plugin.convert_input(batch))
        return FirstBatch(batch, goes_through_loaders_in_turn(loader) and len(loader.flattened) > 1, left)


def _transferred(trainer: pl.Trainer, batch: Any) -> tuple[Any, list[tuple[nn.Module, str, Any]]]:
    """The batch after the transfer hooks, and the attributes that they set on the module, which is as before.

    The loop calls them again with its first batch. What they make of it now cannot be kept for that: they may draw, or
    ask the trainer, and the loop may run another batch first.
    """
    module = trainer.lightning_module
    data_module: Any = trainer.datamodule  # type: ignore[attr-defined]
    of_data = [] if data_module is None else [Reached("", vars(data_module))]
    with output_held(), restored(of_data), preserved_state(module) as changes:
        before = {child: vars(child).copy() for child in module.modules()}
        batch = transferred_by_hook(module, batch)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        edited = [(module.get_submodule(name), key, value) for name, key, value in changes()]
        left = [(child, key, own_containers(value)) for child, key, value in edited if before[child].get(key) is value]
        left += [
            (child, key, value)
            for child, attributes in before.items()
            for key, value in vars(child).items()
            if attributes.get(key, _MISSING) is not value
        ]
    return batch, left


def warn_equal_streams(fingerprints: Sequence[Any]) -> None:
    """Warns if all replicas got the same batch of an iterable dataset, which is then not shared out.

    Args:
        fingerprints: Of the batch of each replica.
    """
    if len(set(fingerprints)) == 1:
        rank_zero_warn(
            f"All {len(fingerprints)} replicas got the same batch. Lightning does not divide an IterableDataset among "
            "them: each replica reads all of it and trains on the same samples. Divide it by "
            "strategy.data_parallel_rank and strategy.data_parallel_size, as "
            "datasets.distributed.split_dataset_by_node(dataset, rank, world_size) does."
        )


def reads_streams(trainer: pl.Trainer) -> bool:
    """Whether the training data come from an iterable dataset."""
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return any(isinstance(getattr(loader, "dataset", None), IterableDataset) for loader in loaders)


def _loop_of(trainer: pl.Trainer) -> Any:
    return {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }[trainer.state.fn]  # type: ignore[index]


def _looked_at(
    trainer: pl.Trainer, loop: Any, data_parallel_rank: int, *, is_training: bool
) -> tuple[CombinedLoader, Any]:
    """Makes the loader, reads its first batch, and makes the loop use this loader first."""
    source = data_source_of(loop)
    vars(source).pop("dataloader", None)  # left by a run that never asked
    made = request_dataloader(source)
    loader = made  # what Lightning's loops make of a loader, or of several in lists and dicts
    if not isinstance(made, CombinedLoader):
        loader = CombinedLoader(made, "max_size_cycle" if is_training else "sequential")
    assert trainer.state.fn is not None
    for each in loader.flattened:
        check_iterable(each, source, trainer.state.fn)
    if is_training:
        prepare_for_training(trainer, loader)
    loaders, looks = list(loader.flattened), []
    for place, each in enumerate(loaders):
        seed_workers_by(each, data_parallel_rank)
        loaders[place], look = look_at(each)
        looks.append(look)
        if goes_through_loaders_in_turn(loader):
            break
    if not looks:
        raise ConfigurationError("There is no dataloader. The model is cut by looking at one batch. Give at least one.")
    loader.flattened = loaders
    kept = made if isinstance(made, CombinedLoader) else loader.iterables

    def once() -> Any:
        vars(source).pop("dataloader", None)
        return kept

    vars(source)["dataloader"] = once
    items = [look.read() for look in looks]
    if goes_through_loaders_in_turn(loader):
        return loader, items[0]
    batches = copy(loader)
    batches.flattened = items
    return loader, batches.iterables


def seed_workers_by(loader: object, data_parallel_rank: int) -> None:
    """Loader workers are seeded by data-parallel rank, so that all stages of a replica see the same augmentations.

    It must come before Lightning's own seeding by global rank, which leaves a loader alone that has a seeding already.
    """
    import os

    if isinstance(loader, DataLoader) and loader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=data_parallel_rank)
