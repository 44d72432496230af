"""Private names of another package stand in one file of each layer; one that is missing is told where it is used.

Private is a name with a leading underscore in an import, as an attribute, or given to ``getattr`` and the like: also
``torch._subclasses``, ``torch.utils._pytree``, ``sys._getframe`` and the dicts of a module (``_parameters``). Not
private are what a file's own classes define (``self._x``, and ``other._x`` of the same class), what named tuples,
``os`` and ``sys`` document (``_replace``, ``_exit``), and names of operations in ``torch.ops``, which saved graphs hold
and torch therefore keeps.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run_forked

import lightning_pp
from lightning_pp._private_names import private, require, uses

PACKAGE = Path(lightning_pp.__file__).parent
LAYERS = [
    *("split", "runtime", "sharding", "checkpoint", "distributed", "telemetry", "planning"),
    *("strategy", "callbacks", "cli", "doctor", "conf", "recipes"),
]
HOMES = {"_torch_private.py", "_lightning_private.py", "_omegaconf_private.py"}

DOCUMENTED = {"_replace", "_make", "_fields", "_asdict", "_field_defaults", "_exit", "_current_frames"}
# of torch's tensors, modules, autograd nodes and operations: private also where a file has a name of its own like it,
# and in the dict of an object, by which attributes are set past a class
TORCHS = {
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_call_impl",
    "_apply", "_base", "_version", "_cdata", "_sequence_nr", "_schema", "_overloadpacket", "_get_fsdp_state", "_C",
    "_metadata", "_compiled_call_impl",
}  # fmt: skip
# the same of Lightning's modules, trainers, loops, loaders and callbacks, and of torchmetrics
LIGHTNINGS = {
    "_trainer", "_results", "_current_fx_name", "_current_fx", "_device_mesh", "_on_before_batch_transfer",
    "_logger_connector", "_signal_connector", "_accelerator_connector", "_layer_sync", "_sigterm_notifier_fn",
    "_slurm_sigusr_handler_fn", "_after_closure",
    "_should_accumulate", "_broadcast_sigterm_tensor", "_batches_that_stepped", "_data_source", "_mode", "_launcher",
    "_summary", "_link_checkpoint", "_find_last_checkpoints", "_average_model", "_device", "_use_buffers", "_kwargs",
    "_step_fn", "_zero_grad_fn",
    "_verify_strategy_supports_compile",
    "_forward_cache", "_to_sync", "_computed", "_should_unsync", "_filter_kwargs",
}  # fmt: skip
KNOWN = TORCHS | LIGHTNINGS


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not name.startswith("__") and name not in DOCUMENTED


def own_names(tree: ast.Module) -> set[str]:
    """What the classes of a file define: methods, fields, slots, and what they set on ``self``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    names.add(item.name)
                elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    names.add(item.target.id)
                elif isinstance(item, ast.Assign):
                    names |= {target.id for target in item.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return names - KNOWN


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_operation(node: ast.Attribute) -> bool:
    return ast.unparse(node).startswith(("torch.ops.", "_aten."))


def text_of(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """The lines of private names that are not the file's own, with what stands there."""
    tree = ast.parse(source)
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if any(map(is_private, alias.name.split(".")))]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            is_ours = module.split(".")[0] == "lightning_pp"
            found = [] if is_ours else [f"{module}.{alias.name}" for alias in node.names]
            found = [name for name in found if any(map(is_private, name.split(".")))]
        elif isinstance(node, ast.Attribute):
            is_others = is_private(node.attr) and node.attr not in own and not is_self(node.value)
            found = [ast.unparse(node)] if is_others and not is_operation(node) else []
        elif isinstance(node, ast.Call):
            names = [keyword.arg for keyword in node.keywords]
            function = node.func.id if isinstance(node.func, ast.Name) else ""
            if function in ("getattr", "setattr", "hasattr", "delattr") and len(node.args) > 1:
                names.append(text_of(node.args[1]))
            found = [ast.unparse(node)] if KNOWN.intersection(names) else []
        elif isinstance(node, ast.Subscript):
            found = [ast.unparse(node)] if text_of(node.slice) in KNOWN else []
        else:
            continue
        yield from ((node.lineno, name) for name in found)


@pytest.mark.parametrize("layer", LAYERS)
def test_private_names_stand_in_one_file(layer: str) -> None:
    files = [path for path in sorted((PACKAGE / layer).rglob("*.py")) if path.name not in HOMES]
    assert files
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in files
        for line, name in private_names(path.read_text())
    ]
    assert not found, f"private names outside of {sorted(HOMES)}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import torch._dynamo", [1]),
        ("from torch.utils import _pytree", [1]),
        ("from torch._ops import OpOverload", [1]),
        ("from lightning_pp.split._torch_private import schema_of", []),
        ("x = 1\ntorch._C._dispatch_keys(x)", [2, 2]),
        ("for child in module.modules():\n    child._parameters.clear()", [2]),
        (
            "class A:\n    def __init__(self):\n        self._x = 1\n    def eq(self, other):\n        return other._x",
            [],
        ),
        ("class A:\n    def __init__(self, b):\n        self._b = b\n        b._x", [4]),
        ("class A:\n    _base: int\ntensor._base", [3]),
        ("left._replace(value=1)", []),
        ("torch.ops.aten._to_copy.default", []),
        ("sys._getframe(1)", [1]),
        ("getattr(tensor, '_base', None)", [1]),
        ("vars(callback)['_summary'] = make", [1]),
        ("vars(callback).update(_link_checkpoint=link)", [1]),
        ("class A:\n    def f(self, module):\n        self._trainer = module._trainer", [3]),
    ],
)
def test_what_counts_as_private(source: str, lines: list[int]) -> None:
    assert [line for line, _ in private_names(source)] == lines


