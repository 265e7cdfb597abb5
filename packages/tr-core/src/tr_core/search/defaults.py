"""What a search looks for, and where, if it is not told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What an evaluation reports beside its metrics. The perplexity says nothing that the loss does not.
_NOT_METRICS = ("_runtime", "_per_second", "_perplexity", "_model_preparation_time")


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """Return the evaluation loss, or where there are other metrics their sum."""
    chosen = objective_names(metrics)
    return sum(metrics[name] for name in chosen)


def objective_names(metrics: Mapping[str, float]) -> list[str]:
    """Return the names of the metrics that `default_compute_objective` adds up."""
    own = [name for name in metrics if name not in ("eval_loss", "epoch") and not name.endswith(_NOT_METRICS)]
    return own or ["eval_loss"]


def default_hp_space(trial: Any) -> dict[str, Any]:
    """Search the learning rate (1e-6 to 1e-4), the epochs (1 to 5), the seed (1 to 40) and the batch size (4 to 64)."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }
