"""Plans: which parameters are cut, by columns or by rows, as the user or the model says."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lightning_pp.errors import ConfigurationError

Style = Literal["auto", "colwise", "rowwise", "replicate"]
Plan = Mapping[str, Any] | Literal["auto"]

# the styles of transformers whose parameters are cut here; others leave theirs whole
_TRANSFORMERS: Mapping[str, Style] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
    "replicate": "replicate",
}


def parse_style(value: object, pattern: str) -> Style:
    """A style as a plan has it: its name, or an object of torch's class.

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(value, ColwiseParallel):
        return "colwise"
    if isinstance(value, RowwiseParallel):
        return "rowwise"
    if value in ("colwise", "rowwise", "replicate", "auto"):
        return value
    raise ConfigurationError(
        f"tensor_parallel_plan[{pattern!r}] is {value!r}. Use 'colwise', 'rowwise', 'replicate' or 'auto', or torch's "
        "ColwiseParallel() or RowwiseParallel()."
    )


def is_table(module: nn.Module) -> bool:
    """Whether ``module`` is an embedding as torch has it, of which each row is looked up by itself."""
    return type(module) is nn.Embedding and not (module.max_norm or module.scale_grad_by_freq or module.sparse)


def weights_of(module: nn.Module) -> dict[str, tuple[int, nn.Parameter]]:
    """Matrices that may be cut, by name: the dimension of their outputs, and the parameter.

    Those are the weights of ``nn.Linear``, transformers' ``Conv1D``, ``nn.MultiheadAttention`` and ``nn.Embedding``,
    and :func:`experts_of`.
    """
    found: dict[str, tuple[int, nn.Parameter]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        found |= {f"{prefix}{own}": expert for own, expert in experts_of(child).items()}
        if isinstance(child, nn.MultiheadAttention) and child.in_proj_weight is not None:
            found[f"{prefix}in_proj_weight"] = 0, child.in_proj_weight
        weight = getattr(child, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 2:
            if isinstance(child, nn.Linear):
                found[f"{prefix}weight"] = 0, weight
            elif type(child).__name__ == "Conv1D" or is_table(child):
                found[f"{prefix}weight"] = 1, weight
    return found


def inputs_of(weight: nn.Parameter, out_dim: int) -> int:
    """The dimension of the inputs of a matrix, or of matrices one after another."""
    return 2 * weight.dim() - 3 - out_dim


def experts_of(module: nn.Module) -> dict[str, tuple[int, nn.Parameter]]:
    """Parameters of ``module`` that are the matrices of all experts, of shape [experts, in, out] or [experts, out, in].

    The last one's outputs have the width of the others' inputs. Its inputs are as wide as the others' outputs, or half
    as wide, where a gate and a value are in one.
    """
    own = {name: each for name, each in module.named_parameters(recurse=False) if each.dim() == 3}
    *first, last = own.values() if len(own) > 1 else (None,)
    if last is None or any(each is None or each.shape[0] != last.shape[0] for each in first):
        return {}
    for out_dim in (1, 2):
        sizes = last.shape[out_dim], last.shape[3 - out_dim]
        shapes = [(each.shape[3 - out_dim], each.shape[out_dim]) for each in first if each is not None]
        if all(width == sizes[0] and inner in (sizes[1], 2 * sizes[1]) for width, inner in shapes):
            return {name: (out_dim, each) for name, each in own.items()}
    return {}


def matching_styles(module: nn.Module, plan: Plan) -> dict[str, tuple[Style, str]]:
    """The style of each weight of ``module`` that may be cut, and the pattern that says so.

    Args:
        module: The whole model.
        plan: ``"auto"``, or styles by pattern. A pattern is the name of a module or a parameter with ``*`` for any part
            of it. The first that fits decides; what none fits is left whole.

    Raises:
        ConfigurationError: A pattern fits nothing that can be cut, or a style is unknown.
    """
    weights = weights_of(module)
    if plan == "auto":
        return dict.fromkeys(weights, ("auto", "auto"))
    if not isinstance(plan, Mapping):
        raise ConfigurationError(f"tensor_parallel_plan={plan!r} is neither 'auto' nor a dict of styles by pattern.")
    styles: dict[str, tuple[Style, str]] = {}
    for pattern, value in plan.items():
        style = parse_style(value, pattern)
        fitting = [name for name in weights if _fits(name, pattern)]
        if not fitting and style != "replicate":
            raise ConfigurationError(
                f"tensor_parallel_plan[{pattern!r}] fits no weight of nn.Linear, nn.Embedding, Conv1D or "
                "nn.MultiheadAttention, and no matrices of experts. Such weights are "
                f"{', '.join(list(weights)[:6]) or 'not in this model'}."
            )
        for name in fitting:
            styles.setdefault(name, (style, pattern))
    return styles


def _fits(name: str, pattern: str) -> bool:
    parents = [name[: match.start()] for match in re.finditer(r"\.", name)]
    return any(fnmatchcase(each, pattern) for each in (name, *parents))


def recorded_plan(module: nn.Module) -> tuple[dict[str, Style], list[str]]:
    """The plan that a transformers model in ``module`` has of its own, and the styles in it that are not known here."""
    plan: dict[str, Style] = {}
    unknown = set()
    for name, child in module.named_modules():
        prefix = getattr(child, "base_model_prefix", None)
        if prefix is None:  # a part of a model, which has the configuration as well
            continue
        own = getattr(child, "_tp_plan", None) or {}
        base = getattr(getattr(child, "config", None), "base_model_tp_plan", None) or {}
        inner = f"{prefix}." if prefix and hasattr(child, prefix) else ""
        if not isinstance(own, Mapping) or not isinstance(base, Mapping):
            continue
        start = f"{name}." if name else ""
        for key, style in {**{f"{inner}{key}": value for key, value in base.items()}, **own}.items():
            if style in _TRANSFORMERS:
                plan.setdefault(f"{start}{key}", _TRANSFORMERS[style])
            else:
                unknown.add(str(style))
    fitting = {pattern: style for pattern, style in plan.items() if any(_fits(n, pattern) for n in weights_of(module))}
    return fitting, sorted(unknown)


def tied_along_vocabulary(
    module: nn.Module, called: Collection[nn.Module], head: str | None, plan: Plan, num_ranks: int
) -> set[nn.Parameter]:
    """Parameters of several modules, all of them embeddings and the head, that the plan cuts along the vocabulary.

    Args:
        module: The whole model.
        called: The units that the step calls. What is tied to a part of one stays whole.
        head: Name of the last projection, if there is one.
        plan: As of :func:`matching_styles`.
        num_ranks: Tensor ranks.
    """
    styles, users = matching_styles(module, plan), dict[nn.Parameter, list[bool]]()
    inside = {child for unit in called for child in unit.modules()}
    for prefix, child in module.named_modules(remove_duplicate=False):
        wanted = ("auto", "rowwise") if is_table(child) else ("auto", "colwise") if prefix == head else ()
        for name, parameter in child.named_parameters(prefix, recurse=False, remove_duplicate=False):
            style = styles.get(name, ("", ""))[0]
            is_unused = is_table(child) and child not in inside and style != "replicate"  # such as "shared" of T5
            users.setdefault(parameter, []).append(is_unused or (child in called and style in wanted))
    tied = {each for each, are_cut in users.items() if len(are_cut) > 1 and all(are_cut)}
    return {each for each in tied if each.shape[0] > each.shape[1] and each.shape[0] >= num_ranks}


def check_sizes(module: nn.Module, plan: Plan, num_ranks: int) -> None:
    """Raises before processes start where a size that the plan cuts cannot be divided.

    Raises:
        ConfigurationError: With the names and the numbers.
    """
    if plan == "auto":
        return  # what cannot be divided is left whole
    weights, problems = weights_of(module), []
    words = {each.num_embeddings for each in module.modules() if is_table(each)}
    for name, (style, pattern) in matching_styles(module, plan).items():
        out_dim, weight = weights[name]
        if style in ("colwise", "rowwise"):
            size = weight.shape[out_dim if style == "colwise" else inputs_of(weight, out_dim)]
            if size % num_ranks and size not in words:  # a vocabulary is cut all the same
                kind = "output features" if style == "colwise" else "input features"
                problems.append(f"{name} has {size} {kind} ({style} by {pattern!r})")
    if problems:
        raise ConfigurationError(
            f"tensor_parallel_size={num_ranks} does not divide what tensor_parallel_plan cuts: {'; '.join(problems)}. "
            "Use a size that divides them, or 'replicate' for these modules."
        )
