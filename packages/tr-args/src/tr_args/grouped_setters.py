"""Set the arguments of one topic together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from tr_args.conversion import convert_field
from tr_args.errors import ArgumentsError, Problem, RefusedError
from tr_args.schema import schema
from tr_args.types.choices import HubStrategy, IntervalStrategy, SaveStrategy


class GroupedSetters:
    """Methods that set a topic's arguments at once and return the object.

    Arguments that are not given are set to their defaults. All values are checked alone, and none is set if one does
    not fit. `check` checks them together.
    """

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0.0,
        num_epochs: float = 3.0,
        max_steps: int = -1,
        *,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
    ) -> Self:
        """Set learning rate, batch size, length and the like of a training run, and `do_train`."""
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            activation_checkpointing=activation_checkpointing,
        )

    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = IntervalStrategy.NO,
        steps: float = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float = 0.0,
        *,
        loss_only: bool = False,
    ) -> Self:
        """Set when and how evaluation happens; `do_eval` follows the strategy."""
        return self._set(
            eval_strategy=strategy,
            do_eval=str(strategy) != "no",
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=delay,
            prediction_loss_only=loss_only,
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Self:
        """Set how predictions are made, and `do_predict`."""
        return self._set(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def set_save(
        self,
        strategy: str | SaveStrategy = SaveStrategy.STEPS,
        steps: float = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Set when checkpoints are written and how many are kept."""
        return self._set(
            save_strategy=strategy,
            save_steps=steps,
            save_total_limit=total_limit,
            save_on_each_node=on_each_node,
        )

    def set_logging(
        self,
        strategy: str | IntervalStrategy = IntervalStrategy.STEPS,
        steps: float = 500,
        report_to: str | Sequence[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        *,
        nan_inf_filter: bool = False,
        on_each_node: bool = True,
        replica_level: str = "warning",
    ) -> Self:
        """Set when, where and how much is logged."""
        return self._set(
            logging_strategy=strategy,
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = HubStrategy.EVERY_SAVE,
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        *,
        revision: str | None = None,
    ) -> Self:
        """Set where and when to upload, and `push_to_hub`."""
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=strategy,
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self,
        name: str = "adamw_torch_fused",
        learning_rate: float = 5e-5,
        weight_decay: float = 0.0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        *,
        epsilon: float = 1e-8,
        args: str | dict[str, Any] | None = None,
    ) -> Self:
        """Set the optimizer and its options."""
        return self._set(
            optim=name,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self, name: str = "linear", num_epochs: float = 3.0, max_steps: int = -1, warmup_steps: float = 0
    ) -> Self:
        """Set the schedule and its length."""
        return self._set(
            lr_scheduler_type=name,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            warmup_steps=warmup_steps,
        )

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        *,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Set how batches are made."""
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )

    def _set(self, **values: Any) -> Self:
        """Set all values, or none if one is refused."""
        problems: list[Problem] = []
        fields = schema(type(self))
        for name, value in values.items():
            try:
                convert_field(fields[name], value)
            except RefusedError as refusal:
                shown = "***" if fields[name].secret else value
                problems.append(Problem(name, shown, str(refusal), "assignment"))
        if problems:
            raise ArgumentsError(problems)
        for name, value in values.items():
            setattr(self, name, value)
        return self
