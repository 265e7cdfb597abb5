"""Declare what is saved and when, what a run starts from, and what is uploaded to a model hub."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tr_args.constraints import AtLeast, Later, Numbers, RepositoryName, Secret, Steps, UserPath
from tr_args.types.choices import HubStrategy, SaveIntervals, SaveStrategy


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class SavingFields:
    """Checkpoints, the best model and resuming."""

    _title = "Saving, best model and resuming"

    save_strategy: Annotated[SaveIntervals, Numbers.UNCHANGED, Later.NEXT_STEP] = SaveStrategy.STEPS
    """When to write a checkpoint: no, steps (every save_steps), epoch, best (when the metric improves), or every so
    much wall time, such as 30min. With steps and with a time the last step is saved too."""

    save_steps: Annotated[Steps, Numbers.UNCHANGED, Later.NEXT_STEP] = 500
    """Steps between checkpoints; below 1 it is a ratio of all steps."""

    save_total_limit: Annotated[int | None, AtLeast(1, ", or none to keep all"), Numbers.UNCHANGED] = None
    """Checkpoints to keep; older ones are deleted, never the best one. Unset keeps all."""

    save_keep_every: Annotated[int | None, AtLeast(1, ", or none to keep none for ever"), Numbers.UNCHANGED] = None
    """Keep each checkpoint whose step is a multiple of this for ever. It does not count towards save_total_limit."""

    save_async: Annotated[bool, Numbers.UNCHANGED] = False
    """Write checkpoints in the background: training waits only while the state is copied to host memory. A failed
    write ends the run at the next step. The end of the run waits for the last write."""

    save_on_each_node: Annotated[bool, Numbers.UNCHANGED] = False
    """Let every machine write checkpoints, for machines that share no file system."""

    save_only_model: Annotated[bool, Numbers.UNCHANGED, Later.NEXT_SAVE] = False
    """Save only the model. It is smaller, but training cannot be resumed from it."""

    checkpointer: Annotated[str, Numbers.UNCHANGED] = "local"
    """Name of the checkpointer, which writes and reads checkpoints."""

    enable_jit_checkpoint: Annotated[bool, Numbers.UNCHANGED] = True
    """On SIGTERM, SIGUSR1 or Ctrl-C, finish the step, write a checkpoint on all ranks and stop with exit code 143, 138
    or 130; a second signal stops at once. The resumed run does an evaluation that is due or under way. Signals
    keep their usual effect without save_strategy, before training, outside the main thread, and where a handler is
    set."""

    load_best_model_at_end: Annotated[bool, Numbers.UNCHANGED, Later.END_OF_RUN] = False
    """After training, load the best checkpoint's weights. A new best model is saved right after its evaluation,
    whatever save_strategy is."""

    metric_for_best_model: Annotated[str | None, Numbers.METRIC] = None
    """Metric that chooses the best model, with or without the prefix eval_. Unset is the loss, where one is needed."""

    greater_is_better: Annotated[bool | None, Numbers.METRIC] = None
    """Whether a larger metric is better. Unset: yes, unless its name ends with loss."""

    resume_from_checkpoint: Annotated[str | bool | None, UserPath(), Numbers.UNCHANGED, Later.NEXT_RUN] = None
    """Checkpoint folder to resume from, also one that transformers' Trainer wrote. true: the newest one in output_dir
    (an error without one). auto: the newest one if there is any. hub: last-checkpoint of hub_model_id.
    hub:OWNER/NAME[@REVISION]: that of another repository."""

    ignore_data_skip: Annotated[bool, Numbers.UNCHANGED, Later.NEXT_RUN] = False
    """When resuming, start the epoch's data again instead of continuing after the last sample."""

    restore_callback_states_from_checkpoint: Annotated[bool, Numbers.UNCHANGED, Later.NEXT_RUN] = True
    """When resuming, restore the saved states of callbacks. Off, callbacks start from their initial states."""


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class HubFields:
    """Uploading to a model hub."""

    _title = "Hub"

    push_to_hub: Annotated[bool, Numbers.UNCHANGED, Later.NEW_TRAINER] = False
    """Upload the model after training, and when hub_strategy asks for it."""

    hub_model_id: Annotated[str | None, RepositoryName(), Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """Repository to upload to, as name or organization/name. Unset is the name of output_dir."""

    hub_strategy: Annotated[HubStrategy, Numbers.UNCHANGED, Later.NEW_TRAINER] = HubStrategy.EVERY_SAVE
    """What to upload, and when: end, every_save, checkpoint (also as last-checkpoint) or all_checkpoints."""

    hub_token: Annotated[str | None, Secret(), Numbers.UNCHANGED, Later.NEW_TRAINER] = field(default=None, repr=False)
    """Access token; never written to logs or files. Unset is the one the hub's own login stored."""

    hub_private_repo: Annotated[bool | None, Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """Create the repository as a private one. Unset is the organization's default."""

    hub_always_push: Annotated[bool, Numbers.UNCHANGED, Later.NEW_TRAINER] = False
    """Upload even if the previous upload is not done yet."""

    hub_revision: Annotated[str | None, Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """Branch to upload to. Unset is the main branch."""
