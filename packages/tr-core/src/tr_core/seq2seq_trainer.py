"""Evaluate and predict on generated tokens: a Trainer for models that generate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tr_args import Seq2SeqTrainingArguments
from tr_core.changes import assigned
from tr_core.evaluation.evaluation_loop import labels_in
from tr_core.evaluation.gather import check_same_on_ranks
from tr_core.evaluation.generation import (
    call_options,
    check_generation_options,
    load_generation_config,
    longest_row,
    pad_rows,
    padding_token,
    synced_generation,
)
from tr_core.model_io import batch_size_of
from tr_core.results import PredictionOutput
from tr_core.runtime.run_context import generation_context
from tr_core.trainer import Trainer


class Seq2SeqTrainer(Trainer):
    """Evaluate and predict on generated tokens, with `predict_with_generate=True`.

    The loss is that of the labels, as without generation. `compute_metrics` gets generated tokens as predictions. Rows
    of one batch, and their labels, are padded with padding tokens to the greatest length that the model may generate.
    If rows of different batches still differ in length, -100 follows.

    Args:
        model: as in `Trainer`; to generate it needs a method `generate`.
        args: default ones write to `trainer_output` and generate nothing.
        *parts: as in `Trainer`.
        **named: as in `Trainer`.

    Raises:
        ValueError: the model cannot generate as requested, or `generation_config` is not valid.
        TypeError: the arguments are not those of this Trainer.
    """

    args: Seq2SeqTrainingArguments
    # The options of the current evaluation or prediction for `generate`.
    _given_options: Mapping[str, Any] = {}

    def __init__(
        self, model: nn.Module | None = None, args: Seq2SeqTrainingArguments | None = None, *parts: Any, **named: Any
    ) -> None:
        if args is not None and not hasattr(args, "predict_with_generate"):
            raise TypeError(
                f"Seq2SeqTrainer needs Seq2SeqTrainingArguments, which say what is generated; args is a "
                f"{type(args).__name__}"
            )
        super().__init__(model, Seq2SeqTrainingArguments() if args is None else args, *parts, **named)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generate_options: Any,
    ) -> dict[str, float]:
        """Evaluate, log and return the metrics.

        Args:
            eval_dataset: as in `Trainer.evaluate`.
            ignore_keys: as in `Trainer.evaluate`.
            metric_key_prefix: as in `Trainer.evaluate`.
            **generate_options: any argument of the model's `generate`, as `max_length`, `max_new_tokens` or
                `num_beams`, for this evaluation only. Missing ones come from the training arguments.
        """
        with self._generating(generate_options):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **generate_options: Any,
    ) -> PredictionOutput:
        """Generate for every sample of a dataset, with metrics if it has labels.

        Args:
            test_dataset: as in `Trainer.predict`.
            ignore_keys: as in `Trainer.predict`.
            metric_key_prefix: as in `Trainer.predict`.
            **generate_options: as in `evaluate`.
        """
        with self._generating(generate_options):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **generate_options: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Compute the loss of one batch, if it has labels, and generate for it.

        Returns:
            Loss (None without labels), generated tokens of shape `(rows, length)` (None with `prediction_loss_only`),
            labels (None without).
        """
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        labels, loss = labels_in(inputs, self.label_names), None
        if self.is_in_evaluation:  # a forward for the loss may be collective
            mine = "no labels" if labels is None else "labels"
            check_same_on_ranks(mine, self.strategy, "a batch of this evaluation")
        if labels is not None:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        settings = self._settings()
        options = call_options(self.args, {**self._given_options, **generate_options}, settings)
        known = self._generation_inputs(inputs)
        together = synced_generation(options, self.model, self.strategy)
        uncompiled = generation_context(self.compilation, self.model)
        with torch.no_grad(), self.loss_context(), uncompiled, together as options_of_all:
            generated = self.model.generate(**known, **options_of_all)  # type: ignore[operator]
        tokens = getattr(generated, "sequences", generated)
        rows = batch_size_of(known)
        if rows is not None and len(tokens) != rows:
            raise ValueError(
                f"the model generated {len(tokens)} rows for {rows} samples; an evaluation needs one for each: leave "
                "num_return_sequences at 1"
            )
        length = longest_row(options, settings, known, has_encoder=self._has_encoder())
        if isinstance(labels, torch.Tensor) and labels.dim() > 1 and labels.shape[-1] < length:
            labels = self._pad_tensors_to_max_len(labels, length)
        if tokens.shape[-1] < length:
            tokens = self._pad_tensors_to_max_len(tokens, length)
        return loss, tokens, labels

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        """Return rows of tokens padded to a length, with the padding token at their end."""
        config = getattr(self.model, "config", None)
        return pad_rows(tensor, max_length, padding_token(self.processing_class, self._settings(), config))

    def load_generation_config(self, gen_config_arg: Any) -> Any:
        """Return generation settings: a copy of an object, or those in a dict, a file, a folder or a repository."""
        return load_generation_config(gen_config_arg, self.model)

    # Internal

    def _set_model(self, model: nn.Module) -> None:
        super()._set_model(model)
        if self.args.predict_with_generate and not callable(getattr(model, "generate", None)):
            raise ValueError(
                f"predict_with_generate=True needs a model with a method generate, which {type(model).__name__} has "
                "not; set predict_with_generate=False"
            )
        if self.args.generation_config is not None:
            settings = self.load_generation_config(self.args.generation_config)
            model.generation_config = settings  # type: ignore[assignment]

    @contextmanager
    def _generating(self, given: Mapping[str, Any]) -> Iterator[None]:
        if given and not self.args.predict_with_generate:
            check_generation_options(given, self.model)
            self.logger.warning(
                "%s given, and nothing is generated: predict_with_generate is False",
                ", ".join(f"{name}={value!r}" for name, value in given.items()),
            )
        # Each of several datasets has its own nested call.
        with assigned(self, _given_options={**self._given_options, **given}):
            yield

    def _settings(self) -> Any:
        return getattr(self.model, "generation_config", None)

    def _has_encoder(self) -> bool:
        return bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    def _generation_inputs(self, inputs: Any) -> dict[str, Any]:
        """Return the inputs of generation: without labels, and without decoder inputs made from them."""
        if not isinstance(inputs, Mapping):
            raise ValueError(
                f"predict_with_generate=True needs batches that name their parts, not a {type(inputs).__name__}"
            )
        dropped = set(self.label_names)
        labels, decoder_inputs = inputs.get("labels"), inputs.get("decoder_input_ids")
        if labels is not None and decoder_inputs is not None and labels.shape == decoder_inputs.shape:
            dropped |= {"decoder_input_ids", "decoder_attention_mask"}
        return {name: value for name, value in inputs.items() if name not in dropped}


Seq2SeqTrainer.own_class = Seq2SeqTrainer
