"""Begin, run and finish a fresh or resumed run, in methods of the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch

from tr_core.batch_size_search import run_epochs_within_memory
from tr_core.callbacks.evaluation_weights import adopt_evaluation_weights, weight_parts
from tr_core.checkpoint.restoring import Resume, resume_run
from tr_core.checkpoint.saving import readable_model_parts
from tr_core.checkpoint.settings import Settings
from tr_core.data.limits import training_batches
from tr_core.loop import run_epochs
from tr_core.metric_means import MetricWindow
from tr_core.optim.fused_backward import check_fused_backward, fused_backward
from tr_core.plan import TrainingPlan, make_plan
from tr_core.preemption.preemption import Preemption
from tr_core.protocols import Strategy
from tr_core.random_state import set_seed
from tr_core.results import TrainOutput
from tr_core.run import Run, RunMethods
from tr_core.runtime.profiling import profiled_steps
from tr_core.session import (
    fresh_state,
    is_run_complete,
    last_train_loss,
    load_best,
    log_run_start,
    preempting,
    run_pending,
    summarize,
    warn_of_earlier,
)
from tr_core.start import begin_run, stage
from tr_core.state import TrainerState
from tr_core.trainer.hooks import OwnClipping
from tr_core.trainer.hub_methods import Publishing
from tr_core.trainer.loss_methods import Stepping
from tr_core.trainer.optimizer_methods import Optimizing
from tr_core.trainer.search_methods import Searching
from tr_core.validation import check_output_dir, check_quantized, lock_output_dir, unlocking_output_dir
from tr_log import progress_bar
from tr_log.phases import COMPUTE, EVALUATION, START, PhaseClock, active_clock, phase, phase_clock
from tr_log.streams import usable_streams


class Running(Stepping, Publishing, Optimizing, Searching):
    """Begin and end runs."""

    evaluate: Callable[..., dict[str, float]]

    def _run(self, resume: Resume, ignore_keys: list[str] | None) -> TrainOutput:
        """Run training from its beginning or from a checkpoint to its end. `on_train_end` fires in any case."""
        # Ranks have different seeds, so that dropout differs. Weights do not: a strategy synchronises them.
        begin_run(self.args.build_s)
        seed = self.args.seed + self.strategy.rank
        set_seed(seed, deterministic=self.args.full_determinism, device=self.strategy.device)
        self.renew_model()
        check_quantized(self.model)
        with (
            ExitStack() as at_end,
            phase_clock() as clock,
            usable_streams(),
            self.strategy.watching(self._progress(clock), self.args.output_dir),
            self.training_context(),
            unlocking_output_dir(self.current_checkpointer),
            self.memory.stage("train") as read_memory,
        ):
            with self._showing("loading"):
                run = self._begin_run(resume, ignore_keys)
            if is_run_complete(run):
                self.logger.info(
                    "nothing to do: the checkpoint is at step %d of %d, and the run is complete; a larger "
                    "num_train_epochs or max_steps continues it",
                    run.window.first_step,
                    run.plan.max_steps,
                )
                self._load_final_weights()
                return TrainOutput(self.state.global_step, last_train_loss(self.state), {})
            log_run_start(run, self.get_num_trainable_parameters())
            self._set("current_run", run)
            at_end.callback(self._set, "current_run", None)
            with (
                self._training_strategy(run.optimizer, run.plan, run.use_strategy),
                preempting(run),
                self._in_training(run.window.means, run.preemption),
                profiled_steps(self.args, self.state, self.strategy, self.callback_handler),
            ):
                self.random_state.reapply()
                self.optimizer_mode.switch(self.optimizer, "train")
                if self.args.eval_on_start and run.window.first_step == 0:
                    with phase(EVALUATION):
                        self.evaluate(ignore_keys=ignore_keys)
                    run.agree_on_flags()
                run.mode.begin()
                run.window.begin(self.state.num_input_tokens_seen)
                run_pending(run)
                (run_epochs_within_memory if self.args.auto_find_batch_size else run_epochs)(run)
                return self._finish_run(summarize(run) | read_memory())

    def _showing(self, work: str) -> AbstractContextManager[Any]:
        """Return a block during which the main process shows what it does, where that can be drawn."""
        return progress_bar(work) if self.is_world_process_zero() and not self.args.disable_tqdm else nullcontext()

    def _progress(self, clock: PhaseClock) -> Callable[[], tuple[int, str, int]]:
        """Return what tells the step, the phase and the position in it; another thread may call it."""

        def read() -> tuple[int, str, int]:
            run = self.current_run
            return self.state.global_step, clock.phase, clock.batches + (0 if run is None else run.position.samples)

        return read

    def _begin_run(self, resume: Resume, ignore_keys: list[str] | None) -> Run:
        """Prepare model, optimizer and data, and restore the checkpoint, if any."""
        args, strategy = self.args, self.strategy
        with stage("model to device"):
            self.prepare()
        self.check_setup()
        if not self.has_own_checkpointer:  # a user's checkpointer has its own folder
            check_output_dir(args, args.output_dir, strategy)
        if args.save_strategy != "no":
            lock_output_dir(self.checkpointer())
        if type(self) is not self.own_class and strategy.rank == 0 and not args.fast_dev_run:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)  # overrides may write there
        loaded = None
        if resume not in (None, False) and self.loads_model_first:
            with stage("resume"):
                loaded = self.load_model(resume)
        with stage("data"):
            loader = self.get_train_dataloader()
            data = training_batches(loader, args, strategy)
            plan = make_plan(args, data)
        with stage("optimizer"):
            optimizer, schedule = self.renew_optimizer(plan.max_steps)
            strategy.bind_optimizer(self.model_wrapped, optimizer)
        self.state = self._fresh_state(plan)
        self.loaders["train_dataloader"] = loader
        self.model.zero_grad(set_to_none=True)  # a manual backward pass or a failed run may have left gradients
        run = Run.begin(cast("RunMethods", self), strategy, plan, data, optimizer, schedule)
        run.ignore_keys = ignore_keys
        run.settings = Settings(run)
        resumed = None
        if resume not in (None, False):
            with stage("resume"), self.loading(optimizer, schedule) as load_by_overrides:
                resumed = resume_run(run, resume, self._fresh_state(plan), loaded)
                if resumed is not None:
                    load_by_overrides(str(resumed))
        if resumed is None and args.save_strategy != "no":
            warn_of_earlier(self.checkpointer(), strategy, args.output_dir)
        return run

    def _fresh_state(self, plan: TrainingPlan) -> TrainerState:
        return fresh_state(self.args, self.strategy, plan, self.trial_state())

    @contextmanager
    def _training_strategy(
        self, optimizer: torch.optim.Optimizer, plan: TrainingPlan, use: Callable[[Strategy], None]
    ) -> Iterator[None]:
        """Wrap the strategy for an optimizer that consumes gradients in the backward pass, inside a block."""
        usual = self.strategy
        name = None if self.has_given_optimizer else str(self.args.optim)
        check_fused_backward(optimizer, usual, name, syncs_each_batch=plan.syncs_each_batch)
        own_clipping = self.overrides("_clip_grad_norm")
        with fused_backward(usual, optimizer, self.model_wrapped, plan.max_grad_norm, self.logger.info) as strategy:
            self._set("strategy", strategy)  # overrides of `training_step` call its `backward`
            use(cast("Strategy", OwnClipping(strategy, self._clip_grad_norm)) if own_clipping else strategy)
            try:
                yield
            finally:
                self._set("strategy", usual)
                use(usual)

    @contextmanager
    def _in_training(self, means: MetricWindow, preemption: Preemption | None) -> Iterator[None]:
        """Fire `on_train_begin` and `on_train_end` around training; the latter gets an exception as `error`."""
        self.is_in_train, self.metric_window = True, means
        error: BaseException | None = None
        try:
            with stage("callbacks"):
                self.fire("on_train_begin")
            if (clock := active_clock()) is not None and clock.phase == START:
                clock.switch(COMPUTE)
            yield
        except BaseException as caught:
            error = caught
            if preemption is not None:
                preemption.wait_after(caught)
            raise
        finally:
            self.is_in_train, self.metric_window = False, None
            self.chosen.end()
            was_asked = self.control.should_save  # by a step whose save the end of the run prevented
            self.fire("on_train_end", error=error)
            if self.control.should_save and not was_asked:
                self.logger.error(
                    "should_save was set in on_train_end, when the run is over and saves no checkpoint any more; set "
                    "it in on_step_end or on_epoch_end, or call trainer.save_model()"
                )

    def _finish_run(self, metrics: dict[str, Any]) -> TrainOutput:
        """Log the figures of the whole run, and load the best weights if requested."""
        self.log_result(metrics)
        self.optimizer_mode.switch(self.optimizer, "eval")
        self._load_final_weights()
        if self.args.push_to_hub:
            self.save_model()  # the final push contains this model, not an older file
            self.create_model_card()
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def _load_final_weights(self) -> None:
        """Load the final weights that the arguments select: those of the last or the best step."""
        if self.args.load_best_model_at_end:
            self._load_best_model()
        adopt_evaluation_weights(self.callback_handler.callbacks, self.model, self.state)

    def _load_best_model(self) -> None:
        """Load the weights of the best step. Collective."""

        def parts() -> dict[str, Any]:
            own = readable_model_parts(self.strategy, self.model, self.model_wrapped)
            return {**own, **weight_parts(self.callback_handler.callbacks, self.model)}

        metric = self.args.metric_for_best_model
        is_there = load_best(self.state, self.checkpointer(), self.strategy, parts, metric)
        if is_there is not None:
            self.lacks_best_weights = not is_there
