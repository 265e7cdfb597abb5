"""Turn transformers' `trainer_state.json` into the states of our parts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tr_ckpt import plain_file, strict_json
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError, UnreadableError
from tr_ckpt.names import step_of

FILE = "trainer_state.json"

# What is looked into here, where it is there.
_KINDS = {"log_history": list, "stateful_callbacks": dict}

# What callbacks find in transformers' file that is no callback: flags that every event sets anew.
_CONTROL = "TrainerControl"


def read(folder: Path) -> dict[str, Any]:
    """Return what the file holds, with NaN and infinite numbers, which it may hold although JSON has none.

    Raises:
        DamagedCheckpointError: it is missing, no JSON, or says of no step.
        UnreadableError: it cannot be read.
    """
    plain_file.require(folder / FILE)
    try:
        state = strict_json.read(folder / FILE, is_lax=True)
    except UnreadableError:
        raise
    except (OSError, CheckpointError) as error:
        raise DamagedCheckpointError(f"{FILE} cannot be read: {error}") from error
    step = state.get("global_step") if isinstance(state, dict) else None
    if type(step) is not int or not 0 <= step < 10**18:
        raise DamagedCheckpointError(f"{FILE} holds no global_step, the number of completed steps")
    for name, kind in _KINDS.items():
        if not isinstance(state.get(name), kind | None):
            raise DamagedCheckpointError(f"{FILE} holds a {type(state[name]).__name__} as {name}")
    return state


def reached(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the part `trainer_state`: what was logged, the best metric, what was counted."""
    own = {name: value for name, value in state.items() if name != "stateful_callbacks"}
    metric, folder = own.get("best_metric"), own.get("best_model_checkpoint")
    if isinstance(metric, float) and not math.isfinite(metric) and own.get("best_global_step") is None:
        own["best_metric"] = None  # what it begins with, where no evaluation gave a number
    if own.get("best_global_step") is None and isinstance(folder, str):  # of versions that saved the folder alone
        own["best_global_step"] = step_of(Path(folder).name, "checkpoint")
    if own.get("log_history") is None:
        own["log_history"] = []
    return own


def callbacks(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the part `callbacks`: the attributes of each, a second of one class as `Name#2`."""
    found: dict[str, Any] = {}
    for name, saved in (state.get("stateful_callbacks") or {}).items():
        for number, one in enumerate(saved if isinstance(saved, list) else [saved], start=1):
            attributes = one.get("attributes") if isinstance(one, dict) else None
            if name != _CONTROL and isinstance(attributes, dict):
                found[name if number == 1 else f"{name}#{number}"] = attributes
    return found


def place(state: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Return the state of the part `run`: what the place in the data can be derived from; it is not in the file."""
    known = {name: state.get(name) for name in ("global_step", "epoch", "max_steps", "train_batch_size")}
    return {"foreign": {**known, "world_size": world_size}}
