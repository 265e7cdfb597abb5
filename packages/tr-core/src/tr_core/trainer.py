"""The Trainer: what users call, assign and override, in one class.

Its methods are thin: the code below takes the values it uses. What only subclasses written for transformers need is in
`tr_core.compat`.
"""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tr_args import TrainingArguments
from tr_args.serialization import make_folders_absolute
from tr_core import loss_look, results
from tr_core.callback import CallbackList, adopted
from tr_core.callbacks.defaults import default_callbacks
from tr_core.callbacks.evaluation_weights import (
    OptimizerMode,
    adopt_evaluation_weights,
    evaluation_weights,
    weight_parts,
)
from tr_core.capture.conditions import check_step_compile
from tr_core.changes import (
    ACTS_NEXT_STEP,
    TAKEN_AT_BEGIN,
    assigned,
    check_as_built,
    check_same_process,
    values_when_built,
)
from tr_core.checkpoint import overrides, saving
from tr_core.checkpoint.adapters import restore_parts
from tr_core.checkpoint.overrides import OwnLoading
from tr_core.checkpoint.restoring import Resume, find_checkpoint, resume_run, source_of
from tr_core.checkpoint.saving import readable_model_parts
from tr_core.choose_strategy import log_launcher_settings, usable_strategy
from tr_core.collators import DataCollatorWithPadding, default_data_collator
from tr_core.compat.attributes import TransformersAttributes
from tr_core.compat.refused_hooks import refuse_unknown_hooks
from tr_core.data.batches import AskedBatches, TakeBatches
from tr_core.data.left_out import Remaining, check_left_out, remaining
from tr_core.data.loaders import (
    LoaderCache,
    SeededLoader,
    UsualOrder,
    eval_loader,
    is_map_style,
    keeping_columns,
    train_loader,
    usual_order,
)
from tr_core.data.sampler import MicroBatch, call_sampler_method
from tr_core.data.short_runs import arguments_of_run, evaluates_training_batches, limited_batches, training_batches
from tr_core.data.virtual_shards import replicas
from tr_core.evaluation.best_metric import check_best_metric, may_add_metrics, record_best
from tr_core.evaluation.evaluation_loop import (
    EvaluationLoop,
    EvaluationOptions,
    evaluation_mode,
    kept_logits,
    read_labels,
)
from tr_core.evaluation.gather import gather_tree, map_objects, map_tensors
from tr_core.evaluation.metrics import EvaluationLoss, StreamingMetric, is_streaming
from tr_core.flops import FlopCounter, ModelFacts, look_at
from tr_core.label_smoothing import LabelSmoother
from tr_core.legs import Legs
from tr_core.log_window import store_counts
from tr_core.loop import evaluate_and_report, log_evaluate_save, run_epochs
from tr_core.loss import Division, LossRule, split_loss
from tr_core.metric_means import MetricWindow
from tr_core.model import is_left_in_place, place_on_device
from tr_core.model_card import CardDetails, TrainedRun, Words, write_model_card
from tr_core.model_io import (
    base_model,
    batch_size_of,
    can_return_loss,
    find_label_names,
    kept_columns,
    loss_of,
    main_input_name,
    map_items,
    to_device,
)
from tr_core.optim.chosen_optimizer import ChosenOptimizer
from tr_core.optim.fused_backward import check_fused_backward, fused_backward
from tr_core.optim.optimizers import (
    Factory,
    build_optimizer,
    decay_parameter_names,
    optimizer_factory,
    parameter_groups,
)
from tr_core.optim.parameter_rules import check_applied, read_rules
from tr_core.optim.schedules import FOLLOW_METRIC, get_scheduler
from tr_core.plan import TrainingPlan, make_plan
from tr_core.preemption.preemption import Preemption
from tr_core.preflight.requested import replays, requested, stop_if_requested
from tr_core.protocols import Checkpointer, Restored, Strategy
from tr_core.random_state import RandomState, separate_randomness, set_seed
from tr_core.recovery import run_epochs_with_recovery
from tr_core.results import EvalLoopOutput, PredictionOutput, TrainOutput, speed_metrics
from tr_core.run import Run
from tr_core.runtime.compilation import Compilation, apply_liger_kernel
from tr_core.runtime.memory import MemoryMeter
from tr_core.runtime.profiling import profiled_steps
from tr_core.runtime.run_context import UseCache, align_special_tokens, evaluation_context, training_context
from tr_core.search.arguments import check_search
from tr_core.search.search import BestRun, Search, SearchPlan
from tr_core.search.trial import takes_trial
from tr_core.signatures import is_overridden, one_of_two_names, takes_argument, with_count
from tr_core.start import begin_run, stage
from tr_core.state import EventContext, TrainerControl, TrainerState
from tr_core.step_scope import StepScope
from tr_core.trainer_methods import TrainerMethods
from tr_core.training import (
    earlier_run,
    fresh_state,
    is_run_complete,
    last_train_loss,
    load_best,
    log_run_start,
    preempting,
    run_pending,
    summarize,
)
from tr_core.validation import (
    check_args,
    check_casts,
    check_data,
    check_evaluation,
    check_given_optimizers,
    check_given_parts_fit,
    check_label_names,
    check_model,
    check_one_data_set,
    check_options,
    check_output_dir,
    check_quantized,
    lock_output_dir,
    refuse_unsupported,
    unlocking_output_dir,
)
from tr_log import get_logger, progress_bar
from tr_log.drawings import Drawing
from tr_log.events_file import sizes_of
from tr_log.loggers import configure_process
from tr_log.phases import COMPUTE, EVALUATION, START, PhaseClock, active_clock, phase, phase_clock
from tr_log.streams import usable_streams
from tr_log.terminal import write_line

# Overrides of these write files beside what a checkpoint holds.
_SAVED_BESIDE = ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


_BATCHES, _COUNT, _AFTER = "get_batch_samples", "_get_num_items_in_batch", "_maybe_log_save_evaluate"


