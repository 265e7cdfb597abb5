"""Write the model card and push to the Hub, in methods of the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tr_core.checkpoint import saving
from tr_core.model_card import CardDetails, TrainedRun, Words, write_model_card
from tr_core.preflight.requested import stop_if_requested
from tr_core.trainer.output_methods import Reporting


class Publishing(Reporting):
    """Write model cards, and push to the Hub.

    Attributes:
        card_details: the arguments of earlier calls of `create_model_card`.
        lacks_best_weights: whether the best weights should have been loaded and were missing.
    """

    card_details = CardDetails()
    lacks_best_weights = False
    _is_saving_to_push = False

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
        """Write weights (safetensors), configuration and tokenizer. Collective; rank 0 writes.

        With `ema_decay` the weights are the average. With `push_to_hub`, a call outside of `train` also saves to
        `output_dir` of the arguments, and pushes that as "Model save". A failed push is logged as an error.
        """
        super().save_model(output_dir)
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

    def save_checkpoint(self, run: Any) -> None:
        """Fire `on_push_begin` if the checkpoint will be pushed, then save everything for a resume from here."""
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            self.fire("on_push_begin")
        super().save_checkpoint(run)

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
        self._is_saving_to_push = True
        try:
            self.save_model()
        finally:
            self._is_saving_to_push = False


class _Hidden:
    """Keep a token out of displays of local variables."""

    def __init__(self, value: str | None) -> None:
        self.value = value
