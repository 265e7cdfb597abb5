"""Run a function in several local processes that form a process group on the CPU, and what else tests of ranks need."""

from tr_dist.testing.conditions import abandon_group, described_launch, filled_configuration, set_loss_scaler
from tr_dist.testing.ranks import RankError, load_module, run_ranks

__all__ = [
    "RankError",
    "abandon_group",
    "described_launch",
    "filled_configuration",
    "load_module",
    "run_ranks",
    "set_loss_scaler",
]
