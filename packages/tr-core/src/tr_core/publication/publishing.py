"""What a Trainer shows to others: the model card, and the repository on the Hub."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

from tr_core import plugins, saving
from tr_core.preflight.requested import stop_if_requested
from tr_core.publication.model_card import CardDetails, Words, write_model_card
from tr_core.reporting import Reporting

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


class Publishing(Reporting):
    """What is published.

    Attributes:
        card_details: what `create_model_card` was told so far.
    """

    card_details = CardDetails()

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

        The figures are of the model as it is: those of the last evaluation, or of the best step if its weights were
        loaded. What is given once holds for later cards too. A card that was written by hand stays as it is, with a
        warning. Only the main process writes.

        Args:
            language: codes of the model's languages, such as `en`.
            license: identifier of its licence, such as `apache-2.0`.
            tags: tags beside `generated_from_trainer`.
            model_name: its name; by default that of the Hub repository, or of the output folder.
            finetuned_from: identifier of the model it was made of; by default what the model's configuration says.
            tasks: task identifiers, such as `text-classification`; by default by the model's class.
            dataset_tags: identifiers of the data sets; by default what the evaluation data say.
            dataset: names of the data sets; by default their identifiers.
            dataset_args: which part of each data set.
        """
        stop_if_requested(cast("Trainer", self))
        given = CardDetails(
            language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args
        )
        self.card_details = self.card_details.updated(given)
        if self.is_world_process_zero():
            write_model_card(cast("Trainer", self), self.card_details)

    def push_to_hub(self, commit_message: str = "End of training", blocking: bool = True, **card: Any) -> Any:
        """Save the model and its card to `output_dir` and push it to the Hub repository that the arguments name.

        Under `fast_dev_run` nothing is saved or pushed, and None returned.

        Args:
            commit_message: what the commit says.
            blocking: return when it is there; else push in the background.
            **card: what `create_model_card` is told.

        Raises:
            tr_core.plugins.PluginError: the package that pushes is not installed.
        """
        if self.args.fast_dev_run:
            self.logger.info("fast_dev_run=%r: nothing is pushed to the Hub", self.args.fast_dev_run)
            return None
        self.save_model()
        self.create_model_card(**card)
        self.fire("on_push_begin")
        if not self.is_world_process_zero():
            return None
        hub = saving.find_hub(self.callback_handler.callbacks, self.args)
        return hub.push_to_hub(self.args.output_dir, commit_message=commit_message, blocking=blocking)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the Hub repository that the arguments name, unless it exists; `push_to_hub=True` does so by itself.

        Args:
            token: access token, in place of the arguments' `hub_token`, for this alone.
            private: whether the repository is private, in place of `hub_private_repo`.

        Raises:
            tr_core.plugins.PluginError: the package that pushes is not installed.
        """
        stop_if_requested(cast("Trainer", self))
        if not self.is_world_process_zero():
            return
        if token is None and private is None:
            hub = saving.find_hub(self.callback_handler.callbacks, self.args)
        else:
            args = copy.copy(self.args)
            args.hub_token = token if token is not None else args.hub_token
            args.hub_private_repo = private if private is not None else args.hub_private_repo
            hub = plugins.load("tr.callbacks", "hub")(args)
        hub.repository.make()
