"""Read what a checkpoint knows of its run: the best step, and the value that tells which is best."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

# Never what a model is chosen by.
_TIMES = ("_runtime", "_per_second", "_time")


def read_state(folder: Path) -> dict[str, Any]:
    """Return `trainer_state.json` as it is; empty if there is none or it cannot be read."""
    return _read(folder / "trainer_state.json")


def best_step(state: dict[str, Any]) -> int | None:
    """Return the step of the best evaluation that `state` knows of."""
    step = state.get("best_global_step")
    if type(step) is int and 0 <= step < 10**18:
        return step
    _, _, number = str(state.get("best_model_checkpoint") or "").rpartition("-")
    return int(number) if number.isdecimal() and len(number) <= 18 else None


def key_metric(folder: Path, state: dict[str, Any], step: int | None) -> tuple[str, float] | None:
    """Return name and value of what the model of `step` is judged by: the metric of the best, or a loss.

    That is the one that `metric_for_best_model` names; else the one whose best value the state holds; else `eval_loss`;
    else the last `loss` that was logged. None if the state holds none of these.
    """
    logged = state.get("log_history")
    history = [entry for entry in logged if isinstance(entry, dict)] if isinstance(logged, list) else []
    at_step: dict[str, float] = {}
    for entry in history:
        if entry.get("step") == step:
            at_step |= {name: value for name, given in entry.items() if (value := number(given)) is not None}
    for name in (*_names(folder, state, history), "eval_loss"):
        if name in at_step:
            return name, at_step[name]
    losses = [value for entry in history if (value := number(entry.get("loss"))) is not None]
    return ("loss", losses[-1]) if losses else None


def number(value: Any) -> float | None:
    """Return a number of a JSON file, infinite and undefined ones included; None for anything else."""
    if isinstance(value, dict) and set(value) == {"$float"}:
        value = value["$float"]
    if value in ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) >= 2**63):  # which is no measure of a model
        return None
    return value if isinstance(value, int | float) else None


def _names(folder: Path, state: dict[str, Any], history: list[dict[str, Any]]) -> list[str]:
    chosen = _read(folder / "training_args.json").get("metric_for_best_model")
    if isinstance(chosen, str):
        return [chosen if chosen.startswith("eval_") else f"eval_{chosen}"]
    best = number(state.get("best_metric"))
    if best is None or math.isnan(best):
        return []
    at_best = [entry for entry in history if entry.get("step") == state.get("best_global_step")]
    return [
        name
        for entry in at_best
        for name, value in entry.items()
        if name.startswith("eval_") and not name.endswith(_TIMES) and number(value) == best
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
