"""Hold what a run has reached (`TrainerState`) and what is to happen next (`TrainerControl`)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tr_args.bounded_text import ContentError, load_json
from tr_log import get_logger

logger = get_logger(__name__)


@dataclass
class TrainerState:
    """What a run has reached; saved with every checkpoint as `trainer_state.json`.

    Attributes:
        epoch: passes over the data, as a fraction; 0 before training.
        global_step: completed optimizer steps.
        max_steps: optimizer steps of the whole run.
        logging_steps: steps between logs, as resolved from a ratio if one was given.
        eval_steps: steps between evaluations, likewise.
        save_steps: steps between checkpoints, likewise.
        train_batch_size: samples per device and micro-batch.
        num_train_epochs: passes begun at most.
        num_input_tokens_seen: elements of the main input used in training, where counted.
        total_flos: floating-point operations of all forward and backward passes, where the model tells them.
        log_history: every logged entry, each with its `step`.
        best_metric: best value so far of the metric that chooses the best model.
        best_global_step: step of that value.
        best_model_checkpoint: folder of the checkpoint of that step, if it was saved.
        is_local_process_zero: whether this is the first process of its machine.
        is_world_process_zero: whether this is the first process of all.
        is_hyper_param_search: whether the run is one trial of a search.
        trial_name: name of that trial.
        trial_params: its parameters.
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over saved fields; who this process is stays as it is, unknown keys are passed over with a warning."""
        own = {"is_local_process_zero", "is_world_process_zero"}
        known = {f.name for f in fields(self)}
        if unknown := sorted(set(state_dict) - known):
            logger.warning("trainer state: passed over unknown keys %s, written by another version", unknown)
        for name in known & set(state_dict) - own:
            setattr(self, name, state_dict[name])

    def save_to_json(self, json_path: str | Path) -> None:
        """Write the state as strict JSON: sorted keys, and NaN or infinite numbers as strings."""
        text = json.dumps(_strict(self.state_dict()), indent=2, sort_keys=True, allow_nan=False) + "\n"
        Path(json_path).write_text(text, encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        """Read a state that `save_to_json`, or a checkpoint, wrote.

        Raises:
            ValueError: the file holds no state.
        """
        try:
            content = load_json(Path(json_path).read_text(encoding="utf-8"))
        except ContentError as error:
            raise ValueError(f"the trainer state {json_path} {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"the trainer state {json_path} holds a {type(content).__name__}; it must be an object")
        state = cls()
        state.load_state_dict(content)
        return state


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


@dataclass
class TrainerControl:
    """What is to happen next; callbacks set the flags.

    Attributes:
        should_training_stop: end the run after this step.
        should_epoch_stop: end this pass over the data after this step.
        should_save: save a checkpoint now.
        should_evaluate: evaluate now.
        should_log: log now.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def update(self, flags: dict[str, bool], source: str) -> None:
        """Set flags by name.

        Raises:
            ValueError: a name is not a flag; `source` says who sent it.
        """
        known = [f.name for f in fields(self)]
        if unknown := sorted(set(flags) - set(known)):
            raise ValueError(f"{source} returned unknown flags {unknown}; flags are {known}")
        for name, value in flags.items():
            setattr(self, name, bool(value))
