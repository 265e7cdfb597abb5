"""Name the choices of when something happens; each compares equal to its plain string."""

from __future__ import annotations

from enum import StrEnum


class IntervalStrategy(StrEnum):
    """When to log or to evaluate."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SaveStrategy(StrEnum):
    """When to write a checkpoint; `best` writes one whenever the watched metric improves."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class HubStrategy(StrEnum):
    """What to upload, and when."""

    END = "end"
    EVERY_SAVE = "every_save"
    CHECKPOINT = "checkpoint"
    ALL_CHECKPOINTS = "all_checkpoints"


class ParallelMode(StrEnum):
    """How this process takes part in training."""

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"
    TPU = "tpu"
