"""Declare how a model is trained: output folder, length, batches, data, optimizer, accumulation and clipping.

Switches for the script around the Trainer are here too.
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
    FreeName,
    GroupOption,
    Later,
    MaxSteps,
    NonNegative,
    NonNegativeInt,
    Numbers,
    Only,
    OptionalCount,
    OptionalPath,
    Options,
    Steps,
    UserPath,
)
from tr_args.types.choices import Duration, WallTime
from tr_args.types.optimizer_options import OptimizerOptions, ParameterRules

ONLY_IN_ORDER = (
    "batches would come in the order in which the loading processes finish them, so the position in the data could "
    "not be known and a run not be resumed"
)


@dataclass(init=False, repr=False, eq=False)
class OutputFields:
    """Output folder, length and batch size."""

    _title = "Output, length and batch size"

    output_dir: Annotated[str, UserPath("trainer_output"), Numbers.UNCHANGED] = "trainer_output"
    """Folder for checkpoints, logs and results; created when training starts. `~` is the home folder. None, too, is
    the default."""

    _: KW_ONLY

    overwrite_output_dir: Annotated[bool, Numbers.UNCHANGED, Later.NEXT_RUN] = False
    """Write into output_dir even if it holds files of an earlier run, and start over instead of resuming."""

    num_train_epochs: Annotated[float, Above(0), Numbers.OTHER] = 3.0
    """Number of epochs, each over all training data; a fraction stops within the last epoch."""

    max_steps: Annotated[int, MaxSteps(), Numbers.OTHER] = -1
    """Stop after this many optimizer steps, whatever num_train_epochs is; -1 trains for num_train_epochs. Data without
    a length need it."""

    max_time: Annotated[Duration | None, WallTime(), Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """Stop after this much wall time of one call of train, such as 8h or 90min, at the end of a step. A checkpoint to
    resume from is saved unless save_strategy is no."""

    fast_dev_run: Annotated[bool | int, BoolOrInt(), Numbers.UNCHANGED, Later.NEW_TRAINER] = False
    """Try everything out: train one step, or this many, with as many batches in every evaluation and prediction. It
    uses no checkpoints, trackers, Hub or best model. Files of the script go to a temporary folder, not to
    output_dir."""

    per_device_train_batch_size: Annotated[Count, Numbers.OTHER] = 8
    """Samples a device takes in one forward and backward pass."""


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class ScriptFields:
    """Switches for the script around the Trainer."""

    _title = "What a script does"

    do_train: Annotated[bool, Numbers.UNCHANGED, Later.NEXT_RUN] = False
    """Train. The Trainer does not read it; scripts do."""

    do_eval: Annotated[bool, Numbers.UNCHANGED, Later.NEXT_RUN] = False
    """Evaluate. Always true when eval_strategy is not no."""

    do_predict: Annotated[bool, Numbers.UNCHANGED, Later.NEXT_RUN] = False
    """Predict on the test data. The Trainer does not read it; scripts do."""


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class DataFields:
    """How batches are made and what is in them."""

    _title = "Data"

    dataloader_num_workers: Annotated[NonNegativeInt, Numbers.UNCHANGED] = 0
    """Processes that load data; 0 loads in the training process."""

    dataloader_drop_last: Annotated[bool, Numbers.OTHER] = False
    """Drop the last batch if it is not full."""

    dataloader_pin_memory: Annotated[bool, Numbers.UNCHANGED] = True
    """Load into page-locked memory; copies to a device are faster. Off with `use_cpu`."""

    dataloader_persistent_workers: Annotated[bool, Numbers.UNCHANGED] = False
    """Keep the loading processes from one epoch to the next."""

    dataloader_prefetch_factor: Annotated[OptionalCount, Numbers.UNCHANGED] = None
    """Batches each loading process keeps ready. Unset is torch's default."""

    dataloader_multiprocessing_context: Annotated[Literal["fork", "spawn", "forkserver"] | None, Numbers.UNCHANGED] = (
        None
    )
    """How loading processes are started. Unset is Python's default."""

    dataloader_in_order: Annotated[bool, Numbers.OTHER, Only(True, ONLY_IN_ORDER)] = True
    """Take batches of loading processes in order. Off, which a Trainer refuses, takes the first one ready."""

    train_sampling_strategy: Annotated[
        Literal["random", "sequential", "group_by_length", "random_computed"], Numbers.ORDER
    ] = "random"
    """Order of the training data: random, sequential, random with samples of similar length together, or random without
    a list of all samples (random_computed): its memory and its first step do not grow with the data."""

    length_column_name: Annotated[str, Numbers.ORDER] = "length"
    """Column that holds the samples' lengths, for group_by_length."""

    leave_out_samples: Annotated[OptionalPath, Numbers.ORDER, Later.NEW_TRAINER] = None
    """JSON file that lists samples of the training data to leave out, as trainer blame writes it. The run is that on
    torch.utils.data.Subset of all others; its checkpoints resume with the same samples left out."""

    overfit_batches: Annotated[float | None, BatchesOrShare(), Numbers.ORDER] = None
    """Train on the first so many micro-batches alone, in the same order in every epoch; below 1 it is a share of the
    training data. Evaluations during training use them too. A model that cannot memorise them has a fault."""

    remove_unused_columns: Annotated[bool, Numbers.OTHER] = True
    """Drop dataset columns that the model's forward does not take."""

    label_names: Annotated[list[str] | None, CommaSeparated(unset=None), Numbers.OTHER] = None
    """Inputs that are labels. Unset: the arguments of the model's forward with label in their name."""


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class OptimizerFields:
    """Learning rate, schedule and optimizer."""

    _title = "Learning rate and optimizer"

    learning_rate: Annotated[NonNegative, Numbers.OPTIMIZER, GroupOption("learning_rate")] = 5e-5
    """Peak learning rate, reached at the end of warmup."""

    lr_scheduler_type: Annotated[str, FreeName(), Numbers.SCHEDULE] = "linear"
    """Name of the learning-rate schedule: linear, cosine, constant, constant_with_warmup, polynomial, ..."""

    lr_scheduler_kwargs: Annotated[Options, Numbers.SCHEDULE] = None
    """Further options of the schedule, such as {"num_cycles": 2}."""

    warmup_steps: Annotated[Steps, Numbers.SCHEDULE] = 0
    """Steps over which the learning rate rises from 0; below 1 it is a ratio of all steps, rounded up."""

    # A checkpoint of another kind of optimizer is refused; torch's variants of one kind compute the same numbers.
    optim: Annotated[str, FreeName(), Numbers.OTHER] = "adamw_torch_fused"
    """Name of the optimizer: adamw_torch, adamw_torch_fused, sgd, adafactor, galore_adamw, lomo, muon, ..."""

    optim_args: Annotated[str | dict | None, OptimizerOptions(), Numbers.OPTIMIZER] = None
    """Further options of the optimizer: "rank=64, scale=0.1" or a mapping."""

    optim_target_modules: Annotated[str | list[str] | None, Numbers.OTHER] = None
    """Modules a low-rank optimizer or Muon works on: names or regular expressions, or "all-linear"."""

    weight_decay: Annotated[NonNegative, Numbers.OPTIMIZER, GroupOption("weight_decay")] = 0.0
    """Decoupled weight decay, without biases and weights of normalisation layers."""

    parameter_rules: Annotated[list[dict[str, Any]] | None, ParameterRules(), Numbers.OPTIMIZER] = None
    """Learning rate, weight decay or optimizer options for some parameters: {"params": "encoder", "lr_scale": 0.1}."""

    adam_beta1: Annotated[Beta, Numbers.OPTIMIZER, GroupOption("betas")] = 0.9
    """First-moment decay of the Adam family."""

    adam_beta2: Annotated[Beta, Numbers.OPTIMIZER, GroupOption("betas")] = 0.999
    """Second-moment decay of the Adam family."""

    adam_epsilon: Annotated[NonNegative, Numbers.OPTIMIZER, GroupOption("eps")] = 1e-8
    """Term that keeps the Adam family's division finite."""


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class RegularizationFields:
    """Accumulation, clipping and regularisation."""

    _title = "Accumulation, clipping and regularisation"

    gradient_accumulation_steps: Annotated[Count, Numbers.OTHER] = 1
    """Forward and backward passes whose gradients make one optimizer step."""

    average_tokens_across_devices: Annotated[bool, Numbers.OTHER, Later.NEXT_STEP] = True
    """Weight the loss by the tokens of all processes together, not of each process alone."""

    max_grad_norm: Annotated[float | None, AtLeast(0, "; 0 turns clipping off"), Numbers.OTHER, Later.NEXT_STEP] = 1.0
    """Scale gradients down to this total norm; 0 turns clipping off. The norm is measured either way."""

    label_smoothing_factor: Annotated[float, Between(0, 1, open_end=True), Numbers.OTHER, Later.NEXT_STEP] = 0.0
    """Share of the target probability that is spread over all classes."""

    neftune_noise_alpha: Annotated[float | None, AtLeast(0), Numbers.OTHER, Later.NEW_TRAINER] = None
    """Strength of the noise added to embeddings while training (NEFTune); 5 to 15 is usual."""

    neftune_length: Annotated[Literal["real", "padded"], Numbers.OTHER, Later.NEW_TRAINER] = "real"
    """Length that scales the noise of a row. real: its number of real tokens; padding gets no noise. padded: the padded
    length of the batch; short rows get less noise."""

    ema_decay: Annotated[
        float | None, Between(0, 1, open_start=True, open_end=True), Numbers.OTHER, Later.NEW_TRAINER
    ] = None
    """Keep an exponential moving average of the weights in float32: average = ema_decay * average + (1 - ema_decay) *
    weights; 0.999 is usual. Evaluation, prediction, save_model, load_best_model_at_end and the model after train use
    the average. Checkpoints hold the raw weights, to resume from, and the average."""

    ema_start_step: Annotated[NonNegativeInt, Numbers.OTHER, Later.NEW_TRAINER] = 0
    """Optimizer steps before the average begins; until then the weights are used."""

    ema_update_steps: Annotated[Count, Numbers.OTHER, Later.NEW_TRAINER] = 1
    """Optimizer steps between updates of the average; ema_decay applies to one update."""
