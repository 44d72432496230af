"""How many devices each kind of parallelism has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_pp.errors import ConfigurationError

Auto = Literal["auto"]


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the device mesh; their product is the world size.

    =======================  =====  ============================================================================
    mesh axis                size   ranks along it
    =======================  =====  ============================================================================
    pipeline                 p      hold different stages of one replica; outermost, so that it is the one to
                                    cross nodes
    data_parallel            d      hold the same stages of different replicas, shard them, and see different
                                    data
    tensor_parallel          t      hold parts of the same matrices, and see the same data; innermost. There is no
                                    such axis for t = 1
    =======================  =====  ============================================================================

    Global rank = (pipeline rank x d + data-parallel rank) x t + tensor rank. With ``data_parallel_replicate`` = r > 1
    (HSDP) two axes replace ``data_parallel``, and data-parallel rank = replicate rank x d / r + shard rank:

    =======================  =====  ============================================================================
    data_parallel_replicate  r      hold the same shards
    data_parallel_shard      d / r  hold different shards of the same parameters
    =======================  =====  ============================================================================
    """

    pipeline: int
    data_parallel: int
    data_parallel_replicate: int = 1
    tensor: int = 1

    @property
    def data_parallel_shard(self) -> int:
        """Over how many ranks each parameter is sharded."""
        return self.data_parallel // self.data_parallel_replicate

    @property
    def ranks_of_batch(self) -> int:
        """How many ranks see the same batches."""
        return self.pipeline * self.tensor

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Pipeline, data-parallel and tensor rank of a global rank; also where there is no mesh yet."""
        outer, tensor = divmod(rank, self.tensor)
        return (*divmod(outer, self.data_parallel), tensor)

    def replicate_size_within_nodes(self, ranks_per_node: int) -> int | None:
        """The fewest copies of the shards with which every group that shards parameters lies within one node.

        Ranks are counted node by node, and shard groups, with their tensor ranks, are runs of neighbours, so this is
        where the size of a run divides that of a node.

        Args:
            ranks_per_node: Processes on each node.

        Returns:
            A value for ``data_parallel_replicate``, the present one if it serves; None if only groups of one rank do.
        """
        for replicate in range(self.data_parallel_replicate, self.data_parallel):
            if (
                self.data_parallel % replicate == 0
                and ranks_per_node % (self.data_parallel // replicate * self.tensor) == 0
            ):
                return replicate
        return None if self.data_parallel_shard > 1 else self.data_parallel_replicate

    @classmethod
    def resolve(
        cls,
        pipeline: int | Auto,
        data_parallel: int | Auto,
        world_size: int,
        data_parallel_replicate: int = 1,
        tensor: int = 1,
    ) -> ParallelSizes:
        """Fills in ``"auto"`` and checks the product.

        Both ``"auto"``: all devices make one pipeline. One ``"auto"``: what the others leave.

        Raises:
            ConfigurationError: A size is not a positive integer, the product is not the world size, or
                ``data_parallel_replicate`` does not divide the data-parallel size.
        """
        _check_number("tensor_parallel_size", tensor, "1 shards no matrix")
        pipeline, data_parallel = _filled_in(pipeline, data_parallel, tensor, world_size)
        replicate = data_parallel_replicate
        _check_number("data_parallel_replicate_size", replicate, "1 shards over all of data_parallel_size")
        if data_parallel % replicate:
            more = f" x tensor {tensor}" if tensor > 1 else ""
            raise ConfigurationError(
                f"data_parallel_replicate_size={replicate} does not divide data_parallel_size={data_parallel}: "
                f"pipeline {pipeline} x replicate {replicate} x shard{more} must be the {world_size} devices of this "
                "run. Choose a divisor of the data-parallel size."
            )
        return cls(pipeline, data_parallel, replicate, tensor)


def _filled_in(pipeline: int | Auto, data_parallel: int | Auto, tensor: int, world_size: int) -> tuple[int, int]:
    """The pipeline and data-parallel sizes, without ``"auto"``."""
    for name, size in (("pipeline_parallel_size", pipeline), ("data_parallel_size", data_parallel)):
        check_size(name, size)
    if pipeline == data_parallel == "auto":
        data_parallel = 1
    named = {"pipeline_parallel_size": pipeline, "data_parallel_size": data_parallel}
    if tensor > 1:
        named["tensor_parallel_size"] = tensor
    given = {name: size for name, size in named.items() if size != "auto"}
    product = math.prod(given.values())
    text = " x ".join(f"{name}={size}" for name, size in given.items()) + (f" = {product}" if len(given) > 1 else "")
    if pipeline != "auto" and data_parallel != "auto":
        if product != world_size:
            raise ConfigurationError(
                f"{text}, but the run has {world_size} devices (Trainer devices x num_nodes). Set devices={product}, "
                "or one of the sizes to 'auto'."
            )
        return pipeline, data_parallel
    if world_size % product:
        raise ConfigurationError(
            f"{text} does not divide the {world_size} devices of this run. Choose a divisor, or set "
            f"Trainer(devices=, num_nodes=) so that their product is a multiple of {product}."
        )
    rest = world_size // product
    return (rest if pipeline == "auto" else pipeline), (rest if data_parallel == "auto" else data_parallel)


def _check_number(name: str, size: int, what_one_does: str) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationError(f"{name}={size!r} must be an integer of at least 1; {what_one_does}.")


def check_size(name: str, size: int | Auto) -> None:
    """Raises :class:`ConfigurationError` unless ``size``, the strategy's argument ``name``, can be one."""
    if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ConfigurationError(f"{name}={size!r} must be an integer of at least 1, or 'auto'.")


def resolve_num_microbatches(
    num_microbatches: int | Auto, pipeline_size: int, batch_size: int | None, fewest_samples: int = 1
) -> int:
    """The number of microbatches to cut a batch of ``batch_size`` samples into.

    ``"auto"`` takes the largest divisor of the batch size between 2 p and 4 p, since zero-bubble schedules fill their
    bubble from 2 p on; where there is none, 4 p (uneven microbatches) or as many as there are samples. One rank needs
    no microbatches. With ``"auto"`` a microbatch has at least ``fewest_samples``, if the batch has.

    Raises:
        ConfigurationError: The number is less than 1.
    """
    check_size("num_microbatches", num_microbatches)
    if num_microbatches != "auto":
        return num_microbatches
    if pipeline_size == 1:
        return 1
    most = 4 * pipeline_size
    if batch_size is None:
        return most
    most = max(min(most, batch_size // fewest_samples), 1)
    for candidate in range(most, 2 * pipeline_size - 1, -1):
        if batch_size % candidate == 0:
            return candidate
    return most
