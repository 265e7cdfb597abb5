"""How batches are made and what is in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tr_args.constraints import BatchesOrShare, CommaSeparated
from tr_args.hints import NonNegativeInt, OptionalCount


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class DataFields:
    """How batches are made and what is in them."""

    _title = "Data"

    dataloader_num_workers: NonNegativeInt = 0
    """Processes that load data; 0 loads in the training process."""

    dataloader_drop_last: bool = False
    """Leave out the last batch if it is not full."""

    dataloader_pin_memory: bool = True
    """Load into page-locked memory, from which copies to a device are faster."""

    dataloader_persistent_workers: bool = False
    """Keep the loading processes from one epoch to the next."""

    dataloader_prefetch_factor: OptionalCount = None
    """Batches each loading process keeps ready. Unset is torch's default."""

    dataloader_multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    """How loading processes are started. Unset is Python's default."""

    dataloader_in_order: bool = True
    """Take batches of loading processes in order; off, the first one ready."""

    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] = "random"
    """Order of the training data: random, sequential, or random with samples of similar length together."""

    length_column_name: str = "length"
    """Column that holds the samples' lengths, for group_by_length."""

    overfit_batches: Annotated[float | None, BatchesOrShare()] = None
    """Train on the first so many micro-batches alone, in the same order in every pass; below 1 it is a share of the
    training data. Evaluations during training use them too. A model that cannot learn these by heart has a fault."""

    remove_unused_columns: bool = True
    """Drop dataset columns that the model's forward does not take."""

    label_names: Annotated[list[str] | None, CommaSeparated(unset=None)] = None
    """Inputs that are labels. Unset: the arguments of the model's forward with label in their name."""