TOLD = (
    rf"lightning_pp needs torch\.gone\._name, .* torch {torch.__version__.split('+')[0]}.* Install torch 2\.13 to 2\.15"
)


@pytest.mark.parametrize(
    "use",
    [
        lambda missing: missing(1),
        lambda missing: missing.attribute,
        lambda missing: isinstance(1, missing),
        lambda missing: list(missing),
        lambda missing: missing["key"],
        lambda missing: type("Derived", (missing,), {})(),
        lambda missing: uses("torch.Tensor._base", "torch.gone._name")(len)([]),
        lambda missing: require("torch.Tensor._base", "torch.gone._name"),
    ],
)
def test_a_missing_name_is_told_with_the_version_where_it_is_used(use: Callable[[Any], object]) -> None:
    missing = private("torch.gone._name")
    with pytest.raises(ImportError, match=TOLD):
        use(missing)


def test_a_name_that_is_there_is_taken_as_it_is() -> None:
    assert private("torch.Tensor._base") is torch.Tensor._base
    assert private("torch.gone._name", "torch.autograd._get_sequence_nr") is torch.autograd._get_sequence_nr
    assert uses("torch.Tensor._base", "torch.nn.Module._parameters", "torch.nn.RNN._flat_weights")(len) is len


# forgets the package, which has been imported; lacks a class, a function, and a method that this package overrides
WITHOUT = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_pp"]:
    del sys.modules[name]
import torch, torch._subclasses.fake_tensor, torch.utils._python_dispatch, torch.autograd.graph
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
del torch._subclasses.fake_tensor.FakeTensor, torch.autograd.graph._engine_run_backward
del torch.utils._python_dispatch.TorchDispatchMode
import lightning_pp
from lightning_pp.runtime import _torch_private as of_runtime
from lightning_pp.split import _torch_private as of_split
for use in (lambda: of_runtime.run_backward([], []), lambda: isinstance(1, of_split.FakeTensor)):
    try:
        use()
    except ImportError as error:
        print(error)
lightning_pp.PipelineParallelStrategy(2)
del _TrainingEpochLoop._broadcast_sigterm_tensor
try:
    lightning_pp.PipelineParallelStrategy(2)
except ImportError as error:
    print(error)
"""


def test_the_package_imports_where_names_are_missing(tmp_path: Path) -> None:
    (tmp_path / "lacking.py").write_text(WITHOUT)
    done = run_forked([], tmp_path, module="lacking")
    assert done.code == 0, done.output
    told = done.output.splitlines()[-3:]
    assert [line.split()[2].rstrip(",") for line in told] == [
        "torch.autograd.graph._engine_run_backward",
        "torch._subclasses.fake_tensor.FakeTensor",
        "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor",
    ]
