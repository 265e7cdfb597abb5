"""Set the arguments of one topic together."""

from __future__ import annotations

from typing import Any, Self

from tr_args.conversion import convert_field
from tr_args.errors import ArgumentsError, Problem, RefusedError
from tr_args.schema import schema


class _Default:
    """The default of a parameter, as `help` shows it: that of the argument it sets."""

    def __repr__(self) -> str:
        return "the argument's default"


_DEFAULT: Any = _Default()


class GroupedSetters:
    """Methods that set a topic's arguments at once and return the object.

    Arguments that are not given are set to their defaults. All values are checked alone, and none is set if one does
    not fit. `check` checks them together.
    """

    def set_training(  # noqa: PLR0917 - as in transformers
        self,
        learning_rate: Any = _DEFAULT,
        batch_size: Any = _DEFAULT,
        weight_decay: Any = _DEFAULT,
        num_epochs: Any = _DEFAULT,
        max_steps: Any = _DEFAULT,
        gradient_accumulation_steps: Any = _DEFAULT,
        seed: Any = _DEFAULT,
        activation_checkpointing: Any = _DEFAULT,
    ) -> Self:
        """Set learning rate, batch size, length and the like of a training run, and `do_train`."""
        return self._set(
            locals(), switch="do_train", batch_size="per_device_train_batch_size", num_epochs="num_train_epochs"
        )

    def set_evaluate(
        self,
        strategy: Any = _DEFAULT,
        steps: Any = _DEFAULT,
        batch_size: Any = _DEFAULT,
        accumulation_steps: Any = _DEFAULT,
        delay: Any = _DEFAULT,
        loss_only: Any = _DEFAULT,
    ) -> Self:
        """Set when and how evaluation happens; `do_eval` follows the strategy. `steps` is 500 by default."""
        return self._set(
            locals(), prefix="eval_", batch_size="per_device_eval_batch_size", loss_only="prediction_loss_only"
        )

    def set_testing(self, batch_size: Any = _DEFAULT, loss_only: Any = _DEFAULT) -> Self:
        """Set how predictions are made, and `do_predict`."""
        return self._set(
            locals(), switch="do_predict", batch_size="per_device_eval_batch_size", loss_only="prediction_loss_only"
        )

    def set_save(
        self, strategy: Any = _DEFAULT, steps: Any = _DEFAULT, total_limit: Any = _DEFAULT, on_each_node: Any = _DEFAULT
    ) -> Self:
        """Set when checkpoints are written and how many are kept."""
        return self._set(locals(), prefix="save_")

    def set_logging(  # noqa: PLR0917 - as in transformers
        self,
        strategy: Any = _DEFAULT,
        steps: Any = _DEFAULT,
        report_to: Any = _DEFAULT,
        level: Any = _DEFAULT,
        first_step: Any = _DEFAULT,
        nan_inf_filter: Any = _DEFAULT,
        on_each_node: Any = _DEFAULT,
        replica_level: Any = _DEFAULT,
    ) -> Self:
        """Set when, where and how much is logged."""
        return self._set(
            locals(),
            prefix="logging_",
            report_to="report_to",
            level="log_level",
            on_each_node="log_on_each_node",
            replica_level="log_level_replica",
        )

    def set_push_to_hub(
        self,
        model_id: Any,
        strategy: Any = _DEFAULT,
        token: Any = _DEFAULT,
        private_repo: Any = _DEFAULT,
        always_push: Any = _DEFAULT,
        revision: Any = _DEFAULT,
    ) -> Self:
        """Set where and when to upload, and `push_to_hub`."""
        return self._set(locals(), prefix="hub_", switch="push_to_hub")

    def set_optimizer(  # noqa: PLR0917 - as in transformers
        self,
        name: Any = _DEFAULT,
        learning_rate: Any = _DEFAULT,
        weight_decay: Any = _DEFAULT,
        beta1: Any = _DEFAULT,
        beta2: Any = _DEFAULT,
        epsilon: Any = _DEFAULT,
        args: Any = _DEFAULT,
    ) -> Self:
        """Set the optimizer and its options."""
        return self._set(
            locals(), name="optim", beta1="adam_beta1", beta2="adam_beta2", epsilon="adam_epsilon", args="optim_args"
        )

    def set_lr_scheduler(
        self, name: Any = _DEFAULT, num_epochs: Any = _DEFAULT, max_steps: Any = _DEFAULT, warmup_steps: Any = _DEFAULT
    ) -> Self:
        """Set the schedule and its length."""
        return self._set(locals(), name="lr_scheduler_type", num_epochs="num_train_epochs")

    def set_dataloader(  # noqa: PLR0917 - as in transformers
        self,
        train_batch_size: Any = _DEFAULT,
        eval_batch_size: Any = _DEFAULT,
        drop_last: Any = _DEFAULT,
        num_workers: Any = _DEFAULT,
        pin_memory: Any = _DEFAULT,
        persistent_workers: Any = _DEFAULT,
        prefetch_factor: Any = _DEFAULT,
        multiprocessing_context: Any = _DEFAULT,
        in_order: Any = _DEFAULT,
        auto_find_batch_size: Any = _DEFAULT,
        ignore_data_skip: Any = _DEFAULT,
        sampler_seed: Any = _DEFAULT,
    ) -> Self:
        """Set how batches are made."""
        return self._set(
            locals(),
            prefix="dataloader_",
            train_batch_size="per_device_train_batch_size",
            eval_batch_size="per_device_eval_batch_size",
            auto_find_batch_size="auto_find_batch_size",
            ignore_data_skip="ignore_data_skip",
            sampler_seed="data_seed",
        )

    def _set(self, given: dict[str, Any], *, prefix: str = "", switch: str = "", **arguments: str) -> Self:
        """Set all values, or none if one is refused.

        Args:
            given: the values by parameter, beside `self`.
            prefix: what the names of the arguments begin with, before that of the parameter.
            switch: an argument that is set to True.
            **arguments: the argument of a parameter that is called otherwise.
        """
        fields = schema(type(self))
        values = {arguments.get(key, prefix + key): value for key, value in given.items() if key != "self"}
        for name, value in values.items():
            if value is _DEFAULT:
                # The default of eval_steps follows logging_steps, but only when the arguments are made.
                values[name] = 500 if name == "eval_steps" else fields[name].make_default()
        if switch:
            values[switch] = True
        if "eval_strategy" in values:
            values["do_eval"] = str(values["eval_strategy"]) != "no"
        problems: list[Problem] = []
        for name, value in values.items():
            try:
                convert_field(fields[name], value)
            except RefusedError as refusal:
                problems.append(fields[name].problem(value, refusal, "assignment"))
        if problems:
            raise ArgumentsError(problems)
        for name, value in values.items():
            setattr(self, name, value)
        return self
