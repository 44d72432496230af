"""Runs a split module on one rank: data in, losses, logs and gradients out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_pp.distributed.control import ControlGroups
from lightning_pp.distributed.watch.this_rank import RankStoppedError
from lightning_pp.errors import ConfigurationError
from lightning_pp.planning.schedules.predictions import Prediction
from lightning_pp.runtime.executor import PipelineExecutor, StepInputs
from lightning_pp.runtime.timing import StepTimer
from lightning_pp.schedule import Schedule, StageCosts
from lightning_pp.sharding.units.collective_times import CollectiveTimes
from lightning_pp.split.data.microbatch import Microbatch
from lightning_pp.split.dry_run.run import DryRun
from lightning_pp.strategy.autotune.compiled_backward import compiled_units, log_uncompiled
from lightning_pp.strategy.autotune.plan_facts import model_facts, plan_facts
from lightning_pp.strategy.autotune.profiling import TunedPrograms
from lightning_pp.strategy.batch.checks import BatchChecks
from lightning_pp.strategy.batch.comparison import BatchComparison
from lightning_pp.strategy.batch.power_iterations import PowerIterations
from lightning_pp.strategy.batch.preparation import BatchPreparation
from lightning_pp.strategy.batch.run import BatchRun, StepCall
from lightning_pp.strategy.lightning.gradient_norms import GradientNorms
from lightning_pp.strategy.parameters.finite_gradients import FiniteGradients
from lightning_pp.strategy.parameters.gradients import StageGradients
from lightning_pp.strategy.parameters.post_validation import PostValidation
from lightning_pp.strategy.parameters.precision import scaled
from lightning_pp.strategy.results.batch_undo import batch_undo
from lightning_pp.strategy.results.metrics import PipelineMetrics
from lightning_pp.strategy.results.outputs import SKIPPED_IN_PART, NoLossError, loss_of, none_refused
from lightning_pp.strategy.results.reports import BatchReport, Merged, ReportedBatch
from lightning_pp.strategy.setup import LaidOutModel
from lightning_pp.strategy.step.dry_steps import recorded_step
from lightning_pp.strategy.step.frozen import FrozenParameters
from lightning_pp.strategy.step.gradient_watch import gradients_watched
from lightning_pp.strategy.step.outside_steps import OutsideSteps
from lightning_pp.strategy.surroundings import Surroundings
from lightning_pp.telemetry.diagnosis.evidence import PlanFacts

_INVALID = object()  # what came of a batch that ran with the weights of an update that is made again


class PipelineEngine:
    """Runs batches through this rank's stages.

    A batch, on every rank::

        cut it into microbatches
        in a run's first batches: compare the ranks' batches, and a part in one piece with the same in two
        prepare it: look up the plan of each microbatch, by a dry run when its shapes are new; count what the loss
            divides by
        execute it: run this rank's program (:class:`PipelineExecutor`), the user's step once per microbatch and stage;
            on the last batch of an accumulation it also reduces gradients over replicas, unit by unit; then sum
            gradients over stages that share parameters
        report it: after its last forward the last stage tells what was logged and returned, aside (those of all
            replicas average, each tells its pipeline); every rank takes it up when its program has ended

    The collectives of a training step are listed at
    :class:`~lightning_pp.strategy.lightning.loop.PipelineOptimization`. A batch of evaluation has one small gather
    among last stages, with replicas. Once in a training whose batches are measured: a few small gathers between two of
    them (:class:`TunedPrograms`).

    An error on one rank ends what the other ranks of its pipeline wait for, so all of them leave the run with an error.
    The next run makes new groups, and starts clean; the stages' parameters may then be one optimizer step apart.

    Args:
        trainer: The trainer.
        surroundings: Where the pipeline runs, and what is asked of it.
        model: The model, whole; what other ranks own is dropped, and nothing may hold whole parameters from here on.
    """

    def __init__(self, trainer: pl.Trainer, surroundings: Surroundings, model: LaidOutModel) -> None:
        self.module = surroundings.module
        self.mesh = surroundings.mesh
        self.sizes = surroundings.sizes
        self.device = surroundings.device
        self.rank = surroundings.rank
        self.replica = surroundings.replica
        self.split = model.split
        self.placement = model.layout.placement
        self._trainer = trainer
        self._model = model
        self._precision = surroundings.precision
        self._options = surroundings.options
        self.connection = model.connection
        self._programs = TunedPrograms(surroundings, model.layout, self.split, self.groups, model.compute_on_rank0)
        self._seed = model.seed
        self._num_batches_run = {True: 0, False: 0}  # training, evaluation
        self.num_batches_trained = self._num_batches_before = 0  # in this process; of all kinds, when this run began
        self.has_failed = False
        """Whether an exception on this rank has ended the last run."""
        self._attached = ExitStack()
        self.last_training_step: tuple[Schedule, StepTimer] | None = None
        self.last_collectives: CollectiveTimes | None = None
        self.is_timed = False
        self.label: Callable[[str], AbstractContextManager[Any]] | None = None  # around actions, for a profiler
        self.last_num_samples, self.last_model_flops = 0, 0.0
        self.metrics = PipelineMetrics(self.module, self.groups)
        fake_parameters = self.split.fake_parameters
        fake_parameters.release(self.split.owned_by(self.rank))
        self.gradients = StageGradients(surroundings, self.split, self.groups)
        self._programs.sharding = self.gradients.sharding
        self.prediction_of, self.gradient_squares = self._programs.prediction_of, self.gradients.squares
        self._frozen = FrozenParameters(self.module, fake_parameters)
        ranks = self.groups, self.sizes, self._frozen, self.mesh.get_rank()
        self._comparison = BatchComparison(self.module, *ranks, self.split.units)
        self._power_iterations = PowerIterations(self.module)
        self._outside_steps = OutsideSteps(self.module, fake_parameters.mode)
        self._preparation = BatchPreparation(
            surroundings, self.split, self.groups, model.cutter, self.metrics, self._frozen, self._recorded_step
        )
        forward, checks = self._forward_compared, self._options.batches.check_first_batches
        self._checks = BatchChecks(self._preparation, self.groups, self._precision, self.device, forward, is_on=checks)
        self.finite = FiniteGradients(
            self._options.batches.on_nonfinite, self.split, self.rank, self.device, lambda: self._trainer
        )
        is_asked, is_settled = self._options.schedule.post_validation, lambda: self.is_settled
        self.post_validation = PostValidation(self.module, self.gradients, self.finite, is_asked, is_settled)
        self._compiled_units = compiled_units(self.split, self.rank, surroundings.compile_options)
        self._executor = self._new_executor()
        self.connection.align_generators()

    @property
    def groups(self) -> ControlGroups:
        """Joins the ranks of the pipeline and the replicas of this rank."""
        return self.connection.groups

    def _new_executor(self) -> PipelineExecutor:
        transport, split = self.connection.new_transport(), self.split
        waits = split.tensor is not None and self._compiled_units is None
        return PipelineExecutor(self.rank, split.units, transport, self.device, split.recomputation, waits)

    def random_state(self) -> dict[str, int]:
        """What the random numbers of the next training batch depend on."""
        return {"seed": self._seed, "num_batches": self._num_batches_run[True]}

    def load_random_state(self, state: Mapping[str, int]) -> None:
        """Draws from here on what the run would have drawn whose :meth:`random_state` it is."""
        self._seed, self._num_batches_run[True] = state["seed"], state["num_batches"]

    def attach(self, trainer: pl.Trainer) -> None:
        """Takes over metrics and units for a run of the trainer; every rank has to call it."""
        self._trainer = trainer
        self._checks.start()
        self.post_validation.begin()
        self._power_iterations = PowerIterations(self.module)  # hooks may have added some
        self._recover()
        self._num_batches_before = self.num_batches_run
        self._attached.enter_context(self._outside_steps.watched())
        if trainer.state.fn == TrainerFn.FITTING:
            self._attached.enter_context(gradients_watched(self.module, self.split, self.rank))
        self._attached.enter_context(self._model.update_hooks.attached(self.groups))
        clip, cut = self.gradients.clip_by_norm, self.gradients.cut
        norms = GradientNorms(self.module, self.split.fake_parameters, self.groups, clip, cut)
        self._attached.enter_context(norms.patched())
        self.metrics.attach()
        if self._compiled_units is not None:
            self._compiled_units.attach()

    def detach(self) -> None:
        """Gives metrics, hooks and units back; waits until others have what was sent, unless the run failed."""
        self.post_validation.close(has_failed=self.has_failed)
        self._attached.close()
        self.metrics.detach()
        if self._compiled_units is not None:
            self._compiled_units.detach()
        if not self.has_failed:
            self._executor.drain()
            self.connection.messages.drain()

    @property
    def running_action(self) -> str:
        """The action (``1F3``) that this rank runs; empty outside of a batch. To be read from any thread."""
        return self._executor.running_action

    def abandon(self) -> None:
        """After an exception: ends what the other ranks of the pipeline wait for.

        What is left of the step is dropped before the next one. Not now, for that would wait for collectives that a
        rank with an error never joins.
        """
        self.has_failed = True
        self.connection.abandon()

    def _recover(self) -> None:
        """Brings the ranks together again, if one of them has failed since the last run."""
        run = self._num_batches_run
        failed, counters = self.connection.recover([run[True], run[False], self.num_batches_trained])
        run[True], run[False], self.num_batches_trained = counters
        if failed:
            self.has_failed = True  # drops this rank's part of the step
            self._programs.start_over()
            if self.device.type == "cpu":
                self._executor = self._new_executor()
            self.connection.align_generators()

    @property
    def num_batches_run(self) -> int:
        """Batches of training and evaluation that the ranks have run together, this rank's last one included."""
        return sum(self._num_batches_run.values())

    @property
    def costs(self) -> StageCosts | None:
        """Costs of the stages, given or measured; the same on every rank."""
        return self._programs.costs

    @property
    def is_settled(self) -> bool:
        """Whether the schedule stays as it is from the next training batch on; the same on every rank."""
        return not self._programs.measures

    def plan_facts(self) -> PlanFacts:
        """The facts of the plan for a diagnosis."""
        return plan_facts(self.split, self._options, self._model.memory, self.device.type)

    def facts(self) -> dict[str, int | str | bool]:
        """What the pipeline's options became, and the model's size, by name; the same on every rank."""
        return {
            **model_facts(self.split, self.sizes, self._options, self.device),
            "num_microbatches": self._model.num_microbatches,
            "schedule": self._programs.cache.training(self._model.num_microbatches).name,
            "costs_from": self._programs.costs_from,
        }

    def predictions(self) -> list[Prediction]:
        """The schedule that is run, and those in whose place it is, by the costs that it was chosen by."""
        return self._programs.predictions(self._model.num_microbatches)

    # ---------------------------------------------------------------- batches

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, accumulate: int, reduce: bool) -> Any:
        """Forward and backward of one batch; returns what the user's step would have returned for it."""
        run = partial(self._run, "training_step", args, kwargs, 1.0 / accumulate, trains=True, reduce=reduce)
        numbers = self._num_batches_run[True], self.num_batches_trained
        undo = batch_undo(self.module, self.metrics, self.device) if self.post_validation.begin_batch() else None
        output = run()
        if output is _INVALID and undo is not None:
            undo()
            self._num_batches_run[True], self.num_batches_trained = numbers
            output = run()
        self._model.update_hooks.run_postponed()
        return output

    def evaluate(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward of one batch; returns what the user's step would have returned for it."""
        self.post_validation.settle_on_all()
        return self._run(step, args, kwargs, 1.0, trains=False, reduce=False)

    def _run(
        self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any], factor: float, *, trains: bool, reduce: bool
    ) -> Any:
        batch, *rest = args
        call = StepCall(step, rest, kwargs, training=trains)
        with ExitStack() as stack:
            stack.push(lambda kind, *_: None if kind is None else self.abandon())
            stack.enter_context(self.post_validation.explained())
            stack.enter_context(self._outside_steps.in_step())
            stack.enter_context(self.split.fake_parameters.without_registering_fakes())
            try:
                run = self._prepare(call, batch, factor)
            except NoLossError:  # of a dry run or a check, hence on every rank of the pipeline, and nothing was run
                if not trains or self.sizes.data_parallel > 1 or factor != 1.0:
                    raise
                self.post_validation.settle_on_all()
            else:
                report = self._begin_report(run)
                self._execute(run, range(len(run.microbatches)), trains=trains, reduce=reduce, on_outputs=report.send)
                if not self.post_validation.is_valid():
                    return self._withdraw(report, run)
                self.post_validation.settle()
                output, changes = self._receive(report, run)
                if report.unchecked is not None:  # an error ends the run before an update
                    with self._model.cutter.noted(batch, len(run.microbatches)):
                        self._checks.check_part(run, batch, report.unchecked, self._seed)
                    changes = self._checks.merged_again(run)
                run.scopes.attributes.apply(changes)
                return output
        # training_step returns None for this batch: only its logs and attributes are kept
        if self._run("training_step", args, kwargs, 1.0, trains=False, reduce=False) is not None:
            raise ConfigurationError(SKIPPED_IN_PART)
        return None

    def _prepare(self, call: StepCall, batch: Any, factor: float) -> BatchRun:
        """Cuts the batch, and checks it if it is one of the first; losses are multiplied by ``factor``."""
        self.metrics.attach()
        microbatches = self._model.cutter.cut(batch, for_training=call.training)
        if call.training and self.has_failed:
            self.gradients.abandon()
            self.has_failed = False
        if call.training and self._compiled_units is not None and self.num_batches_trained == 1:
            splits_backward = self.last_training_step is not None and self.last_training_step[0].splits_backward
            log_uncompiled(self.groups, self._compiled_units, splits_backward=splits_backward)
        self._comparison.compare(call, batch)
        with self._model.cutter.noted(batch, len(microbatches)):
            is_checked = self._checks.check(call, batch, microbatches, self._seed)
            seed, follows_estimates = self._next_seed(training=call.training), is_checked and call.training
            run = self._preparation.prepare(
                call, batch, microbatches, seed, factor, follows_estimates=follows_estimates
            )
        self._comparison.compare_plans(call, run.plans)
        return run

    def _forward_compared(self, run: BatchRun, indices: Sequence[int]) -> list[Any]:
        """Forward of microbatches, once it is sure that the ranks expect the same messages."""
        self._comparison.compare_plans(run.call, run.plans)
        return self._execute(run, indices, trains=False)

    def _next_seed(self, *, training: bool) -> int:
        self._num_batches_run[training] += 1
        number = 2 * self._num_batches_run[training] + training
        return ((self._seed * 1_000_003 + number) * 8_191 + self.replica) % (1 << 50)

    def note_batch(self, batch: Any) -> None:
        """Notes what the batch is that is about to be run, while it is on the host."""
        number = self.num_batches_run
        self._comparison.note(batch, number, number - self._num_batches_before)

    def _execute(
        self,
        run: BatchRun,
        indices: Sequence[int],
        *,
        trains: bool,
        reduce: bool = False,
        on_outputs: Callable[[list[Any]], None] | None = None,
    ) -> list[Any]:
        """Runs this rank's program on the microbatches ``indices``; what the last stage's step returned for each.

        ``on_outputs`` gets that on the last stage after its last forward. With ``reduce`` gradients are reduced.
        """
        most = self.gradients.most_microbatches(len(indices), reduce=reduce)
        schedule = self._programs.next_training_schedule(most) if trains else self._programs.cache.evaluation(most)
        self.gradients.clock.begin(is_on=trains and self.is_timed)
        schedule = self.gradients.begin(schedule, len(indices), reduce=reduce)

        def run_step(microbatch: int, stage: int) -> Any:
            index = indices[microbatch]
            with self._power_iterations.first_of(stage) if trains else nullcontext():
                return run.scopes.run(partial(run.call_step, index, stage), index, stage)

        with self._power_iterations.frozen(), run.scopes.of_batch(), none_refused(run.call.batch_idx):
            outputs, timer = self._executor.run(
                schedule,
                StepInputs(
                    [run.plans[index] for index in indices],
                    run_step,
                    scaled(loss_of, self._precision, self.device) if trains else None,
                    run.scopes.scaled.loss_weights,
                    run.seed,
                    self.gradients.stages,
                    self._programs.queued_bytes if trains else None,
                    run.whole,
                    on_outputs,
                    is_timed=trains and (self.is_timed or self._programs.measures),
                    data=[microbatch.data for microbatch in run.microbatches],
                    label=self.label,
                ),
            )
        if not trains:
            self.gradients.finish_evaluation()
            return outputs
        self.gradients.end(reduce=reduce)
        self._note_training(run, schedule, timer)
        return outputs

    def _note_training(self, run: BatchRun, schedule: Schedule, timer: StepTimer) -> None:
        self.last_training_step = (schedule, timer)
        self.last_collectives = self.gradients.clock.times()
        self._programs.note(timer, run.microbatches, run.plans)
        self.last_num_samples = run.num_samples
        # a product's backward is two of its size
        self.last_model_flops = 3.0 * sum(plan.record.forward_flops for plan in run.plans) if self.is_timed else 0.0
        self.num_batches_trained += 1

    def _begin_report(self, run: BatchRun) -> BatchReport:
        where, raises = None, self.finite.mode == "error"
        if run.call.training and self.finite.mode != "ignore":
            stage = self.split.partition.num_stages - 1
            where = f"{self.finite.where()}, on rank {self.mesh.get_rank()} (stage {stage}, the last)"
        return BatchReport(
            self.connection.messages,
            run.scopes.logs,
            run.merged,
            batch=ReportedBatch(
                run.weights,
                run.num_samples,
                self._comparison.take(),
                where,
                raises,
                partial(self._checks.unchecked_part, run),
            ),
            device=self.device,
            metrics=self.metrics,
            trainer=self._trainer,
            is_valid=self.post_validation.is_valid,
        )

    def _receive(self, report: BatchReport, run: BatchRun) -> Merged:
        """The step's output for the batch and its changes to the module; its logs are applied."""
        try:
            output, changes = report.receive_and_apply(self.module, run.call.batch_idx)
        except RankStoppedError:
            raise
        except Exception:
            with suppress(RuntimeError):  # of a rank that has stopped as well
                self._executor.drain()  # who still waits for a gradient of this rank's is to hear of this error, too
            raise
        self.finite.note_loss(report.nonfinite)
        return output, changes

    def _withdraw(self, report: BatchReport, run: BatchRun) -> object:
        """At the end of a batch that ran with the weights of an update which is to be made again."""
        report.drop()
        run.updates.undo()
        self._comparison.put_back(report.batch.fingerprint)
        self.post_validation.settle_batch()
        return _INVALID

    def _recorded_step(self, call: StepCall, microbatch: Microbatch) -> Callable[[DryRun], Any]:
        step, precision = (self.module, call.step, microbatch.data, call.rest, call.kwargs), self._precision
        recorded = recorded_step(*step, precision=precision, trains=call.training)

        def run(dry: DryRun) -> Any:
            with self.gradients.dry():
                return recorded(dry)

        return run

    def check_memory(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises :class:`ConfigurationError` if training with them takes more than ``device_memory_gib``."""
        memory = self._model.memory
        if memory is not None:
            for optimizer in optimizers:
                memory.check_split(self.split, optimizer, self._model.layout.start)
