"""Whether a checkpoint fits the model; every check runs before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from lightning_pp.checkpoint.ownership.catalog import OptimizerGroups, ParameterCatalog
from lightning_pp.checkpoint.storage.location import Location
from lightning_pp.errors import CheckpointError, enumerate_names


def check_model(
    path: Location, saved: Mapping[str, Any], catalog: ParameterCatalog, own: Collection[str], strict: bool
) -> None:
    """Compare the names and shapes in a checkpoint with those of the model.

    A hook may have put into ``saved`` what this rank has of the model. So names are missing where this rank owns one of
    them; every name has an owner.

    Args:
        path: The checkpoint, for the message.
        saved: What the checkpoint has for each name; of tensors only the shape is looked at.
        catalog: The unsplit module.
        own: Canonical names of what this rank owns.
        strict: Whether missing and unexpected names are errors; other shapes always are.

    Raises:
        CheckpointError: They differ.
    """
    shapes = {name: value.shape if isinstance(value, torch.Tensor) else None for name, value in saved.items()}
    expected = {name: catalog.shapes.get(catalog.canonical_name(name)) for name in catalog.names}
    problems = []
    if strict:
        missing = [name for name in catalog.names if name not in shapes]
        if any(catalog.canonical_name(name) in own for name in missing):
            problems.append(
                f"{len(missing)} of the model's {len(catalog.names)} names are missing: {enumerate_names(missing)}"
            )
        if unexpected := [name for name in shapes if name not in expected]:
            problems.append(
                f"{len(unexpected)} of its {len(shapes)} names are unexpected: {enumerate_names(unexpected)}"
            )
    reshaped = [
        f"{name} ({_shape(shapes[name])} in the checkpoint, {_shape(shape)} in the model)"
        for name, shape in expected.items()
        if name in shapes and _shape(shapes[name]) != _shape(shape)
    ]
    if reshaped:
        problems.append(f"{len(reshaped)} have another shape: {enumerate_names(reshaped)}")
    if problems:
        fix = "build the model with the configuration that the checkpoint was saved with"
        if strict and not reshaped:
            fix += ", or set strict_loading = False on the LightningModule to leave such names as they are"
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(problems)}. To fix it, {fix}")


def check_num_optimizers(path: Location, num_saved: int, num_optimizers: int) -> None:
    """Compare the numbers of optimizers.

    Raises:
        CheckpointError: They differ.
    """
    if num_saved == 0 < num_optimizers:
        raise CheckpointError(
            f"{path} has no optimizer state (saved with save_weights_only=True, or before any training), so training "
            "cannot resume from it; load its weights before the run instead of passing it as ckpt_path"
        )
    if num_saved != num_optimizers:
        raise CheckpointError(
            f"{path} has the state of {num_saved} optimizers, but configure_optimizers returned {num_optimizers}; "
            "return the same number as when the checkpoint was saved"
        )


def check_group_sizes(path: Location, index: int, sizes: Sequence[int], groups: OptimizerGroups) -> None:
    """Compare the numbers of parameters in the groups of optimizer ``index``.

    Raises:
        CheckpointError: They differ.
    """
    ours = [len(group) for group in groups]
    if list(sizes) != ours:
        raise CheckpointError(
            f"optimizer {index} in {path} has parameter groups of {list(sizes)} parameters, but the model's has "
            f"{ours}; return the same groups from configure_optimizers as when the checkpoint was saved"
        )


def check_group_names(path: Location, index: int, saved: Sequence[Sequence[str]], groups: OptimizerGroups) -> None:
    """Compare the parameters in the groups of optimizer ``index``, whatever their order.

    Raises:
        CheckpointError: They differ.
    """
    check_group_sizes(path, index, [len(group) for group in saved], groups)
    for number, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        if set(theirs) != set(ours):
            raise CheckpointError(
                f"group {number} of optimizer {index} in {path} holds other parameters than the model's: only in the "
                f"checkpoint {enumerate_names(sorted(set(theirs) - set(ours))) or 'none'}; only in the model "
                f"{enumerate_names(sorted(set(ours) - set(theirs))) or 'none'}; return the same groups from "
                "configure_optimizers as when the checkpoint was saved"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not a tensor" if shape is None else str(tuple(shape))
