"""Attributes that transformers' Trainer assigns, which subclasses read and sometimes assign.

Here they follow from the strategy and the arguments. An assignment acts on what they follow from, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tr_core.compat.accelerator import StrategyAccelerator
from tr_core.compat.refused_hooks import NOT_SET, REFUSED
from tr_core.data.loaders import data_seed
from tr_core.label_smoothing import LabelSmoother
from tr_core.model_io import IGNORED_TARGET


class Follows:
    """An attribute that follows from something else; an assignment of another value is refused."""

    def __init__(self, read: Callable[[Any], Any], instead: str, doc: str) -> None:
        self._read, self._instead, self.__doc__ = read, instead, doc
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, own: Any, owner: type | None = None) -> Any:
        return self if own is None else self._read(own)

    def __set__(self, own: Any, value: Any) -> None:
        current = self._read(own)
        if value is not current and value != current:
            raise AttributeError(
                f"trainer.{self._name} = {value!r} would do nothing, as it follows from something else here and is "
                f"{current!r}; {self._instead}"
            )


class _Pushes:
    """The pushes of the Hub's callback: they hold all files of the model, and no override need copy any beside them."""

    def is_done(self) -> bool:
        """Return False: the callback itself sees whether a push is under way."""
        return False

    def wait_until_done(self) -> None:
        """Do nothing: the end of the run waits."""


_PUSHES = _Pushes()
_STRATEGY = "set it in the arguments, or pass strategy= to the Trainer"


_NEVER = "False: no strategy uses the FSDP of torch_xla."


def _never(own: Any) -> bool:
    return False


