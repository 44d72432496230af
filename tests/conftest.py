"""Fixtures of all tests: the worker pool, and checks that no test leaves process-wide state behind."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, here and in the workers, which inherit the environment.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Each connection to a store asks a name server who the other end is; one that does not answer costs 5 s otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Test folders are no packages: what tests share is imported by name, from whichever folder it stands in.
sys.path.extend(sorted({str(path.parent) for path in Path(__file__).parent.rglob("*.py")}))

import pytest
import torch
from pool import WorkerPool, fork_from_here
from pool_worker import freeze, remember_entry_points

torch.set_num_threads(1)

# Set by libraries on purpose and without effect on other tests.
_ENVIRON_MAY_CHANGE = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
        "GLOO_SOCKET_IFNAME",
        "KMP_DUPLICATE_LIB_OK",
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
        "KMP_INIT_AT_FORK",
        "CUDA_DEVICE_ORDER",
        "CUDA_MODULE_LOADING",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "CRC32C_SW_MODE",
        "TF_CPP_MIN_LOG_LEVEL",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
    }
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", default=False, help="run the tests marked nightly as well")
    parser.addoption("--browser", action="store_true", default=False, help="run the tests marked browser as well")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(number=1): needs CUDA devices; skipped where there are fewer")
    config.addinivalue_line("markers", "by_day(most): of a test's cases at most so many run by day, the others nightly")
    config.addinivalue_line("markers", "nightly: slow; deselected unless --nightly is given")
    config.addinivalue_line("markers", "browser: needs Chromium; deselected unless --browser is given")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = 0 if marker is None else marker.args[0] if marker.args else 1
        if torch.cuda.device_count() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device{'s' if needed > 1 else ''}"))
    _leave_to_the_night(items)
    for kind in ("nightly", "browser"):
        left_out = set() if config.getoption(f"--{kind}") else {item for item in items if item.get_closest_marker(kind)}
        if left_out:
            config.hook.pytest_deselected(items=list(left_out))
            items[:] = [item for item in items if item not in left_out]
    # files of which each takes a few seconds come last, so that no process waits long for the others in the end
    items.sort(key=lambda item: "split" in item.path.parts)


def pytest_collection_finish() -> None:
    remember_entry_points()
    gc.collect()
    freeze()  # all tests and what they have imported


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if session.items and not session.config.option.collectonly and not torch.cuda.device_count():
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # as within a test: what other processes print is not shown
        fork_from_here()
        capture.suspend_global_capture()


def _leave_to_the_night(items: list[pytest.Item]) -> None:
    """Marks as nightly what ``by_day`` leaves out of the cases of a test."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        is_sampled = item.get_closest_marker("by_day") and not item.get_closest_marker("nightly")
        if isinstance(item, pytest.Function) and is_sampled:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("by_day")
        assert marker is not None
        chosen = _covering(found, *marker.args)
        for item in found:
            if item not in chosen:
                item.add_marker(pytest.mark.nightly)


def _covering(cases: list[pytest.Function], most: int) -> list[pytest.Function]:
    """At most so many of ``cases``: those with most values of their parameters; with one parameter, spread evenly."""
    seen: set[tuple[str, int]] = set()
    chosen: list[pytest.Function] = []
    # by identity: the indices of pytest number the cases of a product, not the values of each parameter
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
    waiting = [cases[place * len(cases) // most] for place in range(min(most, len(cases)))]
    waiting += [case for case in cases if case not in waiting]
    while waiting and len(chosen) < most:
        best = max(waiting, key=lambda case: len(values[case] - seen))  # the first of those alike
        waiting.remove(best)
        chosen.append(best)
        seen |= values[best]
    return chosen


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes kept alive over all tests; see :meth:`pool.WorkerPool.run`."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    """Restore the environment, and fail the test that changed it."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert not changed - _ENVIRON_MAY_CHANGE, f"the test changed environment variables: {sorted(changed)}"


@pytest.fixture(autouse=True)
def no_leaked_process_group() -> Iterator[None]:
    """Destroy a process group left in the main process, and fail the test that left it."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("the test left a process group in the main process")


@pytest.fixture(autouse=True)
def no_leaked_default_dtype() -> Iterator[None]:
    """Restore the default dtype, and fail the test that changed it."""
    before = torch.get_default_dtype()
    yield
    after = torch.get_default_dtype()
    torch.set_default_dtype(before)
    assert after == before, f"the test left the default dtype at {after}"
