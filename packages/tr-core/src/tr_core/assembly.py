"""Assemble what a run is made of: model, strategy, callbacks, checkpointer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tr_args import TrainingArguments
from tr_log import configure, get_logger

from tr_core import saving
from tr_core.best import watched_metric
from tr_core.callback import CallbackList
from tr_core.checks import check_model, check_setup, refuse_unsupported
from tr_core.collators import DataCollatorWithPadding, default_data_collator
from tr_core.default_callbacks import default_callbacks
from tr_core.floating_point import FlopCounter
from tr_core.loss import LossRule, takes_argument
from tr_core.model_inputs import base_model, can_return_loss, find_label_names
from tr_core.protocols import Checkpointer, Strategy
from tr_core.randomness import RandomState, separate_randomness
from tr_core.state import TrainerControl, TrainerState
from tr_core.strategies import choose_strategy

if TYPE_CHECKING:
    from tr_core.run import Run
    from tr_core.trainer import Trainer


class Assembly:
    """What a run is made of; see `tr_core.trainer.Trainer`, which adds what is done with it.

    Args:
        model: any module; its forward takes a batch (by keywords if batches are mappings) and returns its loss.
        args: the training arguments; default ones write to `trainer_output`.
        data_collator: makes a batch of a list of samples; by default pads with `processing_class` if that can pad,
            else stacks.
        train_dataset: map-style or iterable data.
        eval_dataset: likewise, or a dict of several.
        processing_class: a tokenizer or processor, saved with the model; `tokenizer` is the same.
        model_init: makes a new model for every call of `train`, in place of `model`.
        compute_loss_func: `(outputs, labels, num_items_in_batch=)` → loss, in place of the model's own.
        compute_metrics: `(EvalPrediction)` → dict of metrics.
        callbacks: callbacks or their classes; `callback` is the same.
        optimizers: an optimizer and a schedule to use; None has the arguments decide.
        preprocess_logits_for_metrics: `(logits, labels)` → what is kept of each evaluation batch.
        strategy: where and how to compute; by default what the arguments and the launcher say.
        checkpointer: where checkpoints go; by default what the arguments name.

    Building one changes no random number generator and moves no model: that happens in `train` and `evaluate`.

    Raises:
        ValueError: arguments ask for what is not there.
        NotImplementedError: arguments ask for what this version does not do.
    """

    logger = get_logger("tr_core.trainer")

    def __init__(  # noqa: PLR0917  the documented order
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, LRScheduler | None] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        callback: Sequence[Any] | None = None,
        strategy: Strategy | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        check_model(model, model_init)
        self.args = args if args is not None else TrainingArguments()
        refuse_unsupported(self.args)
        self.strategy: Strategy = strategy if strategy is not None else choose_strategy(self.args)
        self._bind_process()
        self.processing_class = _same("processing_class", processing_class, "tokenizer", tokenizer)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.data_collator = data_collator if data_collator is not None else self._default_collator()
        self.model_init, self._model_is_fresh = model_init, True
        self._take_model(model if model is not None else self.call_model_init())
        self._given_optimizers = optimizers
        self.optimizer, self.lr_scheduler = cast("tuple[torch.optim.Optimizer, LRScheduler]", optimizers)
        self._checkpointer = checkpointer
        self.random_state = RandomState(self.strategy.device)
        self.control = TrainerControl()
        self.state = TrainerState(
            is_local_process_zero=self.strategy.local_rank == 0, is_world_process_zero=self.strategy.rank == 0
        )
        self.is_in_train, self.micro_batches_in_step, self.micro_batch_weight = False, 1, 1.0
        given = _same("callbacks", callbacks, "callback", callback) or ()
        self.callback_handler = CallbackList([*default_callbacks(self.args), *given])
        self.loaders: dict[str, Any] = {"train_dataloader": None, "eval_dataloader": None}
        check_setup(cast("Trainer", self))
        self.fire("on_init_end")

    # What the model is, and where it is

    def call_model_init(self) -> nn.Module:
        """Make a model with `model_init`, from the seed alone: the same on every rank and every call."""
        if self.model_init is None:
            raise ValueError("this Trainer was given a model, not a model_init")
        with separate_randomness(self.args.seed):
            model = self.model_init()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model_init returned {model!r}; it must return a torch.nn.Module")
        return model

    def renew_model(self) -> None:
        """Make a new model for a new run, where there is a `model_init` and the model was trained already."""
        if self.model_init is not None and not self._model_is_fresh:
            self._take_model(self.call_model_init())
        self._model_is_fresh = False

    def prepare(self) -> nn.Module:
        """Hand the model to the strategy, once, and return it wrapped."""
        if not self._is_prepared:
            self.model_wrapped = self.strategy.prepare(self.model)
            self._is_prepared = True
        return self.model_wrapped

    def _take_model(self, model: nn.Module) -> None:
        self.model = self.model_wrapped = model
        self._is_prepared = False
        inner = base_model(model)
        found = find_label_names(inner)
        self.label_names: list[str] = found if self.args.label_names is None else self.args.label_names
        self.can_return_loss = can_return_loss(inner)
        self.flop_counter = FlopCounter(model)
        self.loss_rule = LossRule(
            inner,
            self.compute_loss_func,
            self.strategy,
            average_tokens_across_devices=self.args.average_tokens_across_devices,
        )
        # Overrides written before `num_items_in_batch` existed keep working.
        self._loss_takes_count = takes_argument(getattr(self, "compute_loss"), "num_items_in_batch")
        self._step_takes_count = takes_argument(getattr(self, "training_step"), "num_items_in_batch")

    # Who listens

    def fire(self, event: str, **extra: Any) -> None:
        """Send an event to the callbacks that define it; what they return ends up in `control`."""
        handler = self.callback_handler
        context = {**self._context(), **extra} if handler.listens(event) else extra
        handler.fire(event, self.args, self.state, self.control, context)

    def add_callback(self, callback: Any) -> None:
        """Append a callback, or an instance of a callback class."""
        self.callback_handler.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback: this object, or the first of this class; None if there is none."""
        return self.callback_handler.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback: this object, or the first of this class."""
        self.callback_handler.pop(callback)

    def _context(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "processing_class": self.processing_class,
            "tokenizer": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            **self.loaders,
        }

    # Who this process is, and where its checkpoints go

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.strategy.local_rank == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all."""
        return self.strategy.rank == 0

    def checkpointer(self) -> Checkpointer:
        """Return where checkpoints go, building it from the arguments the first time.

        Raises:
            ValueError: no such checkpointer is installed.
        """
        if self._checkpointer is None:
            self._checkpointer = saving.build_checkpointer(cast("Trainer", self))
        return self._checkpointer

    def save_checkpoint(self, run: Run) -> None:
        """Save everything that the run needs to go on from here."""
        saving.save_checkpoint(cast("Trainer", self), run)

    @property
    def max_grad_norm(self) -> float | None:
        """Norm that gradients are clipped to; None for no clipping."""
        return self.args.max_grad_norm or None

    @property
    def schedule_follows_metric(self) -> bool:
        """Whether the schedule is stepped with an evaluation's result instead of after every step."""
        return isinstance(self.lr_scheduler, ReduceLROnPlateau)

    def step_schedule_on(self, metrics: dict[str, float]) -> None:
        """Step a schedule that follows `metric_for_best_model`."""
        cast(ReduceLROnPlateau, self.lr_scheduler).step(watched_metric(cast("Trainer", self), metrics))

    def _bind_process(self) -> None:
        strategy = self.strategy
        place = {"rank": strategy.rank, "local_rank": strategy.local_rank, "world_size": strategy.world_size}
        self.args.bind(device=strategy.device, **place)
        configure(level=self.args.get_process_log_level(), rank=strategy.rank, world_size=strategy.world_size)

    def _default_collator(self) -> Callable[[list[Any]], Any]:
        if hasattr(self.processing_class, "pad"):
            return DataCollatorWithPadding(self.processing_class)
        return default_data_collator


def _same(name: str, value: Any, other_name: str, other: Any) -> Any:
    """Return whichever of two names for one thing was given.

    Raises:
        ValueError: both were, and differ.
    """
    if value is not None and other is not None and value is not other:
        raise ValueError(f"{name} and {other_name} are two names for one thing and were given different values")
    return value if value is not None else other
