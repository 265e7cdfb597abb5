"""Learning rate, schedule and optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from tr_args.hints import Beta, NonNegative, Options, Steps
from tr_args.optim_args import OptimizerOptions
from tr_args.parameter_rules import ParameterRules


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