class Trainer(TransformersAttributes):
    """Train and evaluate a PyTorch model with a complete loop.

    Args:
        model: any module; its forward takes a batch (by keywords if batches are mappings) and returns its loss.
        args: the training arguments; default ones write to `trainer_output`.
        data_collator: builds a batch from a list of samples; by default pads with `processing_class` if that can pad,
            else stacks.
        train_dataset: map-style or iterable data.
        eval_dataset: map-style or iterable data, or a dict of several.
        processing_class: a tokenizer or processor, saved with the model, whose configurations get its end, begin and
            padding tokens when training begins; `tokenizer` is the same.
        model_init: builds a new model for every call of `train`, in place of `model`. If it takes an argument, it gets
            the trial of a hyper-parameter search, else None.
        compute_loss_func: `(outputs, labels, num_items_in_batch=)` → loss, in place of the model's own.
        compute_metrics: `(EvalPrediction)` → dict of metrics; or an object with `update(preds, target)`, `compute()`
            and `reset()`, as in torchmetrics, or a dict of several by name. They get each batch, and no outputs are
            kept for them.
        callbacks: callbacks or their classes; `callback` is the same.
        optimizers: an optimizer and a schedule to use; for None the arguments select one.
        optimizer_cls_and_kwargs: a class of optimizers and its keyword arguments, in place of the one that the
            arguments name; it gets the parameter groups.
        preprocess_logits_for_metrics: `(logits, labels)` → what is kept of each evaluation batch.
        strategy: where and how to compute; by default the arguments and the launcher select it.
        checkpointer: saves and restores checkpoints; by default the arguments name it.

    Attributes:
        loss_is_scaled_for_ga: what `compute_loss` of a subclass returns. True: a loss already divided for the full
            step, which is used unchanged. False: a mean over its micro-batch, which is divided by their number. None:
            the Trainer observes what the loss depends on. It may be set at any time.
        card_details: the arguments of earlier calls of `create_model_card`.
        lacks_best_weights: whether the best weights should have been loaded and were missing.
        whole: what the model was before each process kept some of its layers; None where it keeps them all.

    Building a Trainer changes no random number generator and moves no model: `train` and `evaluate` do that.

    Raises:
        ValueError: arguments need something that is missing.
    """

    logger = get_logger("tr_core.trainer")
    own_class: ClassVar[type]  # the class of these packages that a user's subclass inherits from
    trial: Any = None
    has_assignments = False  # an assignment during a run acts from its next step
    is_in_evaluation = False
    is_checked = False  # by a preflight, so it may not run any more
    _is_built = False
    strategy: Strategy
    model: nn.Module
    model_wrapped: nn.Module
    _checkpointer_made_of: dict[str, Any] | None = None
    loss_is_scaled_for_ga: bool | None = None
    _given_loss_kwargs: bool | None = None
    card_details = CardDetails()
    lacks_best_weights = False
    _is_saving_to_push = False
    search: Search | None = None
    _signature_columns: list[str] | None = None
    _saved_run: Any = None
    _begun_folder: Path | None = None
    _is_saving_beside = False
    _state_to_save: dict[str, Any] | None = None
    _loadings: Mapping[str, OwnLoading] = {}
    _found_at: Mapping[str, str] = {}  # in a resume: what the folder that an override gets is read from
    current_run: Run | None = None
    whole: ModelFacts | None = None
    _names_of_whole: Mapping[str, bool] | None = None
    _decayed_of_whole: frozenset[str] = frozenset()
    _asked: AskedBatches | None = None  # the batches of the step whose count is asked for
    _has_run_due = False

    # Building

    def __init__(  # noqa: PLR0917  the documented order
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | StreamingMetric | Mapping[str, StreamingMetric] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        callback: Sequence[Any] | None = None,
        strategy: Strategy | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        refuse_unknown_hooks(type(self), self.own_class)
        check_model(model, model_init)
        check_args(args)
        self.args = args if args is not None else TrainingArguments()
        self.args = arguments_of_run(self.args.check(), replays())  # checked again: they may have changed
        refuse_unsupported(self.args)
        self.strategy = usable_strategy(self.args, strategy)
        self._bind_process()
        log_launcher_settings(self.args)
        self.processing_class = one_of_two_names("processing_class", processing_class, "tokenizer", tokenizer)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.data_collator = data_collator if data_collator is not None else self._default_collator()
        self.model_init, self._model_is_fresh = model_init, True
        self._set_model(model if model is not None else self.call_model_init())
        check_given_optimizers(self.args, optimizers, optimizer_cls_and_kwargs, model_init)
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.optimizer, self.lr_scheduler = optimizers
        self.chosen = ChosenOptimizer(*optimizers)
        self._checkpointer, self.has_own_checkpointer = checkpointer, checkpointer is not None
        self.random_state = RandomState(self.strategy.device)
        self._prepare_conditions()
        self.control, self.is_in_train, self.scope = TrainerControl(), False, StepScope()
        is_first, is_first_here = self.strategy.rank == 0, self.strategy.local_rank == 0
        self.state = TrainerState(is_local_process_zero=is_first_here, is_world_process_zero=is_first)
        given = one_of_two_names("callbacks", callbacks, "callback", callback) or ()
        given = [*default_callbacks(self.args, self.strategy), *given]
        self.callback_handler = CallbackList(self.event_context, given)
        self.loaders: dict[str, Any] = {"train_dataloader": None, "eval_dataloader": None}
        self.kept_loaders = LoaderCache()
        self.logged_columns: set[frozenset[str]] = set()
        self.create_accelerator_and_postprocess()
        check_given_parts_fit(self.model, self.optimizer, self.lr_scheduler)
        self.check_setup()
        self._built_with, self._settled_assignments = values_when_built(self.args), self.args.num_assignments
        self._is_built = True
        if not requested():  # a preflight calls no callback: the Hub's would create a repository
            self.fire("on_init_end")

    def overrides(self, *names: str) -> bool:
        """Whether a user's subclass, or an assignment to this object, replaces one of these methods."""
        return any(is_overridden(self, name, self.own_class) for name in names)

    def check_setup(self) -> None:
        """Raise if the arguments need what this Trainer did not get, or what is not possible."""
        args, computes_loss = self.args, self.overrides("compute_loss", "training_step")
        if args.leave_out_samples is not None and not isinstance(self.train_dataset, Remaining | None):
            self._set("train_dataset", remaining(self.train_dataset, args.leave_out_samples))
        check_data(args, self.model, self.train_dataset, self.eval_dataset, self.overrides)
        check_label_names(args, self.model, self.loss_function is not None, computes_loss)
        check_options(args, self.strategy)
        if self.strategy.schedules_micro_batches and self.overrides("training_step"):
            raise ValueError(
                "training_step is overridden, and with pp_size a step's micro-batches are scheduled over processes of "
                "which each computes some layers; override compute_loss, which is called where the last layers are, or "
                "leave pp_size out"
            )
        if not self._is_prepared:
            self.strategy.check_model(self.model)
        check_step_compile(args, self.strategy, self.model, self.overrides)
        check_evaluation(args, self.model, self.compute_metrics, self.loss_rule.counts)
        is_complete = self._is_built or not self.overrides("_get_output_dir")  # which may need what a subclass sets
        if args.save_strategy != "no" and self.train_dataset is not None and is_complete:
            self.checkpointer()  # raises here, and not at the first save

    # Model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Build a model with `model_init`, from the seed only: the same on every rank and in every call.

        Args:
            trial: passed to a `model_init` that takes an argument: the trial of a search, else None.
        """
        if self.model_init is None:
            raise ValueError("this Trainer was given a model, not a model_init")
        given = (trial,) if takes_trial(self.model_init) else ()
        with separate_randomness(self.args.seed):
            model = self.model_init(*given)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model_init returned {model!r}; it must return a torch.nn.Module")
        return model

    def renew_model(self) -> None:
        """Build a new model for a new run, if there is a `model_init` and the model was already trained."""
        if self.model_init is not None and not self._model_is_fresh:
            self._set_model(self.call_model_init(self.trial))
        self._model_is_fresh = False
        self._check_has_model()

    def prepare(self) -> nn.Module:
        """Apply assignments, prepare the model with the strategy if needed, and return it wrapped.

        The strategy prepares the model again if its modules or parameters were replaced.

        Raises:
            ValueError: an argument changed that the Trainer was built with, arguments contradict each other now, or
                the strategy cannot apply the replacement.
        """
        self._check_has_model()
        if self._is_built:
            if self.args.num_assignments != self._settled_assignments:
                make_folders_absolute(self.args.check())
                self._settle_arguments(self.args)
            self._derive()
        if self._prepared != (now := self._structure()):
            if self.args.use_liger_kernel and not self._is_prepared:
                apply_liger_kernel(self.model, self.args.liger_kernel_config)
            if not self._is_prepared and self.overrides("_move_model_to_device") and self.place_model_on_device:
                self._move_model_to_device(self.model, self.strategy.device)
            if self.strategy.schedules_micro_batches and not self._is_prepared:
                self.whole = look_at(self.model)
                self._names_of_whole = {name: p.requires_grad for name, p in self.model.named_parameters()}
                self._decayed_of_whole = frozenset(self.get_decay_parameter_names(self.model))
            names: dict[int, list[str]] = {}
            for name, p in self.model.named_parameters(remove_duplicate=False):
                names.setdefault(id(p), []).append(name)
            self.model_wrapped = self.strategy.prepare(self.model)
            self.chosen.follow(self.optimizer, names, self.model, is_part=self.strategy.schedules_micro_batches)
            now = self._structure()
        self._prepared = now
        return self.model_wrapped

    @property
    def _is_prepared(self) -> bool:
        return self._prepared is not None

    def _structure(self) -> tuple[Any, ...]:
        """Return values that change when modules or parameters of the model are replaced."""
        modules = [id(module) for module in self.model.modules()]
        # If a forward is collective, full parameters replace the shards for some time.
        is_divided = self.strategy.forward_is_collective
        parameters = [name if is_divided else id(p) for name, p in self.model.named_parameters()]
        return (*modules, *parameters)

    def _settle_arguments(self, args: TrainingArguments) -> None:
        refuse_unsupported(args)
        check_as_built(args, self._built_with)
        check_casts(args, self.strategy)
        self._settled_assignments = args.num_assignments

    def _set_model(self, model: nn.Module) -> None:
        self._set("model", model)
        self.model_wrapped, self._prepared = model, None
        self.can_return_loss = can_return_loss(base_model(model))
        self.flop_counter = FlopCounter(model)
        self._label_names_of: Any = None
        self._loss_made_of: tuple[Any, ...] = ()
        self._derive()

    # Derived attributes, and assignments

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_built:
            object.__setattr__(self, name, value)
            return
        if self.is_in_train and name in TAKEN_AT_BEGIN:
            raise RuntimeError(
                f"trainer.{name} was assigned while training: the run that is under way took it when it began; "
                f"{TAKEN_AT_BEGIN[name]}"
            )
        if name in _ASSIGN:
            getattr(self, _ASSIGN[name])(value)
        else:
            object.__setattr__(self, name, value)
        if name in ("optimizer", "lr_scheduler"):
            self.chosen.assign(name, value)
        if name in ACTS_NEXT_STEP:
            if self.is_in_train:
                self.has_assignments = True
            else:
                self._derive()

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute without the effects of a user's assignment."""
        object.__setattr__(self, name, value)

    def _assign_model(self, model: nn.Module | None) -> None:
        if model is None:  # to free its memory
            self._set("model", None)
            self._set("model_wrapped", None)
            self._prepared = None
            return
        check_model(model, None)
        self._set_model(model)
        self._model_is_fresh = True

    def _assign_handler(self, handler: Any) -> None:
        self._set("callback_handler", adopted(handler, self.event_context))

    def _assign_strategy(self, strategy: Strategy) -> None:
        check_same_process(strategy, self.strategy)
        self._set("strategy", usable_strategy(self.args, strategy))
        self.model_wrapped, self._prepared = self.model, None
        if self._checkpointer is not None and not self.has_own_checkpointer:
            self._checkpointer.close()
            self._checkpointer = None
        self._derive()

    def _assign_args(self, args: TrainingArguments) -> None:
        check_args(args)
        if not isinstance(args, type(self.args)):
            raise TypeError(f"trainer.args is a {type(self.args).__name__}; a {type(args).__name__} cannot replace it")
        args = arguments_of_run(args.check(), replays())
        self._settle_arguments(args)
        self._set("args", args)
        self._bind_process()
        self._derive()

    def _check_has_model(self) -> None:
        if self.model is None:
            raise ValueError("trainer.model is None; assign a model before it is trained, evaluated or saved")

    def _check_loss_func(self) -> None:
        """Refuse a `compute_loss_func` that is not a function, unless an override may divide by itself."""
        given = self.compute_loss_func
        if given is not None and not callable(given) and not self.overrides("compute_loss"):
            raise TypeError(
                f"compute_loss_func = {given!r} is a {type(given).__name__}; it must be a function (outputs, labels, "
                "num_items_in_batch=) that returns the loss, or None"
            )

    def _derive(self) -> None:
        """Compute what depends on the current model, methods and arguments."""
        if self.model is None:
            return
        args = self.args
        inner = base_model(self.model)
        if self._label_names_of is None or self._label_names_of[0] != args.label_names:
            # Only then: a user may assign this attribute too.
            self.label_names: list[str] = find_label_names(inner) if args.label_names is None else args.label_names
            self._label_names_of = (args.label_names,)
        averages = args.average_tokens_across_devices
        made_of = (
            self.compute_loss_func,
            self.compute_loss,
            args.label_smoothing_factor,
            averages,
            inner,
            self.strategy,
        )
        if not _same_parts(made_of, self._loss_made_of):
            self._check_loss_func()
            is_function = self.compute_loss_func is None or callable(self.compute_loss_func)
            # As in the reference, what is not a function says that an override divides its loss.
            self.loss_function = self.compute_loss_func if is_function else None
            if args.label_smoothing_factor and self.compute_loss_func is None:
                self.loss_function = LabelSmoother(args.label_smoothing_factor, inner, lambda: self.loss_rule.shifts)
            self.loss_rule = LossRule(
                inner,
                self.loss_function,
                self.strategy.data,
                replicas=replicas(args, self.strategy.data),
                average_tokens_across_devices=averages,
                declared=self.declared_loss_kwargs,
                divides_itself=None if is_function else True,
                first_is_target=lambda inputs: loss_look.first_is_target(
                    self, self.model_wrapped, inputs, self.loss_context
                ),
            )
            self._loss_made_of = made_of
        # Overrides from before `num_items_in_batch` keep working.
        self._loss_takes_count = takes_argument(self.compute_loss, "num_items_in_batch")
        self.step_function = self.step_of(with_count(self.training_step))
        # A step calls these methods only if they are overridden.
        self.prepares_inputs = self.overrides("_prepare_inputs", "_prepare_input")
        self.splits_sequences = self.overrides("_prepare_context_parallel_inputs")
        self.counts_by_override = self.overrides("_get_num_items_in_batch")
        is_own = self.overrides("compute_loss_context_manager", "autocast_smart_context_manager")
        own: Callable[[], AbstractContextManager[object]] = self.compute_loss_context_manager
        self.loss_context = own if is_own else self.strategy.autocast

    # Events

    def fire(self, event: str, **extra: Any) -> None:
        """Send an event to the callbacks that define it, and apply what they return to `control`."""
        self.callback_handler.fire(event, **extra)

    # Process and checkpointer

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.strategy.local_rank == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all."""
        return self.strategy.rank == 0

    def checkpointer(self) -> Checkpointer:
        """Return the checkpointer; the first call builds it from the arguments."""
        args, is_moved = self.args, self.overrides("_get_output_dir")
        args = saving.in_folder(args, self._get_output_dir(trial=self.trial)) if is_moved else args
        made_of = None if self.has_own_checkpointer else saving.checkpointer_arguments(args)
        if self._checkpointer is not None and self._checkpointer_made_of not in (None, made_of):
            self._checkpointer.close()
            self._checkpointer = None
        if self._checkpointer is None:
            self._checkpointer = saving.build_checkpointer(args, self.strategy)
        self._checkpointer_made_of = made_of
        return self._checkpointer

    def _prepare_conditions(self) -> None:
        args = self.args
        self.memory = MemoryMeter(self.strategy.device, is_on=not args.skip_memory_metrics)
        self.use_cache, self.optimizer_mode = UseCache(), OptimizerMode()
        self.compilation: Compilation | None = None
        if args.torch_compile:
            self.compilation = Compilation(args.torch_compile_backend or "inductor", args.torch_compile_mode)

    def meet(self) -> None:
        """Be one of the processes that train together now."""
        if self.has_own_checkpointer:
            raise ValueError(
                "trainer launch --elastic makes a checkpointer for the processes that are left, and one was given to "
                "the Trainer; name it by the argument checkpointer"
            )
        self.prepare()
        self.strategy.members.meet()
        self._bind_process()
        self._model_is_fresh = True  # new processes have a new one, and get its weights
        former, self._checkpointer = self._checkpointer, None  # of other processes
        if hasattr(former, "take_over"):
            cast("Any", self.checkpointer()).take_over(former)

    def _bind_process(self) -> None:
        strategy = self.strategy
        place = {"rank": strategy.rank, "local_rank": strategy.local_rank, "world_size": strategy.world_size}
        make_folders_absolute(self.args).bind(device=strategy.device, **place)
        configure_process(self.args, rank=strategy.rank, world_size=strategy.world_size)

    def _default_collator(self) -> Callable[[list[Any]], Any]:
        pads = hasattr(self.processing_class, "pad")
        return DataCollatorWithPadding(self.processing_class) if pads else default_data_collator

    # Running

    def train(
        self,
        resume_from_checkpoint: Resume = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end of the run.

        Args:
            resume_from_checkpoint: True resumes from the newest valid checkpoint in `output_dir`, and fails if there is
                none. `auto` starts from scratch instead of failing. A folder names one checkpoint. None takes the
                argument of that name.
            trial: the trial of a search, or a dict. It is passed to `model_init` if that takes an argument. The state
                records it as the run's parameters. It changes no argument.
            ignore_keys_for_eval: outputs of the model that evaluations during training skip.

        Returns:
            Steps, mean loss and metrics. Resuming a finished run changes nothing.

        Raises:
            ValueError: there is nothing to train on or to resume from, or the named checkpoint is damaged. Or no
                evaluation can return the metric that selects the best model.
            RuntimeError: this Trainer is training already, and a callback or override calls this.
        """
        if self.is_in_train:
            raise RuntimeError(
                f"train() was called while this Trainer is training already, at step {self.state.global_step} of "
                f"{self.state.max_steps}; call it when the run has ended, or train with another Trainer"
            )
        stop_if_requested(self, resume=resume_from_checkpoint, trains=True, is_train=True)
        functions = (self.compute_metrics, self.compute_loss_func, self.preprocess_logits_for_metrics)
        if not may_add_metrics(self.overrides, self.callback_handler.callbacks, functions):
            check_best_metric(self.args, self.eval_dataset)
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        resume = None if self.args.fast_dev_run else resume
        with assigned(self, trial=trial), self._explained(self.train_dataset):
            if self.strategy.members is None:
                return self._run(resume, ignore_keys_for_eval)
            legs = Legs(self.strategy.members, self.args.snapshot_steps)
            run = partial(self._run, resume, ignore_keys_for_eval, legs)
            return legs.train(cast("TrainerMethods", self), run)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate, log and return the metrics.

        Args:
            eval_dataset: data instead of the Trainer's own. The datasets of a dict are evaluated one by one, with
                `<prefix>_<name>` before the metrics of each. A string names one of the Trainer's datasets.
            ignore_keys: outputs of the model to skip.
            metric_key_prefix: prefix of the metrics' names.

        Raises:
            ValueError: there is nothing to evaluate on.
            TypeError: `compute_metrics` returned no dict.
        """
        stop_if_requested(self, evaluation_data=eval_dataset)
        self.prepare()
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, dict):
            merged: dict[str, float] = {}
            for name, dataset in chosen.items():
                source = name if eval_dataset is None else dataset
                prefix = f"{metric_key_prefix}_{name}"
                merged |= self.evaluate(eval_dataset=source, ignore_keys=ignore_keys, metric_key_prefix=prefix)
            return merged
        if evaluates_training_batches(self.args, eval_dataset):
            loader = limited_batches(self.get_train_dataloader(), self.args, self.strategy.data)
            chosen = self.train_dataset
        else:
            loader = self.get_eval_dataloader(chosen)
        with self._in_evaluation():
            output = self._timed_loop(loader, chosen, "Evaluation", ignore_keys, metric_key_prefix)
            self.log_result(output.metrics)
            self.fire("on_evaluate", metrics=output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict for every sample of a dataset, with metrics if it has labels.

        Args:
            test_dataset: the data.
            ignore_keys: outputs of the model to skip.
            metric_key_prefix: prefix of the metrics' names.
        """
        stop_if_requested(self, evaluation_data=test_dataset)
        self.prepare()
        loader = self.get_test_dataloader(test_dataset)
        with self._in_evaluation():
            output = self._timed_loop(loader, test_dataset, "Prediction", ignore_keys, metric_key_prefix)
            self._draw(output.metrics)
            self.fire("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    # Callbacks

    def add_callback(self, callback: Any) -> None:
        """Append a callback, or an instance of a callback class."""
        self.callback_handler.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback: this object, or the first of this class; None if there is none."""
        return self.callback_handler.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback: this object, or the first of this class."""
        self.callback_handler.pop(callback)

    def end(self) -> None:
        """Leave the process group, at the very end of a script. Without this call the end of the process does it."""
        self.strategy.close()

    # Data

    def get_train_dataloader(self) -> Any:
        """Build the loader of the training data: batches of this rank, in the seeded order.

        An override may return any iterable of batches; resuming then draws and drops the batches already used.
        """
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset; it is None")
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self._train_batch_size,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return a sampler of the training samples' indices, with a length; None lets the arguments select one.

        For overrides, as with a `WeightedRandomSampler`. Every epoch iterates it again, all ranks share its order, and
        a resumed run continues in it. What this method returns is for a loader of one's own.
        """
        data = self.train_dataset if train_dataset is None else train_dataset
        return usual_order(data, self.args, self.strategy.data, main_input_name(self.model, self.processing_class))

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return a sampler of the evaluation samples' indices, with a length; None uses every sample in order."""
        return UsualOrder(eval_dataset, "sequential") if is_map_style(eval_dataset) else None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Build the loader of evaluation data; with persistent workers, reuse the last one.

        Args:
            eval_dataset: the data, or the name of one of the Trainer's datasets; None is the Trainer's own.

        Raises:
            ValueError: there is no such data.
        """
        own = eval_dataset is None or eval_dataset is self.eval_dataset or isinstance(eval_dataset, str)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            dataset = _named(eval_dataset, self.eval_dataset)
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset; the Trainer has none and none was given")
        key = None if not own else eval_dataset if isinstance(eval_dataset, str) else "eval"
        return self._get_dataloader(
            dataset=dataset,
            description="Evaluation",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
            dataloader_key=key,
        )

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Build the loader of the data to predict."""
        check_one_data_set(test_dataset, "test", "prediction")
        return self._get_dataloader(
            dataset=test_dataset, description="Prediction", batch_size=self.args.eval_batch_size
        )

    def num_examples(self, dataloader: Any) -> int:
        """Count the samples behind a loader of all ranks; for an unknown number, return batches times batch size."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self.args.train_batch_size

    # Evaluation

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Run the model on one evaluation batch without gradients.

        Returns:
            Loss (None without labels), logits (None with `prediction_loss_only`), labels (None without).
        """
        if self.prepares_inputs:
            inputs = self._prepare_inputs(inputs)
        has_function = self.loss_function is not None
        detach = map_objects if self.args.eval_use_gather_object else map_tensors
        labels, gives_loss = read_labels(
            inputs,
            self.label_names,
            has_loss_function=has_function,
            returns_loss=self.can_return_loss,
            detach=detach,
        )
        loss, context = None, nullcontext
        if gives_loss and self.splits_sequences:
            context, inputs = self._prepare_context_parallel_inputs(model, inputs)
        with torch.no_grad(), self.loss_context(), context():
            if gives_loss:
                loss, outputs = self.loss_and_outputs(model, inputs)
                loss = loss.detach().mean()
            else:
                outputs = self.call_model(model, inputs)
        if prediction_loss_only:
            return loss, None, None
        skip_first = gives_loss and not has_function
        return loss, kept_logits(outputs, self.model, ignore_keys, skip_first=skip_first, detach=detach), labels

    @contextmanager
    def evaluation_context(self) -> Iterator[object]:
        """Return a block for an evaluation or prediction, from its first batch to its last event; never nested.

        By default the model is in evaluation mode, with the callbacks' weights for evaluation. Afterwards, also after
        an exception, each module is in its own mode again, with the trained weights. An override must also enter this
        context.
        """
        with self.holding_evaluation_weights(), evaluation_mode(self.model_wrapped):
            yield

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate on all batches, and return predictions, labels, metrics and the number of samples.

        Args:
            dataloader: batches of this rank.
            description: a name for the log; "Prediction" keeps predictions also with `batch_eval_metrics`.
            prediction_loss_only: keep no predictions, and compute only streaming metrics; None takes the argument of
                that name.
            ignore_keys: outputs of the model to skip.
            metric_key_prefix: prefix of the metrics' names.
        """
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        self.loaders["eval_dataloader"] = dataloader
        self.logger.debug("%s begins at step %d", description, self.state.global_step)
        options = EvaluationOptions(
            loss_only,
            ignore_keys,
            metric_key_prefix,
            predicts=description == "Prediction",
            main_input=getattr(self.model, "main_input_name", "input_ids"),
        )
        args, strategy = self.args, self.strategy
        window = self.scope.separate_window(strategy.data, is_exact=args.elastic is not None)
        with self._in_evaluation(), self._evaluation_settings(), window as window:
            loss = EvaluationLoss(args, strategy.data, self.loss_rule, takes_count=self._loss_takes_count)
            loop = EvaluationLoop(self, options, args, strategy, self.scope, loss, compute_metrics=self.compute_metrics)
            return loop.run(dataloader, self.model_wrapped, window)

    # Internal

    @contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        """Enter `evaluation_context` around an evaluation and its events; inside it already, do nothing."""
        if self.is_in_evaluation:
            yield
            return
        self.prepare()
        with assigned(self, is_in_evaluation=True), usable_streams(), self.evaluation_context():
            yield

    def _evaluation_settings(self) -> AbstractContextManager[None]:
        args, model, device, state = self.args, self.model, self.strategy.device, self.state
        names, compilation, is_in_train = self.label_names, self.compilation, self.is_in_train
        return evaluation_context(args, model, device, names, compilation, state, is_in_train=is_in_train)

    def _timed_loop(
        self, loader: Any, data: Any, description: str, ignore_keys: list[str] | None, prefix: str
    ) -> EvalLoopOutput:
        start_s = time.perf_counter()
        # Without a function of all predictions, nothing uses the predictions of an evaluation.
        unseen = self.compute_metrics is None or is_streaming(self.compute_metrics)
        options: dict[str, Any] = {"ignore_keys": ignore_keys, "metric_key_prefix": prefix}
        if description == "Evaluation":
            options["prediction_loss_only"] = True if unseen else None
        with self._explained(data), phase(EVALUATION), self.memory.stage(prefix) as read_memory:
            # By name: an override may have its parameters in another order, or only keyword parameters.
            output = self.evaluation_loop(loader, description=description, **options)
            output.metrics.update(read_memory())
        steps = -(-output.num_samples // (self.args.eval_batch_size * replicas(self.args, self.strategy.data)))
        output.metrics.update(speed_metrics(prefix, start_s, output.num_samples, steps))
        return output

    # A run

    def _run(self, resume: Resume, ignore_keys: list[str] | None, legs: Legs | None = None) -> TrainOutput:
        """Run training from its beginning or from a checkpoint to its end. `on_train_end` fires in any case."""
        # Processes with other samples have other seeds, so that dropout differs. A strategy makes weights the same.
        begin_run(self.args.build_s)
        seed = self.args.seed + (0 if self.args.elastic else self.strategy.data.rank)
        set_seed(seed, deterministic=self.args.full_determinism, device=self.strategy.device)
        self.renew_model()
        check_quantized(self.model)
        align_special_tokens(self.model, self.processing_class)
        with (
            phase_clock() as clock,
            usable_streams(),
            self.strategy.watching(self._progress(clock), self.args.output_dir),
            self.training_context(),
            unlocking_output_dir(self.current_checkpointer),
            self.memory.stage("train") as read_memory,
        ):
            self.model.zero_grad(set_to_none=True)  # a failed run may have left gradients, and gathered parameters
            with self._showing("loading"):
                run = self._begin_run(resume, ignore_keys, legs)
            if is_run_complete(run):
                self.logger.info(
                    "nothing to do: the checkpoint is at step %d of %d, and the run is complete; a larger "
                    "num_train_epochs or max_steps continues it",
                    run.window.first_step,
                    run.plan.max_steps,
                )
                self._load_final_weights()
                return TrainOutput(self.state.global_step, last_train_loss(self.state), {})
            schedule = type(run.schedule).__name__ if self.has_given_schedule else str(self.args.lr_scheduler_type)
            log_run_start(run, self.get_num_trainable_parameters(), schedule)
            with (
                assigned(self, current_run=run),
                self._training_strategy(run.optimizer, run.plan, run.use_strategy),
                preempting(run),
                self._in_training(run.window.means, run.preemption, legs),
                profiled_steps(self.args, self.state, self.strategy, self.callback_handler),
            ):
                self.random_state.reapply()
                self.optimizer_mode.switch(self.optimizer, "train")
                if self.args.eval_on_start and run.window.first_step == 0 and not run.goes_on:
                    with phase(EVALUATION):
                        self.evaluate(ignore_keys=ignore_keys)
                    run.preemption.agree_on_flags()
                run.mode.begin()
                run.window.begin(self.state.num_input_tokens_seen)
                run_pending(run)
                if legs is not None:
                    legs.begin(run)
                recovers = self.args.on_spike is not None or self.args.auto_find_batch_size
                (run_epochs_with_recovery if recovers else run_epochs)(run)
                return self._finish_run(summarize(run) | read_memory())

    @contextmanager
    def _explained(self, data: Any) -> Iterator[None]:
        """Add to an exception what is wrong with the micro-batch of the data that it stopped, and what to do."""
        try:
            yield
        except Exception as error:
            # Imported here: a run that does not fail needs none of it.
            from tr_core.preflight.diagnosis import explain

            explain(error, cast("TrainerMethods", self), data)
            raise

    def _showing(self, work: str) -> AbstractContextManager[Any]:
        """Return a block during which the main process shows what it does, where that can be drawn."""
        return progress_bar(work) if self.is_world_process_zero() and not self.args.disable_tqdm else nullcontext()

    def _progress(self, clock: PhaseClock) -> Callable[[], tuple[int, str, int]]:
        """Return what tells the step, the phase and the position in it; another thread may call it."""

        def read() -> tuple[int, str, int]:
            run = self.current_run
            return self.state.global_step, clock.phase, clock.batches + (0 if run is None else run.position.samples)

        return read

    def _begin_run(self, resume: Resume, ignore_keys: list[str] | None, legs: Legs | None) -> Run:
        """Prepare model, optimizer and data, and restore a snapshot or the checkpoint, if any."""
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
            if args.leave_out_samples is not None:
                is_own = self.overrides("get_train_dataloader")
                check_left_out(loader, self.train_dataset, strategy.data, is_own=is_own)
            data = training_batches(loader, args, strategy.data)
            plan = make_plan(args, data)
        with stage("optimizer"):
            optimizer, schedule = self.renew_optimizer(plan.max_steps)
            strategy.bind_optimizer(self.model_wrapped, optimizer)
        self.state = self._fresh_state(plan)
        self.loaders["train_dataloader"] = loader
        self.model.zero_grad(set_to_none=True)  # an override, as of create_optimizer, may have made a backward pass
        run = Run.begin(cast("TrainerMethods", self), strategy, plan, data, optimizer, schedule)
        run.ignore_keys, run.legs, run.goes_on = ignore_keys, legs, legs is not None and legs.restore(run)
        run.updates.own_clip = self._clip_grad_norm if self.overrides("_clip_grad_norm") else None
        resumed = None
        if resume not in (None, False) and not run.goes_on:
            with stage("resume"), self.loading(optimizer, schedule) as load_by_overrides:
                resumed = resume_run(run, resume, self._fresh_state(plan), loaded)
                if resumed is not None:
                    load_by_overrides(str(resumed))
        begins_anew = resumed is None and not run.goes_on and args.save_strategy != "no"
        if begins_anew and (earlier := earlier_run(self.checkpointer(), strategy, args.output_dir)):
            self.logger.warning("%s", earlier)
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
        with (
            fused_backward(usual, optimizer, self.model_wrapped, plan.max_grad_norm, self.logger.info) as strategy,
            assigned(self, strategy=strategy),  # overrides of `training_step` call its `backward`
        ):
            use(strategy)
            try:
                yield
            finally:
                use(usual)

    @contextmanager
    def _in_training(self, means: MetricWindow, preemption: Preemption, legs: Legs | None) -> Iterator[None]:
        """Fire `on_train_begin` and `on_train_end` around training; the latter gets an exception as `error`.

        If another leg follows, the run has not ended.
        """
        self.is_in_train, self.scope.metrics = True, means
        error: BaseException | None = None
        goes_on = False
        try:
            with stage("callbacks"):
                self.fire("on_train_begin")
            if (clock := active_clock()) is not None and clock.phase == START:
                clock.switch(COMPUTE)
            yield
        except BaseException as caught:
            error, goes_on = caught, legs is not None and legs.goes_on_after(caught)
            preemption.wait_after(caught)
            raise
        finally:
            self.is_in_train, self.scope.metrics = False, None
            self.chosen.end()
            was_asked = self.control.should_save  # by a step whose save the end of the run prevented
            if not goes_on:
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

    # The loss of a micro-batch

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute loss and gradients of one micro-batch.

        Args:
            model: the wrapped model, in training mode.
            inputs: the batch, with tensors on the host.
            num_items_in_batch: targets of the full step over all ranks, a scalar tensor; None if not counted.

        Returns:
            This micro-batch's share of the step's loss, detached, on the device: nothing is read back.
        """
        if self.splits_sequences:
            return self._split_step(model, inputs, num_items_in_batch)
        if not self.strategy.schedules_micro_batches:  # else `inputs_of_schedule` did
            inputs = self._prepare_inputs(inputs) if self.prepares_inputs else to_device(inputs, self.strategy.device)
        count: dict[str, Any] = {"num_items_in_batch": None} if self._loss_takes_count else {}
        if count and num_items_in_batch is not None:
            count = {"num_items_in_batch": num_items_in_batch}
            if self.loss_rule.is_open and self.observes_loss(num_items_in_batch):
                loss_look.observe_training(self, model, inputs, num_items_in_batch)
        wants_outputs = self.callback_handler.wants_outputs
        options = {**count, "return_outputs": True} if wants_outputs else count
        self.loss_rule.is_own_loss = False
        is_declared = self.loss_is_scaled_for_ga is not None
        if self.scope.size > 1 and not is_declared and self.loss_rule.divides_itself is None:
            loss = loss_look.first_loss(self, model, inputs, options)
        else:
            with self.loss_context():
                loss = self.compute_loss(model, inputs, **options)
        loss, outputs = loss if wants_outputs else (loss, None)
        parts: dict[str, torch.Tensor] = {}
        if not isinstance(loss, torch.Tensor):
            loss, parts = split_loss(loss)
        size, weight, is_scaled = self.scope.size, self.scope.weight, self.loss_is_scaled_for_ga
        if num_items_in_batch is not None or size > 1 or weight != 1.0 or parts:
            given_count = None if num_items_in_batch is None else self._loss_takes_count
            division = self.loss_rule.division(given_count, size, is_scaled)
            loss = self.loss_rule.share(loss, division, size, weight)
            self._log_parts(parts, division)
        self.strategy.backward(loss)
        if self.loss_rule.was_zero:
            loss_look.refuse_gradients_of_zero(self)
        if wants_outputs:
            self.scope.outputs = map_tensors(torch.Tensor.detach, outputs)
        return loss.detach()

    def inputs_of_schedule(self, inputs: Any, num_items: torch.Tensor | None) -> Any:
        """Return a micro-batch on the device, for a strategy that schedules a step's micro-batches itself.

        What its loss is divided by is looked at here, where all processes can make a forward together.
        """
        inputs, rule = self._prepare_inputs(inputs), self.loss_rule
        if rule.is_open and self.observes_loss(num_items) and num_items is not None:
            loss_look.observe_training(self, self.model_wrapped, inputs, num_items)
        if self.scope.size > 1 and self.loss_is_scaled_for_ga is None and rule.divides_itself is None:
            options = {"num_items_in_batch": num_items} if self._loss_takes_count else {}
            rollback = loss_look.rollback_of(self, self.model_wrapped)  # the step computes it again
            quiet = warnings.catch_warnings(action="ignore")  # checkpointing warns where there are no gradients
            with quiet, torch.no_grad(), self.scope.separate_window(self.strategy.data):
                loss_look.first_loss(self, self.model_wrapped, inputs, options)
            rollback.restore()
        return inputs

    def _split_step(self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | None) -> torch.Tensor:
        context, inputs = self._prepare_context_parallel_inputs(model, inputs)
        with assigned(self, splits_sequences=False), context():
            return Trainer.training_step(self, model, inputs, num_items_in_batch)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Compute the loss of one batch: the model's own, or that of `compute_loss_func`.

        An override may omit `num_items_in_batch`; its loss is then a mean over the batch. It may return a dict of
        scalars in place of the loss: `{"loss": ..., "ce": ..., "aux": ...}`. `loss` is trained. The other entries are
        logged like the loss, with the same mean over micro-batches, steps and ranks. So the parts of a loss add up in
        the log. In an evaluation they are metrics in addition to `<prefix>_loss`. For other values use `log_metric`.

        Args:
            model: the wrapped model.
            inputs: the batch, on the device.
            return_outputs: also return the outputs of the model.
            num_items_in_batch: the divisor of a summed loss, a scalar tensor.

        Returns:
            A scalar tensor, or a pair of it and the model's outputs.
        """
        function, labels = self.loss_function, None
        if function is not None:
            inputs, labels = self._split_labels(inputs)
        if num_items_in_batch is not None:
            self.loss_rule.is_own_loss = True
            if self.loss_rule.passes_count:
                inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = self.call_model(model, inputs)
        if function is None:
            loss = loss_of(outputs, inputs)
        else:
            extra: dict[str, Any] = {"num_items_in_batch": num_items_in_batch} if self.loss_rule.counts else {}
            loss = function(outputs, labels, **extra)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> AbstractContextManager[object]:
        """Return a block for forward and loss of a micro-batch, in training and evaluation. Overrides may add to it."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self) -> AbstractContextManager[object]:
        """Return the context of mixed precision; without mixed precision it does nothing."""
        return self.strategy.autocast()

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model gets `num_items_in_batch`; by default its forward's signature decides.

        With False nothing is counted for a model: a loss is a mean over its micro-batch. With True the targets are
        counted, and a loss that does not depend on the count is refused.
        """
        return self.loss_rule.accepts_count

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, value: bool) -> None:
        self._given_loss_kwargs = bool(value)

    def declared_loss_kwargs(self) -> bool | None:
        """Return the value set for `model_accepts_loss_kwargs`, on this Trainer or in its class; None if not set."""
        in_class = type(self).model_accepts_loss_kwargs
        return self._given_loss_kwargs if isinstance(in_class, property) else self.model_accepts_loss_kwargs

    def call_model(self, model: nn.Module, inputs: Any) -> Any:
        """Call the model with a batch: mappings by keyword, tuples and lists by position."""
        if hasattr(inputs, "keys"):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)

    def loss_and_outputs(self, model: nn.Module, inputs: Any) -> tuple[torch.Tensor, Any]:
        """Compute the loss of one evaluation batch, over its own targets, with the model's outputs."""
        rule = self.loss_rule
        if rule.counts:
            rule.find_shift(
                [inputs],
                lambda given: loss_look.first_is_target(self, model, given, nullcontext),
                over_ranks=self.is_in_evaluation,
            )
        if self.counts_by_override:
            count = self._get_num_items_in_batch([inputs], self.strategy.device)
            count = None if count is None else torch.as_tensor(count, device=self.strategy.device)
        else:
            count = rule.count_inputs(inputs) if rule.counts else None
        count_argument: dict[str, Any] = {"num_items_in_batch": count} if self._loss_takes_count else {}
        if count_argument and count is not None and self.is_in_evaluation and rule.asks_in_evaluation():
            given, is_own = count, self.loss_function is None and not self.overrides("compute_loss")
            rule.observe_evaluation(
                lambda: loss_look.losses_with(self, model, inputs, given, nullcontext),
                lambda: is_own and loss_look.is_mean_over_targets(self, model, inputs, given),
            )
        self.loss_rule.is_own_loss = False
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True, **count_argument)
        parts: dict[str, torch.Tensor] = {}
        if isinstance(loss, Mapping):
            loss, parts = split_loss(loss)
        if self.scope.metrics is not None:
            weight = (batch_size_of(inputs) or 0) if count is None else count
            for name, value in parts.items():
                self.log_metric(name, value, weight)
        return loss, outputs

    def step_of(self, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the step function of a run: `training_step`, with what the arguments put around it."""
        if self.args.step_compile != "off":
            step = self.capturing(step)
        return self.counting(step) if self.args.count_flops else step

    def counting(self, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a step function with which a run counts the operations of its first micro-batch (`count_flops`)."""

        def counted(model: nn.Module, inputs: Any, num_items: torch.Tensor | None) -> torch.Tensor:
            run = self.current_run
            # A loss that is looked at is computed more than once: the next micro-batch is counted.
            with nullcontext() if run is None or self.observes_loss(num_items) else run.counting(inputs):
                return step(model, inputs, num_items)

        return counted

    def capturing(self, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a step function that replays a captured micro-batch where it can (`step_compile`)."""

        def captured(model: nn.Module, inputs: Any, num_items: torch.Tensor | None) -> torch.Tensor:
            run = self.current_run
            if run is None or run.capture is None:
                return step(model, inputs, num_items)
            return run.capture.run(step, model, inputs, num_items)

        return captured

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of forward and backward of one batch; 0 if unknown."""
        return self.flop_counter.count(inputs)

    def counts_floating_point_ops(self) -> bool:
        """Whether `floating_point_ops` can count: the model has a count, or a subclass overrides it."""
        return self.flop_counter.knows or self.overrides("floating_point_ops")

    def event_context(self) -> EventContext:
        """Return the current arguments of events, also between the parts of a step."""
        return EventContext(  # by position: a step makes one
            self.args,
            self.state,
            self.control,
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
            self.loaders,
            self.scope.loss,
        )

    # What the loss is divided by

    def observes_loss(self, num_items: torch.Tensor | None) -> bool:
        """Whether the loss of the current micro-batch is computed twice more, to see what it is divided by."""
        takes_count = num_items is not None and self._loss_takes_count
        return takes_count and self.loss_rule.asks(self.scope.size, self.loss_is_scaled_for_ga)

    def _log_parts(self, parts: dict[str, torch.Tensor], division: Division) -> None:
        """Log what `compute_loss` returned in addition to the loss: this micro-batch's share of the step's values."""
        window, size, ranks = self.scope.metrics, self.scope.size, replicas(self.args, self.strategy.data)
        if window is not None:
            for name, value in parts.items():
                share = self.loss_rule.share(value, division, size, self.scope.weight)
                window.add_part(name, share / ranks if ranks > 1 else share, size * ranks)

    def _split_labels(self, inputs: Any) -> tuple[Any, Any]:
        """Split the labels from a batch for `compute_loss_func`: by name, or the last item of a tuple."""
        if isinstance(inputs, list | tuple):
            return inputs[:-1], inputs[-1]
        rest = dict(inputs)
        return rest, rest.pop("labels", None)

    # Logs and files

    @contextmanager
    def holding_evaluation_weights(self) -> Iterator[None]:
        """Swap in the weights to evaluate and to export inside the block; restore the trained weights after it."""
        with self.optimizer_in_evaluation(), evaluation_weights(self.callback_handler.callbacks, self.model):
            yield

    def training_context(self) -> AbstractContextManager[None]:
        """Return a block that applies the arguments' settings of device and model during training."""
        return training_context(self.args, self.model, self.strategy.device, self.use_cache, self.compilation)

    def optimizer_in_evaluation(self) -> AbstractContextManager[None]:
        """Swap in the evaluation weights of an optimizer that has two sets of weights; during a run only."""
        return self.optimizer_mode.evaluating(self.optimizer) if self.is_in_train else nullcontext()

    def log_metric(self, name: str, value: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Average and log a value: from `compute_loss`, `training_step` or a callback.

        In training it computes the mean over the steps since the last log and over all ranks. The next log shows it
        together with `loss`. Within an evaluation it computes the mean over that evaluation, as the metric
        `<prefix>_<name>`, unless `compute_metrics` returns one of that name. Ranks may log different names, or none.
        Nothing is read from the device. Checkpoints save an open window.

        Args:
            name: its name in the log; not a name that an entry has already, as `loss`.
            value: a number, or a tensor with one element, without its graph.
            weight: how much this value counts in the mean; not negative. If a rank has only a filler sample in a
                micro-batch, the value counts nothing.

        Raises:
            RuntimeError: neither training nor an evaluation is running.
            ValueError: the name is taken, the value is not a scalar, or the weight is negative or infinite.
            TypeError: value or weight is not a number.
        """
        if self.scope.metrics is None:
            raise RuntimeError(
                f"log_metric({name!r}) has nothing to average over: neither training nor an evaluation is going on; "
                "write values to the log at once with log({...})"
            )
        if self.scope.weight != 0.0:
            self.scope.metrics.add(name, value, weight)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add an entry to `state.log_history`, and fire `on_log`.

        A `tr_log.Table` or `tr_log.ConfusionMatrix` is taken out of the entry, and drawn on the page of the run.

        Args:
            logs: names and values; `epoch` is added, and `num_input_tokens_seen` if tokens are counted.
            start_time: accepted for overrides that pass it on.
        """
        if self._draw(logs) and not logs:
            return
        self.stamp(logs)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    def _draw(self, logs: dict[str, Any]) -> bool:
        """Take what is to be drawn out of an entry, send it to the callbacks, and return whether there was any."""
        drawings = {name: logs.pop(name) for name, value in [*logs.items()] if isinstance(value, Drawing)}
        if drawings:
            self.fire("on_draw", drawings=drawings)
        return bool(drawings)

    def log_result(self, metrics: dict[str, Any]) -> None:
        """Log the metrics of an evaluation or a run, and add to them what an override of `log` adds to the entry."""
        self._draw(metrics)
        entries = self.state.log_history
        number = len(entries)
        self.log(metrics)
        for entry in entries[number:]:  # an override may have passed on another dict
            for name, value in entry.items():
                if name != "step":
                    metrics.setdefault(name, value)
        self.stamp(metrics)

    def stamp(self, metrics: dict[str, Any]) -> None:
        """Add the progress of the run to metrics: `epoch`, and `num_input_tokens_seen` if tokens are counted."""
        metrics["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            metrics["num_input_tokens_seen"] = self.state.num_input_tokens_seen

    def _save_companions(self, folder: Path) -> None:
        processor = saving.find_processor(self.processing_class, self.data_collator)
        saving.save_companions(folder, self.model, self.args, processor, self.use_cache)

    def save_state(self) -> None:
        """Write `trainer_state.json` to the output folder."""
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(folder / "trainer_state.json")

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics in readable form, on the main process."""
        if self.is_world_process_zero():
            lines = [f"***** {split} metrics *****", *results.metric_lines(self.metrics_format(metrics))]
            write_line(sys.stdout, "\n".join(lines))

    def metrics_format(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Return metrics in `log_metrics` form: run times as h:m:s, operations in GF, numbers to four decimals."""
        return results.format_metrics(metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write metrics to `<split>_results.json`, and with `combined` also to `all_results.json`."""
        if self.is_world_process_zero():
            results.save_metrics(Path(self.args.output_dir), split, metrics, combined)

    # The Hub

    def create_model_card(  # noqa: PLR0917  the documented order
        self,
        language: Words = None,
        license: str | None = None,
        tags: Words = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: Words = None,
        dataset_tags: Words = None,
        dataset: Words = None,
        dataset_args: Words = None,
    ) -> None:
        """Write `README.md` to the output folder: metadata for the Hub, evaluation figures, how the model was trained.

        The figures describe the current weights: they come from the last evaluation, or from the best step if its
        weights were loaded. An argument of one call also applies to later cards. A card written by hand is kept, with a
        warning. Only the main process writes.

        Args:
            language: codes of the model's languages, such as `en`.
            license: identifier of its licence, such as `apache-2.0`.
            tags: tags in addition to `generated_from_trainer`.
            model_name: its name; by default that of the Hub repository, or of the output folder.
            finetuned_from: identifier of the base model; by default that in the model's configuration.
            tasks: task identifiers, such as `text-classification`; the default depends on the model's class.
            dataset_tags: identifiers of the datasets; by default those that the evaluation data name.
            dataset: names of the datasets; by default their identifiers.
            dataset_args: which part of each dataset.
        """
        stop_if_requested(self)
        given = CardDetails(
            language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args
        )
        self.card_details = self.card_details.updated(given)
        if self.is_world_process_zero():
            write_model_card(self._trained_run(), self.card_details)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Save the model and its card to `output_dir` and push it to the Hub repository that the arguments name.

        Running pushes finish first. This push includes checkpoints whose push failed during training. With
        `fast_dev_run` nothing is saved or pushed, and the method returns None. Only the main process pushes; the
        others return None.

        Args:
            commit_message: the commit message.
            blocking: wait until the push is complete; otherwise push in the background.
            token: access token, in place of the arguments' `hub_token`, for this push only.
            revision: branch to push to, in place of `hub_revision`.
            private: whether a repository created by this call is private, in place of `hub_private_repo`.
            **card: arguments of `create_model_card`: `language`, `license`, `tags` and so on.

        Returns:
            The address of the commit. Without `blocking`: a future of it.

        Raises:
            tr_core.plugins.PluginError: the package that pushes is not installed.
            RuntimeError: the push failed, also on retry; the message says why.
        """
        given, token = _Hidden(token), None
        stop_if_requested(self)
        if self.args.fast_dev_run:
            self.logger.info("fast_dev_run=%r: nothing is pushed to the Hub", self.args.fast_dev_run)
            return None
        self.fire("on_push_begin")
        self._save_to_push()
        self.create_model_card(**card)
        return self._push(commit_message or "End of training", blocking, given, revision, private)

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write weights (safetensors), configuration and tokenizer. Collective.

        Rank 0 writes; with `save_on_each_node`, the first rank of every machine does, if the model is not sharded.
        With `ema_decay` the weights are the average. A run calls an override for each checkpoint too, on all ranks and
        with `_internal_call=True`. With `push_to_hub`, a call outside of `train` also saves to `output_dir` of the
        arguments, and pushes that as "Model save". A failed push is logged as an error.
        """
        self._write_model(str(output_dir or self.args.output_dir))
        if not self.args.push_to_hub or _internal_call or self.is_in_train or self._is_saving_to_push:
            return
        self.fire("on_push_begin")
        if output_dir is not None and Path(output_dir).absolute() != Path(self.args.output_dir).absolute():
            self._save_to_push()
        self.create_model_card()
        try:
            self._push("Model save")
        except RuntimeError as error:
            self.logger.error("the model is saved, but not pushed: %s", error)

    def _write_model(self, folder: str) -> None:
        if self._state_to_save is not None:  # a checkpoint's
            self._save(folder, state_dict=self._state_to_save)
            return
        stop_if_requested(self)
        self.prepare()
        with self.holding_evaluation_weights(), self.use_cache.original(self.model):
            state = self.strategy.full_state_dict(self.model_wrapped)
            # The state of a sharded model is on rank 0 alone. An override may exchange between ranks.
            is_own, writes = self.overrides("_save"), self.strategy.rank == 0 or (self.args.should_save and state)

            def write() -> None:
                if writes or is_own:
                    self._save(folder, state_dict=state)

            overrides.run_on_all("the model was not saved", write, self.strategy, exchanges=is_own)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the Hub repository that the arguments name, unless it exists; `push_to_hub=True` does so by itself.

        Args:
            token: access token, in place of the arguments' `hub_token`, for this call only.
            private: whether the repository is private, in place of `hub_private_repo`.

        Raises:
            tr_core.plugins.PluginError: the package that pushes is not installed.
        """
        given, token = _Hidden(token), None
        stop_if_requested(self)
        if not self.is_world_process_zero():
            return
        hub = saving.find_hub(self.callback_handler.callbacks, self.args)
        hub.repository.but(token=given.value, private=private).make()

    def _push(
        self,
        message: str,
        blocking: bool = True,
        token: _Hidden | None = None,
        revision: str | None = None,
        private: bool | None = None,
    ) -> Any:
        if not self.is_world_process_zero():
            return None
        hub = saving.find_hub(self.callback_handler.callbacks, self.args)
        elsewhere = {}
        if (token and token.value) or revision is not None or private is not None:
            repository = hub.repository.but(token=token and token.value, revision=revision, private=private)
            elsewhere["repository"] = repository
        return hub.push_to_hub(self.args.output_dir, commit_message=message, blocking=blocking, **elsewhere)

    def _trained_run(self) -> TrainedRun:
        args = self.args
        return TrainedRun(
            args,
            self.state,
            self.model,
            self.optimizer,
            self.train_dataset if self.eval_dataset is None else self.eval_dataset,
            self.strategy.world_size,
            self.get_total_train_batch_size(args),
            args.load_best_model_at_end and not self.lacks_best_weights,
        )

    def _save_to_push(self) -> None:
        # An override of save_model may have any signature, and calls the one above, which must not push again.
        with assigned(self, _is_saving_to_push=True):
            self.save_model()

    # Optimizer and schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Build the optimizer and the schedule, unless the user passed them."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimizer that the arguments name and keep it as `self.optimizer`, unless there is one.

        Args:
            model: the model whose parameters it gets; by default the Trainer's model.
        """
        self.prepare()
        if self.optimizer is None:
            model = self.model if model is None else model
            kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            rules = read_rules(self.args.parameter_rules, options.get("lr", self.args.learning_rate))
            decayed = self.get_decay_parameter_names(model)
            decayed, names = self._decayed_of_whole.union(decayed), self._names_of_whole
            groups = parameter_groups(model, self.args.weight_decay, decayed, rules, names)
            with self.chosen.building():
                self.optimizer = build_optimizer(kind, options, groups, rules)
            self.chosen.note_optimizer(self.optimizer, model, self.args)
        return self.optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> Factory:
        """Return the factory of the optimizer that the arguments name, and its keyword arguments.

        Its first argument is the parameter groups. An override may return any class of optimizers.

        Args:
            args: the training arguments.
            model: for optimizers whose choice of parameters depends on it, and for overrides.
        """
        return optimizer_factory(args, model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Build the schedule that the arguments name and keep it as `self.lr_scheduler`, unless there is one.

        Args:
            num_training_steps: optimizer steps of the run.
            optimizer: the optimizer whose learning rates it sets; by default `self.optimizer`.
        """
        optimizer = self.optimizer if optimizer is None else optimizer
        if self.lr_scheduler is None:
            if optimizer is None:
                raise ValueError("a schedule needs an optimizer; call create_optimizer first, or give one")
            options = dict(self.args.lr_scheduler_kwargs or {})
            if self.args.lr_scheduler_type in FOLLOW_METRIC:
                options.setdefault("mode", "max" if self.args.greater_is_better else "min")
            self.chosen.before_schedule(optimizer)
            with self.chosen.building():
                self.lr_scheduler = get_scheduler(
                    self.args.lr_scheduler_type,
                    optimizer,
                    num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                    num_training_steps=num_training_steps,
                    scheduler_specific_kwargs=options,
                )
            self.chosen.note_schedule(self.lr_scheduler, optimizer, self.args)
        return self.lr_scheduler

    @property
    def has_given_optimizer(self) -> bool:
        """Whether the optimizer was passed to the Trainer, or assigned."""
        return self.chosen.optimizer is not None

    @property
    def has_given_schedule(self) -> bool:
        """Whether the schedule was passed to the Trainer, or assigned."""
        return self.chosen.schedule is not None

    def renew_optimizer(self, num_training_steps: int) -> tuple[torch.optim.Optimizer, LRScheduler]:
        """Set the optimizer and the schedule of a new run: the user's own, or new ones (see `ChosenOptimizer`)."""
        with self.chosen.building():
            self.optimizer, self.lr_scheduler = self.chosen.to_train_with(
                self.optimizer, self.lr_scheduler, self.model, self.args
            )
            self.create_optimizer_and_scheduler(num_training_steps=num_training_steps)
        if self.optimizer is None or self.lr_scheduler is None:
            raise ValueError(
                "create_optimizer_and_scheduler left self.optimizer or self.lr_scheduler None; it must set both"
            )
        if self.has_given_optimizer and not self.strategy.binds_optimizer:
            check_given_parts_fit(self.model, self.optimizer, None)
        self.chosen.begin(self.optimizer, self.lr_scheduler)
        if self.args.parameter_rules:
            # Also if a subclass built the optimizer: without this, rules that it ignores would have no effect.
            rules = read_rules(self.args.parameter_rules, self.args.learning_rate)
            check_applied(self.optimizer, rules)
        return self.optimizer, self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that weight decay applies to: no biases, no scales of norms."""
        return decay_parameter_names(model)

    def get_num_trainable_parameters(self) -> int:
        """Count the trainable weights, of all ranks where they are sharded: the numbers that training changes."""
        return sum(size for size, is_trained in sizes_of(self.model) if is_trained)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of one optimizer step: micro-batch, times accumulation, times processes."""
        return args.train_batch_size * args.gradient_accumulation_steps * replicas(args, self.strategy.data)

    def get_learning_rates(self) -> list[float]:
        """Return the current learning rate of each parameter group."""
        return [group["lr"] for group in self._current_optimizer().param_groups]

    def get_optimizer_group(self, param: torch.Tensor | None = None) -> Any:
        """Return the parameter group that holds `param`, or the list of the parameters of every group.

        Raises:
            ValueError: the optimizer does not have the parameter.
        """
        groups = self._current_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        for group in groups:
            if any(param is member for member in group["params"]):
                return group
        raise ValueError(
            f"no parameter group holds this tensor of shape {tuple(param.shape)}; give a trainable parameter of the "
            "model, as trainer.model.get_parameter(name) returns it"
        )

    def _current_optimizer(self) -> torch.optim.Optimizer:
        # An override of create_optimizer may build another one in each call.
        return self.create_optimizer() if self.optimizer is None else self.optimizer

    # Search

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float | Sequence[float]] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | None = None,
        hp_name: Callable[[Any], str] | None = None,
        *,
        resume: bool = False,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train once for every trial, and return the best by its last evaluation in training.

        Every trial has a new model from `model_init`, and its own folder `run-<number>` in `output_dir`. If training
        runs no evaluation, one runs at its end. Afterwards the arguments are restored, and the model is that of the
        last trial. To get the best model, set `best.hyperparameters` and train. The search keeps its trials in
        `study.journal`, a journal of Optuna's. Another search in the same `output_dir` has its own folder in it,
        `search-2` and so on.

        With several processes rank 0 draws the trials, and all ranks run each trial together.

        Args:
            hp_space: `(trial)` → dict of training arguments, from `trial.suggest_float`, `suggest_int` and
                `suggest_categorical`. Values are converted to the arguments' types. By default learning rate, epochs,
                seed and batch size.
            compute_objective: `(metrics)` → number, or one for each direction. By default the evaluation loss, or the
                sum of the other metrics if there are any.
            n_trials: trials of the search, including those of an earlier call.
            direction: `minimize` or `maximize`, or a list for several objectives.
            backend: how Optuna draws the trials: `random`, the default; `grid`, every point once; `optuna`, by a
                sampler that learns from earlier trials, or your own, with pruning.
            hp_name: `(trial)` → name of the trial, for `state.trial_name`.
            resume: resume the newest search in `output_dir`, if there is one. Finished trials do not run again, and an
                interrupted trial resumes from its newest checkpoint.
            **kwargs: for every backend `timeout` (seconds after which no trial begins), `catch` (exceptions that fail a
                trial and not the search) and `gc_after_trial`. For `random` the `seed` (by default that of the
                arguments). For `grid` the number of `points` in a range without steps. For `optuna` the arguments of
                `optuna.create_study`, as `sampler` and `pruner`; with a `storage` the trials are kept there.

        Returns:
            The best trial. With several directions: all trials that no other trial beats. The same on every rank.

        Raises:
            ValueError: something needed is missing or wrong; raised before the first run if possible.
            ImportError: Optuna is not installed.
        """
        directions = [direction] if isinstance(direction, str) else list(direction)
        self._check_search(directions, n_trials)
        stop_if_requested(self, trains=True)
        plan = SearchPlan.from_options(hp_space, compute_objective, directions, n_trials, hp_name, kwargs)
        search = Search(self, plan, backend, kwargs)
        with assigned(self, search=search):
            return search.run(resume)

    def _check_search(self, directions: list[str], n_trials: int) -> None:
        check_search(
            self.args,
            directions,
            n_trials,
            has_model_init=self.model_init is not None,
            has_eval_data=self.eval_dataset is not None or self.overrides("get_eval_dataloader"),
            has_own_checkpointer=self.has_own_checkpointer,
        )

    def report_trial(self, metrics: dict[str, float]) -> None:
        """Report the metrics of an evaluation during training to the search, if any.

        Raises:
            tr_core.search.TrialPrunedError: the search ends the trial here.
        """
        if self.search is not None and self.trial is not None:
            self.search.report(metrics)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report the metrics of an evaluation to a search; without one do nothing."""
        self.report_trial(metrics)

    def trial_state(self) -> dict[str, Any]:
        """Return the state's fields about the trial of a run; empty outside of a search."""
        if self.trial is None:
            return {}
        name, params = None, self.trial if isinstance(self.trial, Mapping) else getattr(self.trial, "params", {})
        if self.search is not None:
            name, params = self.search.record.name, self.search.record.hyperparameters
        return {"is_hyper_param_search": True, "trial_name": name, "trial_params": dict(params)}

    def forget_model(self) -> None:
        """Free the device memory of the model and its optimizer; the next run builds a new model.

        Without this, memory would hold the weights of two trials and the moments of the earlier one at once.
        """
        self._model_is_fresh = False
        self._set("optimizer", self.chosen.optimizer)
        self._set("lr_scheduler", self.chosen.schedule)
        if self._is_prepared and self.strategy.device.type != "cpu" and not is_left_in_place(self.model):
            self.model_wrapped, self._prepared = self.model.to("cpu"), None

    def current_checkpointer(self) -> Checkpointer | None:
        """Return the checkpointer, if one was passed or built already."""
        return self._checkpointer

    def exchange_checkpointer(self, checkpointer: Checkpointer | None) -> Checkpointer | None:
        """Replace the checkpointer and return the old one; None builds one later from the arguments."""
        before, self._checkpointer = self._checkpointer, checkpointer
        self._checkpointer_made_of = None
        return before

    # Hooks of transformers, called where it calls them

    # Processes

    def create_accelerator_and_postprocess(self) -> None:
        """Prepare what accelerate's functions need; called at construction, once the processes are known.

        Libraries that subclass the Trainer call them, and rely on the `Accelerator` that transformers builds.
        """
        state = sys.modules.get("accelerate.state")
        if state is not None and type(self) is not self.own_class and not state.is_initialized():
            sys.modules["accelerate"].Accelerator(cpu=self.args.use_cpu)

    def get_tp_size(self) -> int:
        """Return over how many processes the strategy divides matrices."""
        return self.strategy.sizes.get("tp_size", 1)

    def get_sp_size(self) -> int:
        """Return over how many processes the strategy divides sequences, exchanging heads in attention."""
        return self.strategy.sizes.get("sp_size", 1)

    def get_cp_size(self) -> int:
        """Return over how many processes the strategy divides sequences, with attention in a ring."""
        return self.strategy.sizes.get("cp_size", 1)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move a model to a device, unless its loader placed it; an override is called before a model is first used."""
        place_on_device(model, device)

    # Steps

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return a batch on the device; an override may build the inputs of the model from it."""
        return self._prepare_input(inputs)

    def _prepare_input(self, data: Any) -> Any:
        """Return a part of a batch on the device. An override is called for each, inside mappings, lists and tuples."""
        if isinstance(data, Mapping | list | tuple) and self.overrides("_prepare_input"):
            return map_items(self._prepare_input, data)
        return to_device(data, self.strategy.device)

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Any) -> tuple[Callable[[], Any], Any]:
        """Return what opens a block for loss and backward, here without effect, and the batch for it."""
        return nullcontext, inputs

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients to `max_grad_norm`, and return their norm before that, on the device."""
        limit = self.args.max_grad_norm
        optimizer = cast("torch.optim.Optimizer", self.optimizer)
        return self.strategy.clip_grad_norm(model, optimizer, limit if limit and limit > 0 else None)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Join tensors of all processes along their first dimension. Collective."""
        return gather_tree(tensors, self.strategy.data, None)

    # Data

    def _set_signature_columns_if_needed(self) -> None:
        """Set `_signature_columns`, the columns that a collator sees, unless they are set; None shows all."""
        if self._signature_columns is None:
            self._signature_columns = kept_columns(self.model, self.label_names)

    def _shown_columns(self) -> list[str] | None:
        columns = self._signature_columns
        if columns is None:
            self._set_signature_columns_if_needed()
            columns = self._signature_columns
            if not self.overrides("_set_signature_columns_if_needed"):
                self._signature_columns = None  # found again for each loader: the model may be another one
        return columns

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Return a dataset of the library `datasets` without the columns that the model does not take."""
        columns = self._shown_columns() if self.args.remove_unused_columns else None
        names = getattr(dataset, "column_names", None)
        if columns is None or not names or not hasattr(dataset, "remove_columns"):
            return dataset
        return dataset.remove_columns([name for name in names if name not in columns])

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """Return a collator that sees only the columns that the model takes."""
        if not self.args.remove_unused_columns:
            return data_collator
        return keeping_columns(data_collator, self._shown_columns(), self.model, self.logged_columns)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: Any = None,
    ) -> SeededLoader:
        """Build a loader of this rank's batches.

        Args:
            dataset: map-style or iterable data.
            description: what the data are for.
            batch_size: samples of a batch of this process.
            sampler_fn: `(dataset)` → a sampler, or None for the order of the arguments.
            is_training: whether the data are in the seeded order of training, not in their own.
            dataloader_key: a name under which a loader with persistent workers is kept.
        """
        if self.overrides("_remove_unused_columns"):
            dataset = self._remove_unused_columns(dataset, description=description)
        sampler = None if sampler_fn is None else call_sampler_method(sampler_fn, dataset)
        collate = self._get_collator_with_removed_columns(self.data_collator, description=description)
        given = (dataset, collate, self.args, self.strategy.data)
        if is_training:
            name = main_input_name(self.model, self.processing_class)
            return train_loader(*given, name, sampler=sampler, batch_size=batch_size)
        build = partial(eval_loader, *given, sampler=sampler, batch_size=batch_size)
        if dataloader_key is None:
            return build()
        return self.kept_loaders.get((dataloader_key, batch_size), (dataset, self.data_collator, self.model), build)

    # Checkpoints

    def save_checkpoint(self, run: Any) -> None:
        """Save everything that the run needs to resume from here; pushes begin first. Collective."""
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            self.fire("on_push_begin")
        if self.overrides("_save_checkpoint"):
            folder = self.checkpointer().path(self.state.global_step)
            self._begun_folder = None if folder.exists() else folder  # the override may make it, and write files
        with assigned(self, _saved_run=run):
            self._save_checkpoint(self.model_wrapped, self.trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint of the current step; called by the run. Collective."""
        if self._saved_run is None:
            raise RuntimeError(
                "_save_checkpoint was called outside a save of the run; set control.should_save in a callback, or call "
                "save_model(folder)"
            )
        try:
            if self.has_own_layout or self.overrides("_save_checkpoint", *_SAVED_BESIDE):
                self._save_with_own_files()
            else:
                saving.save_checkpoint(self._saved_run, self._save_companions)
            if self.args.push_to_hub and self.overrides("_push_from_checkpoint"):
                checkpointer = self.checkpointer()
                checkpointer.wait()
                self._push_from_checkpoint(str(checkpointer.path(self.state.global_step)))
        finally:
            self._state_to_save = None
            self._begun_folder = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: the Hub's callback pushes. An override is called for each checkpoint with `push_to_hub`."""

    @property
    def has_own_layout(self) -> bool:
        """Whether an override writes the model's files, also those of checkpoints."""
        return self.overrides("_save", "save_model")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: every checkpoint holds both. The files that an override writes are part of it."""
        self._check_is_saving("_save_optimizer_and_scheduler")

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: every checkpoint holds it. The files that an override writes are part of it."""
        self._check_is_saving("_save_scaler")

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: every checkpoint holds it. The files that an override writes are part of it."""
        self._check_is_saving("_save_rng_state")

    def _check_is_saving(self, name: str) -> None:
        if not self._is_saving_beside:
            raise RuntimeError(
                f"{name} was called outside a save, as by a copy of transformers' _save_checkpoint, and would write "
                "nothing: call super()._save_checkpoint(model, trial) in place of the copy, and write other files "
                "before or after it"
            )

    def _save_with_own_files(self) -> None:
        name, run = self.checkpointer().path(self.state.global_step).name, self._saved_run
        folder = Path(self.args.output_dir, overrides.FOLDER, name)
        with ExitStack() as saved:
            with self.optimizer_in_evaluation():  # the weights that the checkpoint holds
                if self.has_own_layout:
                    self._state_to_save = self.strategy.full_state_dict(self.model_wrapped)
                files = overrides.written_files(
                    folder, self._save_own_files, self.strategy, writes=self.args.should_save
                )
                move = saved.enter_context(files)

            def write(into: Path) -> None:
                if not self.has_own_layout:
                    self._save_companions(into)
                move(into)

            with overrides.set_aside(self._begun_folder if self.args.should_save else None, folder):
                saving.save_checkpoint(run, write)

    def _save_own_files(self, folder: Path) -> None:
        if self._begun_folder is not None and self._begun_folder.is_dir() and self.args.should_save:
            shutil.copytree(self._begun_folder, folder, dirs_exist_ok=True)
        if self.overrides("save_model"):
            internal = {"_internal_call": True} if takes_argument(self.save_model, "_internal_call") else {}
            self.save_model(str(folder), **internal)
        elif self.overrides("_save"):
            self._save(str(folder), state_dict=self._state_to_save)
        with assigned(self, _is_saving_beside=True):
            for name in () if self.args.save_only_model else _SAVED_BESIDE:
                if self.overrides(name):
                    getattr(self, name)(str(folder))

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        """Write weights, configuration and tokenizer into a folder, on the main process; called on all."""
        if not self.args.should_save:
            return
        state = dict(self._state_to_save or self.model.state_dict() if state_dict is None else state_dict)
        saving.save_model(self.model, state, Path(output_dir or self.args.output_dir), self._save_companions)

    def _get_output_dir(self, trial: Any = None) -> str:
        """Return the folder of the checkpoints, for `trial` of a search."""
        return str(self.args.output_dir)

    @property
    def loads_model_first(self) -> bool:
        """Whether an override loads the model of a resume before there is an optimizer, as under transformers."""
        strategy = self.strategy
        is_divided = strategy.binds_optimizer or strategy.forward_is_collective
        return self.overrides("_load_from_checkpoint") and not is_divided

    def load_model(self, resume: Resume) -> Restored | None:
        """Have an override load the model of a checkpoint, and return that; None if `auto` found none."""
        found = find_checkpoint(self.checkpointer(), self.args.output_dir, resume)
        if found.step is None:
            return None
        folder = str(found.source)
        with assigned(self, _found_at={folder: source_of(resume) or folder}):
            self._load_from_checkpoint(folder)
        self.prepare()  # it may have put modules into the model
        return found

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint, and nothing else. Collective; a resume calls an override of this.

        Raises:
            ValueError: there is no checkpoint, or `model` is not the Trainer's.
        """
        if "_load_from_checkpoint" in self._loadings:
            self._loadings["_load_from_checkpoint"].load()
            return
        wrapped = self.prepare()
        if model is not None and model is not self.model and model is not wrapped:
            raise ValueError(
                f"_load_from_checkpoint loads into trainer.model; this {type(model).__name__} is another model: call "
                "its load_state_dict"
            )
        source = self._found_at.get(resume_from_checkpoint, resume_from_checkpoint)
        restore_parts(self.checkpointer(), readable_model_parts(self.strategy, self.model, wrapped), source)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both from the checkpoint that a resume has read; called by a resume, if it is overridden."""
        if "_load_optimizer_and_scheduler" in self._loadings:
            self._loadings["_load_optimizer_and_scheduler"].load()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Log the names that were missing or unexpected when an override loaded weights by itself."""
        for word in ("missing", "unexpected"):
            if names := getattr(load_result, f"{word}_keys"):
                self.logger.warning("the loaded weights have %s names: %s", word, ", ".join(names))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: a resume has restored the generators when it calls this, for overrides that load more."""

    @contextmanager
    def loading(self, optimizer: Any, schedule: Any) -> Iterator[Callable[[str], None]]:
        """Return a block for a resume, with what calls the overrides of the methods above afterwards."""
        parts = {
            **({} if self.loads_model_first else {"_load_from_checkpoint": {"the model": self.model}}),
            "_load_optimizer_and_scheduler": {"the optimizer": optimizer, "the schedule": schedule},
            "_load_rng_state": {},
        }
        can_put_back = not self.strategy.binds_optimizer
        loadings = {
            name: OwnLoading(name, held, can_put_back=can_put_back)
            for name, held in parts.items()
            if self.overrides(name)
        }
        with assigned(self, _loadings=loadings):
            yield self._load_by_overrides

    def _load_by_overrides(self, folder: str) -> None:
        for name, loading in self._loadings.items():
            loading.put_back()
            getattr(self, name)(folder)
            if name != "_load_rng_state":
                loading.check()

    # Hooks around a step

    # Batches

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Take the batches of a step, and count their targets.

        Args:
            epoch_iterator: the batches of this rank, on the device.
            num_batches: how many to take.
            device: where the count is.
        """
        batches = list(islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | None:
        """Count the targets of a step over all ranks, those of this rank in an evaluation; None if nothing counts."""
        if not self.loss_rule.counts:
            return None
        taken = [] if self._asked is None or self.is_in_evaluation else self._asked.taken
        if len(taken) == len(batch_samples):  # a filler sample belongs to another rank, which counts it
            batch_samples = [inputs for inputs, batch in zip(batch_samples, taken, strict=True) if batch.weight > 0]
        return self.loss_rule.count_all(batch_samples, over_ranks=not self.is_in_evaluation)

    def taking(self) -> TakeBatches | None:
        """Return what takes the batches of a step by an override; None if there is none."""
        return self._take if self.overrides(_BATCHES, _COUNT) else None

    def _take(self, batches: AskedBatches, size: int) -> tuple[list[MicroBatch], torch.Tensor | None]:
        batches.begin_step(size)
        device = self.strategy.device
        with assigned(self, _asked=batches):
            inputs, count = self.get_batch_samples(batches, size, device)
        return batches.returned(inputs), None if count is None else torch.as_tensor(count, device=device).reshape(())

    # After a step

    def after_step(self) -> Callable[[Any], None] | None:
        """Return what runs what is due after a step by an override; None if there is none."""
        return self._run_due if self.overrides(_AFTER) else None

    def _run_due(self, _: object) -> None:
        """Call the override. It may change the sum of losses in place, and may run what is due itself.

        A checkpoint that it saves holds the sum as the override left it.
        """
        run = self._run_that_calls(_AFTER)
        control, window, position = self.control, run.window, run.position
        if control.should_log or control.should_evaluate or control.should_save:
            run.updates.check()
        loss, began_s = window.loss_sum.clone(), time.time() - (time.perf_counter() - window.start_s)
        window.loss_sum, unchanged = loss, loss._version  # changed in place: a tensor that no one else has
        ended = position.is_at_epoch_end and position.samples == 0  # the position is in the next epoch then
        self._has_run_due = False
        with assigned(self, _saved_run=run):
            self._maybe_log_save_evaluate(
                loss,
                window.grad_norm,
                self.model_wrapped,
                self.trial,
                position.epoch - ended,
                run.ignore_keys,
                began_s,
                learning_rate=float(window.learning_rate),
            )
        if loss._version != unchanged:
            window.loss_sum = loss
        control = self.control  # it may have been replaced
        is_last = run.is_epoch_complete() or control.should_epoch_stop or control.should_training_stop
        if not self._has_run_due and (position.is_at_epoch_end or not is_last):
            # What it left undone is due again at the end of the epoch, but not after the next step.
            control.should_log = control.should_evaluate = control.should_save = False

    def _maybe_log_save_evaluate(  # noqa: PLR0917  the order of transformers
        self,
        tr_loss: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save, where they are due; called by the run after each step.

        Raises:
            RuntimeError: no run is calling.
        """
        run = self._run_that_calls(_AFTER)
        window = run.window
        step = window.last_logged_step
        if self.control.should_log and self.state.global_step > step:  # what is passed on is for this log alone
            window.loss_sum = tr_loss
            if grad_norm is not None:
                window.grad_norm = torch.as_tensor(grad_norm, device=tr_loss.device)
            if learning_rate is not None:
                window.learning_rate = learning_rate
        self._has_run_due = True
        with assigned(run, ignore_keys=ignore_keys_for_eval):
            log_evaluate_save(run)
        if window.last_logged_step != step:
            tr_loss.zero_()

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate for the run, report to a search, and step a schedule that follows a metric.

        Raises:
            RuntimeError: no run is calling.
        """
        return evaluate_and_report(self._run_that_calls("_evaluate"), ignore_keys_for_eval, steps=not skip_scheduler)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Record the metric that chooses the best model, and return whether this evaluation is the best so far."""
        return record_best(self.args, self.state, metrics)

    def store_flos(self) -> None:
        """Add the floating-point operations and tokens since the last log to the state. Collective."""
        if (run := self.current_run) is not None:
            window = run.window
            own: Any = {"flops": window.flops, "tokens": 0 if window.tokens is None else window.tokens.take()}
            window.flops = 0.0
            store_counts(self.state, self.strategy.data.gather_objects(own))

    def _get_learning_rate(self) -> float:
        """Return the learning rate of the first parameter group."""
        return float(cast("torch.optim.Optimizer", self.optimizer).param_groups[0]["lr"])

    @property
    def _globalstep_last_logged(self) -> int:
        return 0 if self.current_run is None else self.current_run.window.last_logged_step

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, step: int) -> None:
        self._run_that_calls("_globalstep_last_logged").window.last_logged_step = step

    @property
    def _total_loss_scalar(self) -> float:
        return 0.0 if self.current_run is None else self.current_run.window.logged_loss

    @_total_loss_scalar.setter
    def _total_loss_scalar(self, loss: float) -> None:
        self._run_that_calls("_total_loss_scalar").window.logged_loss = loss

    # The run

    def _run_that_calls(self, name: str) -> Run:
        if self.current_run is None:
            raise RuntimeError(
                f"{name} was used outside of training; it belongs to a run, which train() begins and ends: use it in "
                "an override that the run calls, as _maybe_log_save_evaluate"
            )
        return self.current_run


# Attributes whose assignment does more than keep the value -> the method that does it.
_ASSIGN = {
    "args": "_assign_args",
    "callback_handler": "_assign_handler",
    "model": "_assign_model",
    "strategy": "_assign_strategy",
}


def _same_parts(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    return len(first) == len(second) and all(a is b or a == b for a, b in zip(first, second, strict=True))


Trainer.own_class = Trainer


def _named(name: str, datasets: Any) -> Any:
    known = datasets if isinstance(datasets, dict) else {}
    if name not in known:
        names = ", ".join(map(repr, known)) or "none, as eval_dataset is not a dict"
        raise ValueError(f"there is no evaluation data set named {name!r}; those of this Trainer are: {names}")
    return known[name]


class _Hidden:
    """Keep a token out of displays of local variables."""

    def __init__(self, value: str | None) -> None:
        self.value = value
