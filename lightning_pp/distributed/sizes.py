"""How many devices each kind of parallelism has."""

from __future__ import annotations

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
    =======================  =====  ============================================================================

    Global rank = pipeline rank x d + data-parallel rank. With ``data_parallel_replicate`` = r > 1 (HSDP) there are two
    axes in the place of ``data_parallel``, and data-parallel rank = replicate rank x d / r + shard rank:

    =======================  =====  ============================================================================
    data_parallel_replicate  r      hold the same shards
    data_parallel_shard      d / r  hold different shards of the same parameters; innermost
    =======================  =====  ============================================================================
    """

    pipeline: int
    data_parallel: int
    data_parallel_replicate: int = 1

    @property
    def data_parallel_shard(self) -> int:
        """Over how many ranks each parameter is sharded."""
        return self.data_parallel // self.data_parallel_replicate

    def replicate_size_within_nodes(self, ranks_per_node: int) -> int | None:
        """The fewest copies of the shards with which every group that shards parameters lies within one node.

        Ranks are counted node by node, and shard groups are runs of neighbours, so this is where the size of a group
        divides that of a node.

        Args:
            ranks_per_node: Processes on each node.

        Returns:
            A value for ``data_parallel_replicate``, the present one if it serves; None if only groups of one rank do.
        """
        for replicate in range(self.data_parallel_replicate, self.data_parallel):
            if self.data_parallel % replicate == 0 and ranks_per_node % (self.data_parallel // replicate) == 0:
                return replicate
        return None if self.data_parallel_shard > 1 else self.data_parallel_replicate

    @classmethod
    def resolve(
        cls, pipeline: int | Auto, data_parallel: int | Auto, world_size: int, data_parallel_replicate: int = 1
    ) -> ParallelSizes:
        """Fills in ``"auto"`` and checks the product.

        Both ``"auto"``: all devices make one pipeline. One ``"auto"``: what the other leaves.

        Raises:
            ConfigurationError: A size is not a positive integer, the product is not the world size, or
                ``data_parallel_replicate`` does not divide the data-parallel size.
        """
        sizes = cls._of_two_axes(pipeline, data_parallel, world_size)
        replicate = data_parallel_replicate
        if not isinstance(replicate, int) or isinstance(replicate, bool) or replicate < 1:
            raise ConfigurationError(
                f"data_parallel_replicate_size={replicate!r} must be an integer of at least 1; 1 shards over all of "
                "data_parallel_size."
            )
        if sizes.data_parallel % replicate:
            raise ConfigurationError(
                f"data_parallel_replicate_size={replicate} does not divide data_parallel_size={sizes.data_parallel}: "
                f"pipeline {sizes.pipeline} x replicate {replicate} x shard must be the {world_size} devices of this "
                "run. Choose a divisor of the data-parallel size."
            )
        return cls(sizes.pipeline, sizes.data_parallel, replicate)

    @classmethod
    def _of_two_axes(cls, pipeline: int | Auto, data_parallel: int | Auto, world_size: int) -> ParallelSizes:
        for name, size in (("pipeline_parallel_size", pipeline), ("data_parallel_size", data_parallel)):
            check_size(name, size)
        if pipeline == "auto":
            given = 1 if data_parallel == "auto" else data_parallel
            if world_size % given:
                raise ConfigurationError(
                    f"data_parallel_size={given} does not divide the {world_size} devices of this run; "
                    "choose a divisor, or change Trainer(devices=, num_nodes=)."
                )
            return cls(world_size // given, given)
        if data_parallel == "auto":
            if world_size % pipeline:
                raise ConfigurationError(
                    f"pipeline_parallel_size={pipeline} does not divide the {world_size} devices of this run; choose a "
                    f"divisor, or set Trainer(devices=, num_nodes=) so that their product is a multiple of {pipeline}."
                )
            return cls(pipeline, world_size // pipeline)
        if pipeline * data_parallel != world_size:
            raise ConfigurationError(
                f"pipeline_parallel_size={pipeline} x data_parallel_size={data_parallel} = {pipeline * data_parallel}, "
                f"but the run has {world_size} devices (Trainer devices x num_nodes). Set devices="
                f"{pipeline * data_parallel}, or one of the sizes to 'auto'."
            )
        return cls(pipeline, data_parallel)


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
