"""Process groups that some ranks need: made by all ranks together, or by two alone."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore

from lightning_pp.distributed._torch_private import channel_options, few_ctas, process_groups
from lightning_pp.distributed.loopback import gloo_on_loopback
from lightning_pp.distributed.sizes import ParallelSizes

_NCCL_TIMEOUT = default_pg_nccl_timeout or timedelta(minutes=10)  # torch without NCCL has no number

_aborted_world: Any = None


@gloo_on_loopback()
def agreed_groups(wanted: Collection[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Makes a group for each tuple of ranks that any rank wants. To be called by all ranks of the world.

    Groups that only their members make (``use_local_synchronization``) are named after the number of groups that a rank
    has, and members of which one is in more groups than another wait for each other for ever.

    Args:
        wanted: Tuples of ranks that this rank is in. Their order matters: (0, 1) and (1, 0) are two groups.

    Returns:
        The groups that this rank wants.
    """
    of_ranks: list[Sequence[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, sorted(wanted))
    groups = {}
    for ranks in sorted({ranks for found in of_ranks for ranks in found}):
        group = dist.new_group(sorted(ranks), group_desc="shared_parameters")
        if ranks in wanted:
            groups[ranks] = group
    return groups


def world_options(backend: str, sizes: ParallelSizes) -> Any:
    """Options of the group of all ranks: over NCCL few multiprocessors, where only single numbers go through it.

    With one pipeline rank it is also the group of gathers and reductions, and has torch's own options.
    """
    return few_ctas() if backend == "nccl" and sizes.pipeline > 1 else None


@gloo_on_loopback()
def host_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """A gloo group of all ranks, for collectives on tensors of the host. To be called by all ranks of the world."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


@gloo_on_loopback()
def pair_group(name: str, place: int, device_type: str, timeout: timedelta | None) -> Any:
    """A group that its two ranks alone make, of the one backend that ``device_type`` needs: NCCL, or gloo on the host.

    It is a backend as torch makes it for a group, and not a group itself: torch numbers groups, so all ranks of the
    world would have to make all of them. It has ``send`` and ``recv``, ``shutdown`` and ``abort``. Over gloo the ranks
    wait here for each other, over NCCL at the first message.

    Args:
        name: Known to the two ranks alone, and used once in a job.
        place: 0 on one of them, 1 on the other.
        device_type: Of the tensors that go through it.
        timeout: How long a message may wait; None for the backend's default.
    """
    world = dist.group.WORLD
    assert world is not None
    store = PrefixStore(name, world.get_group_store())
    if device_type == "cuda":
        options = channel_options(name.strip("/"), timeout_of_groups(timeout or _NCCL_TIMEOUT, "nccl"))
        return dist.ProcessGroupNCCL(store, place, 2, options)
    return dist.ProcessGroupGloo(store, place, 2, timeout or default_pg_timeout)


def destroyed_with(owner: object, groups: list[dist.ProcessGroup]) -> None:
    """Has what is in ``groups`` by then destroyed when nothing holds ``owner`` any more, where it is of gloo.

    To destroy a gloo group is this rank's own business. Groups of a device stay, as torch has it.
    """
    weakref.finalize(owner, _destroy, groups).atexit = False


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    for group in groups:
        with contextlib.suppress(ValueError, RuntimeError):  # it has been destroyed before
            if dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)


def timeout_of_groups(timeout: timedelta, backend: str) -> timedelta:
    """``timeout``; with NCCL a minute more, so that the watchdog can name who stands before NCCL ends the process."""
    return timeout + timedelta(minutes=1) if "nccl" in backend else timeout


def default_timeout(backend: str) -> timedelta:
    """How long torch lets a collective of ``backend`` wait: ten minutes with NCCL, half an hour otherwise."""
    return _NCCL_TIMEOUT if "nccl" in backend else default_pg_timeout


def warm_up(groups: Iterable[dist.ProcessGroup], device: torch.device) -> int:
    """Has each group gather, reduce and scatter, and reduce once; its ranks call it with groups in one order.

    NCCL makes a communicator at the first collective and drains the device for it, which must not happen while a
    receive is posted.

    Returns:
        The bytes of the device that the communicators have taken; 0 on the host.
    """
    free_before = free_bytes(device)
    for group in groups:
        share = torch.zeros(1, device=device)
        whole = torch.zeros(group.size(), device=device)
        dist.all_gather_single(whole, share, group=group)
        dist.reduce_scatter_single(share, whole, group=group)
        dist.all_reduce(share, group=group)
    return max(0, free_before - free_bytes(device))


def free_bytes(device: torch.device) -> int:
    """The free memory of the device, once it has done all queued work; 0 for the host."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def largest_of_all(number: int, device: torch.device) -> int:
    """The largest of what all ranks of the world give."""
    shared = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return int(shared)


def abort_all(channels: Iterable[Any], seconds: float) -> bool:
    """Ends what this process waits in on its device: all groups, and ``channels``. None of them can be used again.

    A receive over NCCL is a kernel that waits on the device, and with it all that is queued behind. Each group is ended
    on a thread of its own, since one may stand behind another (https://github.com/pytorch/pytorch/issues/119797).

    Args:
        channels: Of :func:`pair_group`.
        seconds: How long to wait.

    Returns:
        Whether all of them have ended.
    """
    global _aborted_world
    _aborted_world = dist.group.WORLD
    groups = [*process_groups(), *channels]
    threads = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def are_aborted() -> bool:
    """Whether :func:`abort_all` has ended the groups that the process has now."""
    return _aborted_world is not None and dist.group.WORLD is _aborted_world


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # it had ended before
        group.abort()
