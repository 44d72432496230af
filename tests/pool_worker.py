"""What runs inside a worker of :mod:`pool`: a loop of calls, with a clean-up after each that returned."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: What a first training imports, some of it from within torch when it is first needed.
HEAVY_MODULES = (
    "lightning.pytorch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torchmetrics",
    "functorch.compile",
    "lightning_pp.strategy.strategy",
    "lightning_pp.strategy.engine",
)
#: What the process imports besides from which all others are forked: for commands, modules of tests, and their models.
PRELOADED = (
    *HEAVY_MODULES,
    "lightning_pp.cli.app",
    "lightning_pp.cli.resume",
    "lightning_pp.cli.run",
    "lightning_pp.recipes.byte_gpt",
    "lightning_pp.recipes.byte_text",
    "pytest",
    "s3fs",
    "wandb",
    "wandb.sdk.launch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
)
THREADS_END_WITHIN_S = 0.5


@dataclass(frozen=True)
class Failure:
    """What one rank failed with: the exception's class name, its text, and the traceback."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Task:
    """A function by the place of its source, since test files are not always importable by name."""

    module: str
    file: str
    qualname: str
    environ: dict[str, str]
    sys_path: list[str]
    process_group: str | None
    timeout_s: float


def pack(value: Any) -> bytes:
    """Pickle by ``torch.save``, which knows every dtype."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


def worker_main(connection: Connection, stack_file: str) -> None:
    import faulthandler

    # as in a user's process; a process of the forkserver would start one of its own, whose children import torch anew
    multiprocessing.set_start_method("fork", force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides when to stop
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    own_threads = set(threading.enumerate())
    # suppressed: the main process has closed its end
    with open(stack_file, "w") as stacks, contextlib.suppress(EOFError, OSError):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        _import_heavy()
        freeze()
        environ = dict(os.environ)
        folder = os.getcwd()
        while _have_ended(own_threads):
            if left := num_threads_of_groups():
                connection.send_bytes(f"{left} threads".encode())
                break  # each polls, and takes time from all tests to come
            connection.send_bytes(b"ready")
            # Lightning's signal handling puts Python's default handler in the place of this one
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            task: Task = pickle.loads(connection.recv_bytes())
            outcome = _call(task, connection.recv_bytes())
            try:
                answer = pack(outcome)
            except Exception as error:  # whatever pickling raises
                outcome = _failure(error)
                answer = pack(outcome)
            connection.send_bytes(answer)
            if isinstance(outcome, Failure):
                break  # at once: peers that wait for this rank see a closed connection
            del outcome
            connection.recv_bytes()  # until all ranks have answered nothing may be closed
            _reset(environ, folder)
    os._exit(0)  # skips exit handlers of libraries, which may wait for peers


def freeze() -> None:
    """What was imported by now stays: collections need not look through it.

    To count it takes a tenth of a second, and each training asks whether there is any.
    """
    gc.freeze()
    gc.get_freeze_count = lambda: 1


def remember_entry_points() -> None:
    """Each Trainer looks for callbacks in the metadata of all installed packages, which takes 5 ms."""
    registry: Any = sys.modules.get("lightning.fabric.utilities.registry")
    if registry is not None and not hasattr(registry.entry_points, "cache_info"):
        registry.entry_points = functools.cache(registry.entry_points)


def _have_ended(own_threads: set[threading.Thread]) -> bool:
    """Whether no thread is left that a run started; those that are told to end get a moment."""
    deadline = time.monotonic() + THREADS_END_WITHIN_S
    while not set(threading.enumerate()) <= own_threads:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def num_threads_of_groups() -> int:
    """Threads of this process that belong to process groups of gloo."""
    found = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            found += "gloo" in (thread / "comm").read_text()
    return found


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _import_heavy() -> None:
    for module in HEAVY_MODULES:
        importlib.import_module(module)
    remember_entry_points()
    importlib.import_module("torch").set_num_threads(1)


def _call(task: Task, payload: bytes) -> Failure | tuple[Any]:
    import torch

    os.environ.update(task.environ)
    _set_lightning_rank(int(task.environ["RANK"]))
    if sys.path != task.sys_path:
        sys.path[:] = task.sys_path
    try:
        function: Any = _load_module(task.module, task.file)
        for part in task.qualname.split("."):
            function = getattr(function, part)
        args, kwargs = unpack(payload)
        if task.process_group is not None:
            from datetime import timedelta

            torch.distributed.init_process_group(task.process_group, timeout=timedelta(seconds=task.timeout_s))
        return (_to_cpu(function(*args, **kwargs)),)
    except BaseException as error:  # SystemExit and private control-flow exceptions fail a test as well
        return _failure(error)


def _load_module(name: str, file: str) -> Any:
    """The module that the main process knows as ``name``, and no other of the same name in another folder."""
    module = sys.modules.get(name)
    if module is None or getattr(module, "__file__", None) != file:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin == file:
                return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {name} from {file!r}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


def _failure(error: BaseException) -> Failure:
    return Failure(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def _to_cpu(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to_cpu(item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_to_cpu(item) for item in value)
    if type(value) is dict:
        return {key: _to_cpu(item) for key, item in value.items()}
    return value


def _set_lightning_rank(rank: int) -> None:
    """Lightning reads its rank once, at import; its strategies set this attribute later, as we do here."""
    importlib.import_module("lightning.fabric.utilities.rank_zero").rank_zero_only.rank = rank


def _reset(environ: dict[str, str], folder: str) -> None:
    """Undo what a test function left: every later test meets the worker as if it were new."""
    import numpy
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    _set_lightning_rank(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    # These caches hold device meshes, equal to later ones in layout, whose process groups would stay.
    importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
    of_dtensors = "torch.distributed.tensor."
    redistribute = importlib.import_module(of_dtensors + "_redistribute")
    redistribute.clear_redistribute_planner_cache()
    redistribute._gen_transform_infos.cache_clear()
    propagation = importlib.import_module(of_dtensors + "_sharding_prop")
    propagation.ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
    importlib.import_module(of_dtensors + "_collective_utils").MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()
    freeze()  # what the run has imported stays as well
