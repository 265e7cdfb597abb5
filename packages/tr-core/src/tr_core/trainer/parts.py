"""Build the parts of a Trainer: model, strategy, callbacks, checkpointer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tr_args import TrainingArguments
from tr_args.serialization import make_folders_absolute
from tr_core.callback import CallbackList, adopted
from tr_core.callbacks.defaults import default_callbacks
from tr_core.callbacks.evaluation_weights import OptimizerMode
from tr_core.capture.conditions import check_step_compile
from tr_core.changes import ACTS_NEXT_STEP, TAKEN_AT_BEGIN, check_as_built, check_same_process, values_when_built
from tr_core.checkpoint import saving
from tr_core.choose_strategy import log_launcher_settings, usable_strategy
from tr_core.collators import DataCollatorWithPadding, default_data_collator
from tr_core.data.limits import dev_run_arguments
from tr_core.data.loaders import LoaderCache
from tr_core.evaluation.metrics import StreamingMetric
from tr_core.loss import LabelSmoother, LossRule, StepScope
from tr_core.model_io import FlopCounter, base_model, can_return_loss, find_label_names
from tr_core.preflight.requested import requested
from tr_core.protocols import Checkpointer, Strategy
from tr_core.random_state import RandomState, separate_randomness
from tr_core.results import EvalLoopOutput, TrainOutput
from tr_core.runtime.compilation import Compilation, apply_liger_kernel
from tr_core.runtime.memory import MemoryMeter
from tr_core.runtime.run_context import UseCache
from tr_core.search.trial import takes_trial
from tr_core.signatures import is_overridden, one_of_two_names, takes_argument, with_count
from tr_core.state import EventContext, TrainerControl, TrainerState
from tr_core.trainer.chosen_optimizer import ChosenOptimizer
from tr_core.trainer.refused_hooks import refuse_unknown_hooks
from tr_core.validation import (
    check_args,
    check_data,
    check_evaluation,
    check_given_optimizers,
    check_given_parts_fit,
    check_label_names,
    check_model,
    check_options,
    refuse_unsupported,
)
from tr_log import get_logger
from tr_log.loggers import configure_process


class TrainerParts:
    """Hold the parts of a run.

    `Trainer` documents the constructor's arguments, and adds the methods that use the parts.
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
    # Methods of the other parts.
    training_step: Callable[..., torch.Tensor]
    step_of: Callable[..., Callable[..., torch.Tensor]]
    compute_loss: Callable[..., Any]
    compute_loss_context_manager: Callable[..., AbstractContextManager[object]]
    create_optimizer: Callable[..., torch.optim.Optimizer]
    create_scheduler: Callable[..., LRScheduler]
    declared_loss_kwargs: Callable[..., bool | None]
    evaluate: Callable[..., dict[str, float]]
    event_context: Callable[..., EventContext]
    training_context: Callable[..., AbstractContextManager[None]]
    evaluation_loop: Callable[..., EvalLoopOutput]
    get_num_trainable_parameters: Callable[..., int]
    get_total_train_batch_size: Callable[..., int]
    get_train_dataloader: Callable[..., Any]
    train: Callable[..., TrainOutput]
    create_accelerator_and_postprocess: Callable[..., None]
    save_model: Callable[..., None]
    optimizer_in_evaluation: Callable[..., AbstractContextManager[None]]
    place_model_on_device: Any
    _move_model_to_device: Callable[..., object]
    _save_companions: Callable[..., None]
    _get_output_dir: Callable[..., str]
    _checkpointer_made_of: dict[str, Any] | None = None

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
        self.args = dev_run_arguments(self.args.check())  # again: they may have changed since their construction
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
        check_data(args, self.train_dataset, self.eval_dataset, self.overrides)
        check_label_names(args, self.model, self.loss_function is not None, computes_loss)
        check_options(args, self.strategy)
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

    def prepare(self) -> nn.Module:
        """Apply assignments, prepare the model with the strategy if needed, and return it wrapped.

        The strategy prepares the model again if its modules or parameters were replaced.

        Raises:
            ValueError: an argument changed that the Trainer was built with, arguments contradict each other now, or
                the strategy cannot apply the replacement.
        """
        if self.model is None:
            raise ValueError("trainer.model is None; assign a model before it is trained, evaluated or saved")
        if self._is_built:
            self._settle_arguments()
        if self._prepared != (now := self._structure()):
            if self.args.use_liger_kernel and not self._is_prepared:
                apply_liger_kernel(self.model, self.args.liger_kernel_config)
            if not self._is_prepared and self.overrides("_move_model_to_device") and self.place_model_on_device:
                self._move_model_to_device(self.model, self.strategy.device)
            self.model_wrapped = self.strategy.prepare(self.model)
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

    def _settle_arguments(self) -> None:
        args = self.args
        if args.num_assignments != self._settled_assignments:
            make_folders_absolute(args.check())
            check_as_built(args, self._built_with)
            refuse_unsupported(args)
            self._settled_assignments = args.num_assignments
        self._derive()

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
                self._set("has_assignments", True)
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
        args.check()
        args = dev_run_arguments(args)
        refuse_unsupported(args)
        check_as_built(args, self._built_with)
        self._set("args", args)
        self._settled_assignments = args.num_assignments
        self._bind_process()
        self._derive()

    def _checked_loss_func(self) -> Callable[..., torch.Tensor] | None:
        """Return `compute_loss_func`; what is no function says, as in the reference, that `compute_loss` divides."""
        given = self.compute_loss_func
        if given is None or callable(given):
            return given
        if not self.overrides("compute_loss"):
            raise TypeError(
                f"compute_loss_func = {given!r} is a {type(given).__name__}; it must be a function (outputs, labels, "
                "num_items_in_batch=) that returns the loss, or None"
            )
        self._set("loss_is_scaled_for_ga", True)
        return None

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
            self.loss_function = self._checked_loss_func()
            if args.label_smoothing_factor and self.compute_loss_func is None:
                self.loss_function = LabelSmoother(args.label_smoothing_factor, inner)
            self.loss_rule = LossRule(
                inner,
                self.loss_function,
                self.strategy,
                average_tokens_across_devices=averages,
                declared=self.declared_loss_kwargs,
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

    def _bind_process(self) -> None:
        strategy = self.strategy
        place = {"rank": strategy.rank, "local_rank": strategy.local_rank, "world_size": strategy.world_size}
        make_folders_absolute(self.args).bind(device=strategy.device, **place)
        configure_process(self.args, rank=strategy.rank, world_size=strategy.world_size)

    def _default_collator(self) -> Callable[[list[Any]], Any]:
        pads = hasattr(self.processing_class, "pad")
        return DataCollatorWithPadding(self.processing_class) if pads else default_data_collator


# Attributes whose assignment does more than keep the value -> the method that does it.
_ASSIGN = {
    "args": "_assign_args",
    "callback_handler": "_assign_handler",
    "model": "_assign_model",
    "strategy": "_assign_strategy",
}

# Python shows this name in its errors: it must be the class that a user wrote, not its base class.
TrainerParts.__init__.__qualname__ = "Trainer.__init__"


def _same_parts(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    return len(first) == len(second) and all(a is b or a == b for a, b in zip(first, second, strict=True))
