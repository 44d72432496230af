"""Runs the user's step once on fake parameters, to record unit calls and the values between them.

Source of the idea: none of the existing pipelines does this; tracing by fake tensors is torch's
(:class:`torch._subclasses.fake_tensor.FakeTensorMode`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pp.errors import BatchError, ConfigurationError, ScheduleError, SplitError
from lightning_pp.split._torch_private import buffers_of
from lightning_pp.split.dry_run.carried_state import Left, LeftTensors, buffers_outside, rebound
from lightning_pp.split.dry_run.recording import OF_UNIT, DryRun
from lightning_pp.split.fakes.conversion import convertible_fakes
from lightning_pp.split.fakes.fake_mode import attempts_untold
from lightning_pp.split.fakes.parameters import FakeParameters
from lightning_pp.split.head.deferred_logits import WholeHeadError
from lightning_pp.split.record.source_lines import innermost_user_line
from lightning_pp.split.record.sources import Parameter, set_sources
from lightning_pp.split.record.step_record import CarriedState, Failure, StepRecord
from lightning_pp.split.reductions.recording import EarlierRun, ReductionRecorder
from lightning_pp.split.side_effects.generators import generators_untouched
from lightning_pp.split.side_effects.module_state import StateAroundUnits
from lightning_pp.split.unit_calls.compilation import uncompiled
from lightning_pp.split.unit_calls.selective_policy import Policy

__all__ = ["DryRun", "dry_run"]

_OWN_ERRORS = (BatchError, ConfigurationError, ScheduleError, SplitError)


def dry_run(
    step: Callable[[DryRun], Any],
    *,
    units: Mapping[str, nn.Module],
    fake_parameters: FakeParameters,
    with_gradients: bool,
    seed_inter_unit: Callable[[int], None] | None = None,
    policy: Policy | None = None,
    earlier: EarlierRun | None = None,
    may_fail: bool = False,
) -> StepRecord:
    """Runs ``step`` with every parameter fake, and records unit calls, their reads, and the needs of the end.

    Everything computed from the batch alone stays real, so masks, positions and Python branches on the batch work. The
    module's state (buffers, lists, attributes, gradients), its classes, the batch and all random generators are as
    before afterwards. A unit that cannot run on fakes (its inside depends on data, as the
    routing of a mixture of experts does) is run on made-up data; so is the end of a step after its last unit call.
    A head that has parts among ``units`` is called whole in a step that needs its logits for more than one loss.

    Args:
        step: Runs the user's step on one microbatch and returns what it returned. It is given the recording, so that
            sinks such as ``self.log`` can report what they consume.
        units: Names and modules of the units.
        fake_parameters: Makes the fakes of the whole model.
        with_gradients: Whether autograd is on, as in training.
        seed_inter_unit: Given the index of a unit call (-1: the step's start), seeds the generators for the code after
            it.
        policy: What units save that are run again in backward, for the memory in the record.
        earlier: A dry run of the step on fewer samples; see :class:`ReductionRecorder`.
        may_fail: Whether the record up to an exception of the user's code is returned, with its ``failure``.

    Raises:
        SplitError: The step looks at a weight-dependent value before its last unit call, or the outputs of a unit have
            shapes that depend on weights.
    """
    new_run = partial(DryRun, units, fake_parameters, seed_inter_unit=seed_inter_unit, policy=policy)
    attempt = partial(
        _attempt,
        step=step,
        units=units,
        fake_parameters=fake_parameters,
        with_gradients=with_gradients,
        earlier=earlier,
    )
    recorded = partial(_recorded, attempt=attempt, with_gradients=with_gradients, may_fail=may_fail)
    try:
        return recorded(partial(new_run, splits_heads=True))
    except WholeHeadError as reason:
        record = recorded(partial(new_run, splits_heads=False))
        record.whole_head = str(reason)
        return record


def _recorded(
    new_run: Callable[..., DryRun], attempt: Callable[[DryRun], StepRecord], *, with_gradients: bool, may_fail: bool
) -> StepRecord:
    """The record that ``attempt`` makes with a run on fakes, or on made-up data from where fakes do not do."""
    run = new_run()
    try:
        return attempt(run)
    except SplitError:
        raise
    except Exception as error:
        first_failure = error
    # Fakes may be what failed: a branch on a fake value, a function that is not torch's. The last stage runs what
    # follows the last unit call on real data, so it may be tried on made-up data.
    run = new_run(num_calls=len(run.record.calls), reads=run.lines_of_value_reads())
    try:
        record = attempt(run)
    except SplitError:
        _raise_if_once(first_failure, lambda: attempt(new_run()))
        raise
    except Exception as error:
        failure = error
        if type(failure) is not type(first_failure):
            _raise_if_once(first_failure, lambda: attempt(new_run()))
    else:
        _raise_if_once(first_failure, lambda: attempt(new_run()))
        return record
    if may_fail and _is_users_error(first_failure, failure):
        line = innermost_user_line(failure)
        record = run.finish_opaque(line)
        record.failure = Failure(failure, line)
        return record
    return _record_failed_end(run, with_gradients, first_failure, failure)


def _record_failed_end(run: DryRun, with_gradients: bool, first_failure: Exception, failure: Exception) -> StepRecord:
    """The record of a step whose end fails on fakes (``first_failure``) and on made-up data (``failure``).

    Raises:
        SplitError: The end needs the data of another stage.
        Exception: ``first_failure``, where that has nothing to do with fakes.
    """
    if not with_gradients and run.called_all:
        return run.finish_opaque(innermost_user_line(failure))
    if run.ends_elsewhere():
        record = run.finish_opaque(innermost_user_line(failure))
        if run.end_of_batch is not None:
            record.gradient_sources = run.end_of_batch.gradient_sources
        return record
    if _names_fakes_only(first_failure, failure) and not run.lines_of_value_reads():
        raise failure
    if _is_about_fakes(first_failure) or run.lines_of_value_reads():
        reads = ", ".join(run.lines_of_value_reads()[:3])
        raise SplitError(
            f"Code outside the units needs the data of another stage, at {innermost_user_line(failure)}: "
            f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}."
            f"{f' Before that, the step read values that depend on weights at {reads}.' if reads else ''} "
            "Move the code into a unit, or after the last unit call of a validation step."
        ) from failure
    raise first_failure


def _raise_if_once(failure: Exception, again: Callable[[], Any]) -> None:
    """Raises ``failure``, of a run on fakes, unless another run on fakes fails alike: then it comes of the fakes."""
    if _is_about_fakes(failure):
        return
    try:
        again()
    except Exception as error:
        if type(error) is type(failure):
            return
    raise failure


def _is_users_error(first_failure: Exception, failure: Exception) -> bool:
    """Whether it makes no difference to the failure what values the end of the step is run on."""
    same = type(first_failure) is type(failure) and str(first_failure) == str(failure)
    if not same or isinstance(failure, _OWN_ERRORS) or _is_about_fakes(failure):
        return False
    return innermost_user_line(first_failure) == innermost_user_line(failure)


def _names_fakes_only(first_failure: Exception, failure: Exception) -> bool:
    """Whether the same is wrong with a tensor of data as with a fake, whose class the message has."""
    text = str(first_failure)
    return type(failure) is type(first_failure) and "FakeTensor" in text and text.replace("Fake", "") == str(failure)


def _is_about_fakes(failure: Exception) -> bool:
    speaks = isinstance(failure, NotImplementedError) or "fake" in str(failure).lower()
    return speaks and OF_UNIT not in vars(failure)


def _attempt(
    run: DryRun,
    step: Callable[[DryRun], Any],
    units: Mapping[str, nn.Module],
    fake_parameters: FakeParameters,
    with_gradients: bool,
    earlier: EarlierRun | None,
) -> StepRecord:
    record, module = run.record, fake_parameters.module
    recorder = ReductionRecorder(run.depends_on_weights, run.depends_on_units, earlier)
    record.reductions = recorder.reductions
    with ExitStack() as stack:
        stack.callback(run.release)
        stack.enter_context(generators_untouched(fake_parameters.device))
        stack.enter_context(fake_parameters.all_fake(lambda fake, name: set_sources(fake, {Parameter(name)})))
        changes = stack.enter_context(StateAroundUnits(module, run.standing_by).preserved())
        buffers = list(buffers_outside(module, units))
        stack.enter_context(torch.set_grad_enabled(with_gradients))
        stack.enter_context(uncompiled())
        stack.enter_context(convertible_fakes())
        stack.enter_context(attempts_untold())

        with run.recording(module), recorder, run.operations:
            result = step(run)
        run.finish(result, with_gradients)

        def is_of_unit(name: str) -> bool:
            return any(name == unit or name.startswith(unit + ".") for unit in units)

        def left() -> list[Left]:
            own = [Left(*change) for change in changes()]  # buffers of units stay on their stage
            own = [it for it in own if not (is_of_unit(it[0]) and it[1] in buffers_of(module.get_submodule(it[0])))]
            return [*own, *rebound(buffers, module)]

        changed = left()
        for name, attribute, value in changed:
            if not is_of_unit(name):
                run.need_at_end(value, f"the attribute {attribute!r} of {name or type(module).__name__}")
        run.merge_end()
        record.has_dynamic_shapes |= recorder.makes_integers
        record.depends_on_batch_values |= recorder.asks_for_rows
        record.mutated_attributes = tuple((name, attribute) for name, attribute, _ in changed)
        record.carried = _carried(run, step, module, left)
    return record


def _carried(
    first: DryRun, step: Callable[[DryRun], Any], module: nn.Module, left: Callable[[], list[Left]]
) -> tuple[CarriedState, ...]:
    """What the ``first`` run has left on the module and a second one uses."""
    tensors = LeftTensors(left(), first.depends_on_batch)
    if not tensors:
        return ()
    run = first.again(tensors.by_storage)
    try:
        # a step that fails here says what it has used so far
        with suppress(Exception), run.recording(module):
            run.need_at_end(step(run))
        run.need_at_end(tensors.made_anew(left()))
        run.merge_all()
        return tensors.used_by(run.record)
    finally:
        run.release()
