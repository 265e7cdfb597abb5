"""Search for the hyper-parameters that evaluate best: one run of a Trainer for each trial."""

from tr_core.search.arguments import default_compute_objective, default_hp_space
from tr_core.search.search import BestRun
from tr_core.search.trial import TrialPrunedError

__all__ = ["BestRun", "TrialPrunedError", "default_compute_objective", "default_hp_space"]
