"""Create the optimizer and the learning-rate schedule, in methods that a subclass may override."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tr_args import TrainingArguments
from tr_core.optim.optimizers import (
    Factory,
    build_optimizer,
    decay_parameter_names,
    optimizer_factory,
    parameter_groups,
)
from tr_core.optim.parameter_rules import check_applied, read_rules
from tr_core.optim.schedules import FOLLOW_METRIC, get_scheduler
from tr_core.trainer.parts import TrainerParts
from tr_core.validation import check_given_parts_fit


class Optimizing(TrainerParts):
    """Build the optimizer and the schedule, and return what they hold."""

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
            groups = parameter_groups(model, self.args.weight_decay, decayed, rules)
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
        """Count the trainable weights: the numbers that training changes."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of one optimizer step: micro-batch, times accumulation, times processes."""
        return args.train_batch_size * args.gradient_accumulation_steps * self.strategy.world_size

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
