"""Differences between a part of a first batch run in one piece and in two; both must have the same results.

For each checked batch, on every rank::

    two_sizes: the first microbatch and its halves (or the first two microbatches and the two of them)
    run the step on the whole, and on each part, forward only; the parts draw their rows of what the whole drew
    the last stage compares loss, logged values, outputs and changed attributes; each the buffers that it wrote into
    after a difference: run them again, each stage noting what its units give, to say where samples were coupled first

The module's state and the random generators are as before afterwards; metrics, loggers and batch statistics see
nothing. BatchNorm normalises over microbatches in every pipeline: a warning says so, and the comparison leaves it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_pp.errors import enumerate_names
from lightning_pp.split.comparison.consistency import Culprit, is_close
from lightning_pp.split.data.tree import leaves_of
from lightning_pp.strategy.batch.run import BatchRun
from lightning_pp.strategy.batch.scaling import PER_MICROBATCH
from lightning_pp.strategy.results.learned import is_number
from lightning_pp.strategy.results.log_calls import LogCall
from lightning_pp.strategy.results.reports import Merged

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
MIX_BEFORE = (
    "If the line needs the batch alone, as mixup does, move it to on_after_batch_transfer, which gets the whole batch. "
    "Otherwise set num_microbatches=1."
)
_TURN_OFF = "check_first_batches=False on the strategy turns this check off."


@dataclass(frozen=True)
class Observed:
    """The results of a step on a batch; on other stages than the last only their written buffers.

    It is merged once it is asked for: by then it is known which numbers add up.

    Attributes:
        buffers: Those that it wrote into, as float64.
        run: The batch.
        outputs: What the step returned for each microbatch; nothing on other stages than the last.
        losses: The loss of each microbatch, for a training step.
        loss_dtype: Their dtype.
        logs: What it logged.
    """

    buffers: Mapping[str, Tensor]
    run: BatchRun
    outputs: Sequence[Any]
    losses: Sequence[float]
    loss_dtype: torch.dtype | None
    logs: Sequence[LogCall]

    @cached_property
    def merged(self) -> Merged:
        """What the step returned, and what became of attributes."""
        return self.run.merged(self.outputs) if self.outputs else (None, {})

    @property
    def loss(self) -> float:
        """Of all microbatches."""
        return sum(loss * weight for loss, weight in zip(self.losses, self.run.weights, strict=False))


@dataclass(frozen=True)
class Difference:
    """Two values that should be equal.

    Attributes:
        what: The value, as the subject of a sentence.
        is_loss: Whether it is the loss.
        whole: Of the whole in one piece.
        parts: Of the whole, from its parts.
        of_parts: Of each part alone, for a loss.
        is_attribute: Whether it is what the step leaves in an attribute.
        is_logged: Whether it is a logged number.
        branch: A line at which a part takes another branch than the whole; empty for none.
        line: The line that logs it, where it is a number of Python; otherwise empty.
    """

    what: str
    is_loss: bool
    whole: float
    parts: float
    of_parts: tuple[float, ...] = ()
    is_attribute: bool = False
    is_logged: bool = False
    branch: str = ""
    line: str = ""


@dataclass(frozen=True)
class Found:
    """The cause of a difference.

    Attributes:
        culprit: Where samples were coupled first, if that was found.
        moved: Names of the buffers that the step writes into, if that explains it.
        auxiliary: Lines with auxiliary losses, if these explain it.
    """

    culprit: Culprit | None = None
    moved: Sequence[str] = ()
    auxiliary: Sequence[str] = ()


def tolerance_of(module: nn.Module, compute: torch.dtype | None, device: torch.device) -> float:
    """How far two computations of the same step may be apart, relatively.

    Args:
        module: What the step computes with.
        compute: The dtype of computation, where it is not that of the parameters.
        device: Where the step computes.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
    dtypes = {parameter.dtype for parameter in parameters} | ({compute} if compute is not None else set())
    tolerance = max((_TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=_TOLERANCES[torch.float32])
    if any(type(part).__name__ == "Float8Linear" for part in module.modules()):  # torchao's: scales are a microbatch's
        tolerance = max(tolerance, _TOLERANCES[torch.bfloat16])
    if device.type == "cuda":
        cudnn: Any = torch.backends.cudnn
        precisions = {torch.backends.cuda.matmul.fp32_precision}
        if any(parameter.dim() > 2 for parameter in parameters):  # kernels of convolutions
            precisions.add(cudnn.conv.fp32_precision)
        if any(isinstance(part, nn.RNNBase) for part in module.modules()):
            precisions.add(cudnn.rnn.fp32_precision)
        if not precisions <= {"ieee", "none"}:
            tolerance = max(tolerance, 5e-3)
    return tolerance


def find_differences(step: str, whole: Observed, parts: Observed, tolerance: float) -> list[Difference]:
    """What differs of the loss, changed attributes, logged values and outputs; what ends the run comes first."""
    found = [
        *_loss_differences(step, whole, parts, tolerance),
        *_attribute_differences(step, whole, parts, tolerance),
        *_log_differences(step, whole, parts, tolerance),
        *_output_differences(step, whole, parts, tolerance),
    ]
    of_whole, of_parts = whole.run.scopes.decisions, parts.run.scopes.decisions
    branches = of_whole.lines_that_differ(of_parts) if found and of_whole and of_parts else []
    return [replace(each, branch=branches[0]) for each in found] if branches else found


def _loss_differences(step: str, whole: Observed, parts: Observed, tolerance: float) -> Iterator[Difference]:
    # one that is not finite in one piece is so without a cut, and told where it matters
    if whole.losses and whole.loss_dtype is not None and math.isfinite(whole.loss):
        bound = max(tolerance, _TOLERANCES.get(whole.loss_dtype, 0.0))
        if not is_close(whole.loss, parts.loss, bound, *parts.losses):
            yield Difference(f"The loss of {step}", True, whole.loss, parts.loss, tuple(parts.losses))


def _attribute_differences(step: str, whole: Observed, parts: Observed, tolerance: float) -> Iterator[Difference]:
    mine, its = (
        {**each.buffers, **each.run.scopes.attributes.values_by_name(each.merged[1])} for each in (whole, parts)
    )
    for name, value in mine.items():
        other, what = its.get(name), f"The attribute {name!r} that {step} changes"
        found = _first_other(_whole_numbers_too(value), _whole_numbers_too(other), tolerance)
        numbers = len(leaves_of(value)), len(leaves_of(other))
        if numbers[0] != numbers[1]:
            what, found = f"The number of values that {step} leaves in {name!r}", numbers
        if found is not None:
            yield Difference(what, False, *found, is_attribute=True)


def _whole_numbers_too(value: Any) -> Any:
    """``value``; a tensor of whole numbers, of which an output may have any, as one that is compared."""
    is_whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return value.double() if is_whole else value


def _log_differences(step: str, whole: Observed, parts: Observed, tolerance: float) -> Iterator[Difference]:
    others = {call.key: call for call in parts.logs}
    for call in whole.logs:
        if (other := others.get(call.key)) is None or call.metric or call.value is None or other.value is None:
            continue
        if not is_close(call.value, other.value, max(tolerance, _TOLERANCES.get(call.dtype, 0.0))):
            what = f"The value that {step} logs as {call.name!r}"
            yield Difference(what, False, call.value, other.value, is_logged=True, line=call.line)


def _output_differences(step: str, whole: Observed, parts: Observed, tolerance: float) -> Iterator[Difference]:
    is_loss = bool(whole.losses) and isinstance(whole.merged[0], Tensor)
    found = None if is_loss else _first_other(whole.merged[0], parts.merged[0], tolerance)
    if found is not None:
        yield Difference(f"A value that {step} returns", False, *found)


def _first_other(whole: Any, parts: Any, tolerance: float) -> tuple[float, float] | None:
    mine, others = leaves_of(whole), leaves_of(parts)
    if len(mine) != len(others):
        return None
    for leaf, other in zip(mine, others, strict=True):
        if (pair := _numbers(leaf, other)) is None:
            continue
        a, b = pair
        bound = max(tolerance, _TOLERANCES.get(leaf.dtype, 0.0)) if isinstance(leaf, Tensor) else tolerance
        scale = float(a.abs().nan_to_num().max()) if a.numel() else 0.0
        # rows go through matrix products of other sizes, so single elements differ by more than a mean does
        close = torch.isclose(a, b, rtol=0, atol=min(100 * bound, 0.5) * max(scale, 1e-12), equal_nan=True)
        if not bool(close.all()):
            where = int((~close).flatten().double().argmax())
            return float(a.flatten()[where]), float(b.flatten()[where])
    return None


def _numbers(leaf: Any, other: Any) -> tuple[Tensor, Tensor] | None:
    """Both as float64, where they are floating-point tensors of one shape or numbers."""
    if isinstance(leaf, Tensor) and isinstance(other, Tensor):
        if leaf.shape != other.shape or not leaf.is_floating_point():
            return None
        return leaf.detach().double().cpu(), other.detach().double().cpu()
    if is_number(leaf) and is_number(other):
        return torch.tensor(float(leaf)).double(), torch.tensor(float(other)).double()
    return None


def text_about_attributes(differences: Sequence[Difference], line: str) -> str:
    """The warning about attributes on which neither loss nor logs nor outputs of the step depend.

    Args:
        differences: Of the attributes.
        line: Where the step is.
    """
    first, *others = differences
    more = "".join(f" The same goes for: {other.what}." for other in others)
    return (
        f"{first.what} ({line}) has another value after microbatches than after the whole batch: {first.parts:.6g} "
        f"after the samples in two parts, {first.whole:.6g} after the same samples in one piece. The step's loss, logs "
        f"and outputs do not depend on it, so training continues. Other code that reads it gets the first value.{more}"
    )


def text_about(step: str, difference: Difference, found: Found, sizes: Sequence[int], line: str) -> str:
    """The error text about a difference.

    Args:
        step: Name of the step.
        difference: What differs.
        found: Why.
        sizes: Samples of the parts.
        line: Where the step is.
    """
    total, cut = sum(sizes), " + ".join(map(str, sizes))
    difference_text = (
        f"{difference.what} ({line}) depends on how the batch is cut: it is {difference.whole:.9g} for {total} samples "
        f"in one piece and {difference.parts:.9g} for the same samples as {cut}, as a pipeline computes it."
    )
    if found.auxiliary:
        reason = (
            "The difference comes from an auxiliary loss alone, which is made of all samples of a microbatch together, "
            f"such as the balance loss of a mixture of experts: {', '.join(found.auxiliary)}. {PER_MICROBATCH}"
        )
    elif found.moved:
        names, what = enumerate_names(list(map(repr, found.moved)), 3), "buffers" if found.moved[1:] else "a buffer"
        reason = (
            f"The step writes into {what} of the module ({names}). A pipeline does so in every microbatch, and the "
            "next microbatch reads what was written. One device does so once for the batch. Do this in "
            "on_train_batch_end, or set num_microbatches=1."
        )
    else:
        reason = _reason(difference, found.culprit, _AS_ONE_BATCH if step == "predict_step" else _WHOLE_BATCH)
    return f"{difference_text} {reason} {_TURN_OFF}"


_WHOLE_BATCH = (
    "whole_batch_loss=True on the strategy runs the code after the last unit once on the whole batch. It costs memory "
    "and bubble: lightning-pp-plan shows how much."
)
_AS_ONE_BATCH = "num_microbatches=1 on the strategy predicts each batch in one piece."


def _reason(difference: Difference, culprit: Culprit | None, whole_batch: str) -> str:
    if difference.branch:
        return (
            f"A part takes another branch at {difference.branch} than the whole, and on one device the whole decides. "
            f"{whole_batch}"
        )
    if culprit is not None and culprit.unit is not None:
        return (
            f"The samples are coupled in the unit {culprit.unit!r}: its result for a sample depends on the other "
            "samples of the microbatch, or on the length to which the step pads or shortens them. Use a layer that "
            "treats samples one by one (GroupNorm or LayerNorm instead of batch statistics, attention within a sample, "
            "packed sequences), pad and shorten in the DataLoader or in on_after_batch_transfer, or set "
            "num_microbatches=1."
        )
    if culprit is not None:
        return (
            f"The samples are coupled in {culprit.line} by `{culprit.function}`, whose result is neither a sum nor a "
            f"mean over them. {whole_batch if culprit.at_end else MIX_BEFORE}"
        )
    if difference.is_loss and is_close(difference.whole, sum(difference.of_parts), 1e-3):
        return (
            f"It is a sum over samples that was not recognised as one: use torch.sum or reduction='sum'. {whole_batch}"
        )
    if difference.of_parts and min(difference.of_parts) <= difference.whole <= max(difference.of_parts):
        return (
            "What couples the samples was not found. If the line divides by something other than the number of "
            "samples, divide by a torch.sum that is computed from the batch alone: one that depends on the weights is "
            f"known too late. {whole_batch}"
        )
    if not difference.is_loss:
        return (
            "It is neither a sum nor a mean over samples, or Python computed it from one. Keep sums and counts tensors "
            "up to self.log: no int(), no .item(), and mask.sum().clamp(min=1) for max(int(mask.sum()), 1). "
            f"Log a running total in a hook such as on_train_batch_end. {whole_batch}"
        )
    return f"It is neither a sum nor a mean over samples. {whole_batch}"


def warn_batch_norm(module: pl.LightningModule, num_samples: int) -> None:
    """Says once which layers normalise over microbatches."""
    names = [repr(name) for name, child in module.named_modules() if isinstance(child, _BATCH_NORMS) and child.training]
    if names:
        rank_zero_warn(
            f"BatchNorm normalises over microbatches of {num_samples} samples, not over the batch, as under gradient "
            f"accumulation: {enumerate_names(names, 3)}. The loss curve is not quite that of one device. "
            "GroupNorm, or num_microbatches=1, is exact."
        )


def tell_unchecked(step: str) -> None:
    """Says that a check was not possible."""
    rank_zero_info(
        f"{step} draws random numbers that parts of a batch cannot share with the whole batch. So its loss for "
        "microbatches was not compared with its loss for the batch."
    )


@contextmanager
def batch_norm_frozen(module: nn.Module) -> Iterator[None]:
    """In the block, BatchNorm uses its running statistics, so that it does not count as a difference."""
    with ExitStack() as stack:
        for child in module.modules():
            if isinstance(child, _BATCH_NORMS) and child.training:
                child.training = False
                stack.callback(setattr, child, "training", True)
        yield


Around = Callable[[int, int | None], Any]
"""Makes the context around the step of a microbatch on a stage (None: in a rehearsal)."""
