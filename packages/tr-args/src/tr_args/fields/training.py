"""Declare how a model is trained: where results go, length, batches, data, optimizer, accumulation and clipping.

The switches of the script around the Trainer are here too.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal

from tr_args.constraints import (
    Above,
    AtLeast,
    BatchesOrShare,
    Beta,
    Between,
    BoolOrInt,
    CommaSeparated,
    Count,
    MaxSteps,
    NonNegative,
    NonNegativeInt,
    OptionalCount,
    Options,
    Steps,
    UserPath,
)
from tr_args.types.choices import Duration, WallTime
from tr_args.types.optimizer_options import OptimizerOptions, ParameterRules


@dataclass(init=False, repr=False, eq=False)
class OutputFields:
    """Output folder, length and batch size."""

    _title = "Output, length and batch size"

    output_dir: Annotated[str, UserPath()] = "trainer_output"
    """Folder for checkpoints, logs and results; created when training starts. `~` is the home folder."""

    _: KW_ONLY

    overwrite_output_dir: bool = False
    """Write into output_dir even if it holds files of an earlier run, and start anew instead of resuming."""

    num_train_epochs: Annotated[float, Above(0)] = 3.0
    """How many times to go through the training data; fractions stop within the last pass."""

    max_steps: Annotated[int, MaxSteps()] = -1
    """Stop after this many optimizer steps, whatever num_train_epochs says; -1 goes by epochs. Data without a
    length need it."""

    max_time: Annotated[Duration | None, WallTime()] = None
    """Stop after this much wall time of one call of train, such as 8h or 90min: at the end of the step that passes
    it, with a checkpoint to go on from unless save_strategy is no."""

    fast_dev_run: Annotated[bool | int, BoolOrInt()] = False
    """Try everything out: train one step, or this many, on as many batches of every evaluation and prediction. No
    checkpoints, trackers, Hub or best model; what a script saves goes to a temporary folder, not to output_dir."""

    per_device_train_batch_size: Count = 8
    """Samples a device takes in one forward and backward pass."""


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class ScriptFields:
    """Switches for the script around the Trainer."""

    _title = "What a script does"

    do_train: bool = False
    """Train. The Trainer does not read it; scripts do."""

    do_eval: bool = False
    """Evaluate. Always true when eval_strategy is not no."""

    do_predict: bool = False
    """Predict on the test data. The Trainer does not read it; scripts do."""


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


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class OptimizerFields:
    """Learning rate, schedule and optimizer."""

    _title = "Learning rate and optimizer"

    learning_rate: NonNegative = 5e-5
    """Peak learning rate, reached at the end of warmup."""

    lr_scheduler_type: str = "linear"
    """Name of the learning-rate schedule: linear, cosine, constant, constant_with_warmup, polynomial, ..."""

    lr_scheduler_kwargs: Options = None
    """Further options of the schedule, such as {"num_cycles": 2}."""

    warmup_steps: Steps = 0
    """Steps over which the learning rate rises from 0; below 1 it is a ratio of all steps, rounded up."""

    optim: str = "adamw_torch_fused"
    """Name of the optimizer: adamw_torch, adamw_torch_fused, sgd, adafactor, galore_adamw, lomo, ..."""

    optim_args: Annotated[str | dict | None, OptimizerOptions()] = None
    """Further options of the optimizer: "rank=64, scale=0.1" or a mapping."""

    optim_target_modules: str | list[str] | None = None
    """Modules a low-rank optimizer works on: names or regular expressions, or "all-linear"."""

    weight_decay: NonNegative = 0.0
    """Decoupled weight decay; biases and weights of normalisation layers are left out."""

    parameter_rules: Annotated[list[dict[str, Any]] | None, ParameterRules()] = None
    """Learning rate, weight decay or optimizer options for some parameters: {"params": "encoder", "lr_scale": 0.1}."""

    adam_beta1: Beta = 0.9
    """First-moment decay of the Adam family."""

    adam_beta2: Beta = 0.999
    """Second-moment decay of the Adam family."""

    adam_epsilon: NonNegative = 1e-8
    """Term that keeps the Adam family's division finite."""


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class RegularizationFields:
    """Accumulation, clipping and regularisation."""

    _title = "Accumulation, clipping and regularisation"

    gradient_accumulation_steps: Count = 1
    """Forward and backward passes whose gradients make one optimizer step."""

    average_tokens_across_devices: bool = True
    """Weigh the loss by the tokens of all processes together, not of each process alone."""

    max_grad_norm: Annotated[float | None, AtLeast(0, "; 0 turns clipping off")] = 1.0
    """Scale gradients down to this total norm; 0 does not clip. The norm is measured either way."""

    label_smoothing_factor: Annotated[float, Between(0, 1, open_end=True)] = 0.0
    """Share of the target probability that is spread over all classes."""

    neftune_noise_alpha: Annotated[float | None, AtLeast(0)] = None
    """Strength of the noise added to embeddings while training (NEFTune); 5 to 15 is usual."""

    neftune_length: Literal["real", "padded"] = "real"
    """What the noise of a row is measured by: its real tokens, padding then getting none, or the padded length of its
    batch, by which short rows get less."""

    ema_decay: Annotated[float | None, Between(0, 1, open_start=True, open_end=True)] = None
    """Keep an exponential moving average of the weights, in float32: after an update a share of 1 - ema_decay is of
    the new weights; 0.999 is usual. Evaluation, prediction, save_model, load_best_model_at_end and the model that
    train leaves are the average. Checkpoints hold the raw weights, to resume from, and the average beside them."""

    ema_start_step: NonNegativeInt = 0
    """Optimizer steps before the average begins; until then the weights stand for it."""

    ema_update_steps: Count = 1
    """Optimizer steps between updates of the average; ema_decay is that of one update."""
