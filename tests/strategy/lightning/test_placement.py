"""Two nodes of two processes, as a launcher tells of them: who shares what with whom, and what is said of it."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
from pipelined_fit import fit
from pool import WorkerPool
from small_models import Blocks

from lightning_pp import PipelineParallelStrategy


def placed(node_of_rank: list[int], sizes: dict[str, Any]) -> tuple[list[int], list[int], list[str]]:
    """The nodes of this rank's shard group and of its pipeline, and what was warned of."""
    rank = int(os.environ["RANK"])
    node = node_of_rank[rank]
    local_rank = node_of_rank[:rank].count(node)
    os.environ.update(GROUP_RANK=str(node), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE="2", GROUP_WORLD_SIZE="2")
    strategy = PipelineParallelStrategy(**sizes, num_microbatches=2, schedule="gpipe", check_first_batches=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Blocks(), strategy=strategy, devices=2, num_nodes=2, max_steps=1)
    mesh = strategy.device_mesh
    shard = mesh["data_parallel_shard" if "data_parallel_replicate" in sizes else "data_parallel"].mesh.tolist()
    pipeline = mesh["pipeline"].mesh.tolist()
    told = [str(each.message) for each in caught if "cross nodes" in str(each.message)]
    return [node_of_rank[each] for each in shard], [node_of_rank[each] for each in pipeline], told


def test_shards_stay_on_a_node_and_the_pipeline_crosses(pool: WorkerPool) -> None:
    ranks = pool.run(placed, [0, 0, 1, 1], {"pipeline_parallel_size": 2}, world_size=4)
    assert [shard for shard, _, _ in ranks] == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert all(pipeline == [0, 1] for _, pipeline, _ in ranks)
    assert not any(told for _, _, told in ranks)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("node_of_rank", "sizes", "rank", "said"),
    [
        ([0, 0, 1, 1], {"pipeline_parallel_size": 1}, 0, "data_parallel_replicate_size=2 keeps them inside"),
        ([0, 1, 0, 1], {"pipeline_parallel_size": 2}, 1, "Rank 1 is on node 1: the launcher distributes ranks"),
    ],
)
def test_shards_across_nodes_are_told_once(
    node_of_rank: list[int], sizes: dict[str, Any], rank: int, said: str, pool: WorkerPool
) -> None:
    ranks = pool.run(placed, node_of_rank, sizes, world_size=4)
    told = [(rank, text) for rank, (_, _, texts) in enumerate(ranks) for text in texts]
    assert len(told) == 1 and told[0][0] == rank and said in told[0][1]