class TransformersAttributes:
    """What transformers' Trainer holds in attributes; `self` is a Trainer, which adds everything else."""

    is_deepspeed_enabled = Follows(lambda own: bool(own.args.deepspeed), _STRATEGY, "Whether DeepSpeed trains.")
    deepspeed = Follows(
        lambda own: own.model_wrapped if own.args.deepspeed and own.model_wrapped is not own.model else None,
        _STRATEGY,
        "The wrapped model where DeepSpeed trains, else None.",
    )
    is_fsdp_enabled = Follows(lambda own: bool(own.args.fsdp), _STRATEGY, "Whether the parameters are sharded by FSDP.")
    is_fsdp_xla_enabled = Follows(_never, _STRATEGY, _NEVER)
    is_fsdp_xla_v1_enabled = Follows(_never, _STRATEGY, _NEVER)
    is_fsdp_xla_v2_enabled = Follows(_never, _STRATEGY, _NEVER)
    is_distributed_loading_by_transformers = Follows(_never, _STRATEGY, "False: a strategy divides the model.")
    place_model_on_device = Follows(
        lambda own: bool(getattr(own.args, "place_model_on_device", True)),
        "override the property place_model_on_device in a subclass of TrainingArguments",
        "Whether the model is moved to the device.",
    )
    neftune_noise_alpha = Follows(
        lambda own: own.args.neftune_noise_alpha, "set args.neftune_noise_alpha", "The argument of this name."
    )
    hp_search_backend = Follows(
        lambda own: None, "call hyperparameter_search(backend=...)", "None: the output folder is each trial's own."
    )
    push_in_progress = Follows(
        lambda own: _PUSHES if own.args.push_to_hub else None,
        "call push_to_hub(blocking=False), which returns a future",
        "What is never done, as the Hub's callback pushes; None without `push_to_hub`.",
    )
    _accelerator: StrategyAccelerator | None = None
    _is_divided_by_user: bool | None = None
    _gather_function: Any = None

    @property
    def accelerator(self: Any) -> Any:
        """The strategy's `accelerate.Accelerator` where it has one, else the members that subclasses use most."""
        if self.strategy.accelerator is not None:
            return self.strategy.accelerator
        if self._accelerator is None:
            parts = (lambda: self.strategy, lambda: self.args, self.scope, self._order_seed)
            self._accelerator = StrategyAccelerator(*parts)
        return self._accelerator

    @accelerator.setter
    def accelerator(self: Any, accelerator: Any) -> None:
        if accelerator is not self.accelerator:
            raise AttributeError(
                f"trainer.accelerator = {type(accelerator).__name__}(...) would not train: the strategy does, and it "
                "was built before. Pass strategy=tr_dist.accelerate_strategy.AcceleratorStrategy(accelerator) to the "
                "Trainer"
            )

    def _order_seed(self: Any) -> int:
        """Return the seed of a shuffled loader: in a run, as accelerate has it, what torch was last seeded with."""
        in_run = self.is_in_train and self.args.data_seed is None
        return torch.initial_seed() if in_run else data_seed(self.args)

    @property
    def is_model_parallel(self: Any) -> bool:
        """Whether its loader placed the model on several devices, unless it was assigned."""
        if self._is_divided_by_user is not None:
            return self._is_divided_by_user
        return len(set(getattr(self.model, "hf_device_map", {}).values())) > 1

    @is_model_parallel.setter
    def is_model_parallel(self: Any, value: bool) -> None:
        self._is_divided_by_user = bool(value)  # there it keeps DataParallel off, which is not here

    @property
    def hub_model_id(self: Any) -> str | None:
        """The name of the Hub repository in the arguments."""
        return self.args.hub_model_id

    @hub_model_id.setter
    def hub_model_id(self: Any, name: str | None) -> None:
        self.args.hub_model_id = name

    @property
    def tokenizer(self: Any) -> Any:
        """The tokenizer or processor, which is called `processing_class` now; an assignment sets that."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self: Any, tokenizer: Any) -> None:
        self.processing_class = tokenizer

    @property
    def label_smoother(self: Any) -> LabelSmoother | None:
        """What smooths the labels, None without `label_smoothing_factor`; an assignment sets that argument."""
        return self.loss_function if isinstance(self.loss_function, LabelSmoother) else None

    @label_smoother.setter
    def label_smoother(self: Any, smoother: Any) -> None:
        is_usual = type(smoother).__name__ == "LabelSmoother" and smoother.ignore_index == IGNORED_TARGET
        if smoother is not None and not is_usual:
            raise TypeError(
                f"trainer.label_smoother = {smoother!r} is not a LabelSmoother with ignore_index={IGNORED_TARGET}; "
                "pass compute_loss_func=, which gets the outputs and the labels"
            )
        self.args.label_smoothing_factor = 0.0 if smoother is None else smoother.epsilon

    @property
    def current_gradient_accumulation_steps(self: Any) -> int:
        """Micro-batches of the current step, fewer than usual at the end of an epoch; each step sets it."""
        self.scope.size_was_read = True
        return self.scope.size

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self: Any, number: int) -> None:
        self.scope.size = int(number)

    @property
    def _train_batch_size(self: Any) -> int:
        """Samples of one micro-batch of this process; an assignment sets `per_device_train_batch_size`."""
        return self.args.train_batch_size

    @_train_batch_size.setter
    def _train_batch_size(self: Any, size: int) -> None:
        self.args.per_device_train_batch_size = size

    @property
    def gather_function(self: Any) -> Any:
        """What gathers the predictions of an evaluation by an override of `evaluation_loop`."""
        return self.accelerator.gather_for_metrics if self._gather_function is None else self._gather_function

    @gather_function.setter
    def gather_function(self: Any, function: Any) -> None:
        if function != self.accelerator.gather_for_metrics and not self.overrides("evaluation_loop"):
            raise AttributeError(
                f"trainer.gather_function = {function!r} would do nothing: evaluations gather by the strategy; "
                "override evaluation_loop, which may use it"
            )
        self._gather_function = function

    def __getattr__(self: Any, name: str) -> Any:
        if name in REFUSED:
            raise AttributeError(
                f"{type(self).__name__}.{name} is a method of transformers' Trainer that this one does not have: "
                f"{REFUSED[name]}"
            )
        if name in NOT_SET:
            raise AttributeError(
                f"{type(self).__name__}.{name} is set by transformers' Trainer, and not by this one: {NOT_SET[name]}"
            )
        return object.__getattribute__(self, name)  # raises what the first look raised
