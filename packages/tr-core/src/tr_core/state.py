"""Hold the progress of a run (`TrainerState`), what happens next (`TrainerControl`), and the arguments of events."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tr_args import TrainingArguments
from tr_core.checkpoint.log_files import FOLDER, LogFiles
from tr_log import get_logger
from tr_log.bounded_text import ContentError, load_json
from tr_log.formatting import to_strict
from tr_log.line_file import write_whole

logger = get_logger(__name__)

EARLIER = "log_history_before"  # where a checkpoint says in which files the entries before its own are


def resolve_steps(value: float | None, max_steps: int) -> int:
    """Convert an argument to a number of steps. A value below 1 is a share of the run.

    Args:
        value: the argument; None is the whole run, so once in the run.
        max_steps: optimizer steps of the run.
    """
    if value is None:
        return max_steps
    return max(math.ceil(value * max_steps) if value < 1 else int(value), 1)


@dataclass
class TrainerState:
    """Record the progress of a run; saved with every checkpoint as `trainer_state.json`.

    Attributes:
        epoch: epochs completed, as a fraction; 0 before training.
        global_step: completed optimizer steps.
        max_steps: optimizer steps of the whole run.
        logging_steps: steps between logs; a ratio is resolved to steps.
        eval_steps: steps between evaluations; a ratio is resolved to steps.
        save_steps: steps between checkpoints; a ratio is resolved to steps.
        train_batch_size: samples per device and micro-batch.
        num_train_epochs: greatest number of epochs begun.
        num_input_tokens_seen: elements of the main input used in training, if counted.
        total_flos: floating-point operations of all forward and backward passes, if the model can count them.
        log_history: every logged entry, each with its `step`.
        best_metric: best value so far of the metric that selects the best model.
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

    def compute_steps(self, args: TrainingArguments, max_steps: int) -> None:
        """Set the steps between logs, evaluations and checkpoints; a share is one of `max_steps`."""
        self.logging_steps = resolve_steps(args.logging_steps, max_steps)
        self.eval_steps = resolve_steps(args.eval_steps, max_steps)
        self.save_steps = resolve_steps(args.save_steps, max_steps)

    def state_dict(self, since: int = 0) -> dict[str, Any]:
        """Return all fields as plain values, which stay as they are; of the log the entries from number `since` on."""
        own = {f.name: copy.deepcopy(getattr(self, f.name)) for f in fields(self) if f.name != "log_history"}
        return own | {"log_history": [dict(entry) for entry in self.log_history[since:]]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore saved fields, but not which process this is. Skip unknown keys with a warning."""
        own = {"is_local_process_zero", "is_world_process_zero"}
        known = {f.name for f in fields(self)}
        if unknown := sorted(set(state_dict) - known):
            logger.warning("trainer state: skipped unknown keys %s, written by another version", unknown)
        for name in known & set(state_dict) - own:
            setattr(self, name, state_dict[name])

    def save_to_json(self, json_path: str | Path) -> None:
        """Write the state as strict JSON: sorted keys, and NaN or infinite numbers as strings."""
        text = json.dumps(to_strict(self.state_dict()), indent=2, sort_keys=True, allow_nan=False) + "\n"
        write_whole(Path(json_path), text.encode())

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        """Read a state that `save_to_json`, or a checkpoint, wrote, with the whole log.

        The earlier entries of a long log are in `log_history/` beside the checkpoint; a warning says if they are not.

        Raises:
            ValueError: the file holds no state.
        """
        try:
            content = load_json(Path(json_path).read_text(encoding="utf-8"))
        except ContentError as error:
            raise ValueError(f"the trainer state {json_path} {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"the trainer state {json_path} holds a {type(content).__name__}; it must be an object")
        if not isinstance(content.get("log_history", []), list):
            raise ValueError(f"the trainer state {json_path} has a log_history that is not a list")
        state, files = cls(), LogFiles()
        try:
            SavedState(state, files).load_state_dict(content)
        except ValueError as error:
            raise ValueError(f"the trainer state {json_path} cannot be read: {error}") from None
        files.read(state.log_history, [Path(json_path).absolute().parent.parent / FOLDER])
        return state


class SavedState:
    """The state of the trainer as a checkpoint holds it: without the entries that are in files."""

    def __init__(self, state: TrainerState, files: LogFiles) -> None:
        self._state, self._files = state, files

    def state_dict(self) -> dict[str, Any]:
        """Return the fields, with the entries after those in files, and where those are."""
        own = self._state.state_dict(self._files.count)
        return own | ({EARLIER: self._files.state_dict()} if self._files.count else {})

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the fields."""
        own = dict(state_dict)
        if (earlier := own.pop(EARLIER, None)) is not None:
            self._files.load_state_dict(earlier)
        self._state.load_state_dict(own)


@dataclass
class TrainerControl:
    """Hold the flags of what happens next; callbacks set them.

    Attributes:
        should_training_stop: end the run after this step.
        should_epoch_stop: end this epoch after this step.
        should_save: save a checkpoint now.
        should_evaluate: evaluate now.
        should_log: log now.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the flags, in the form of an `ExportableState` of transformers."""
        return {"args": {f.name: getattr(self, f.name) for f in fields(self)}, "attributes": {}}

    @classmethod
    def from_state(cls, state: Mapping[str, Mapping[str, Any]]) -> TrainerControl:
        """Return an object with the flags that `state` returned."""
        return cls(**state["args"])

    def update(self, flags: dict[str, bool], source: str) -> None:
        """Set flags by name.

        Raises:
            ValueError: a name is not a flag; the message names `source`, which sent it.
        """
        known = [f.name for f in fields(self)]
        if unknown := sorted(set(flags) - set(known)):
            raise ValueError(f"{source} returned unknown flags {unknown}; flags are {known}")
        for name, value in flags.items():
            setattr(self, name, bool(value))


def exports_state(callback: Any) -> bool:
    """Whether a callback has the methods of an `ExportableState`: `state` and `from_state`."""
    return callable(getattr(callback, "state", None)) and callable(getattr(callback, "from_state", None))


class EventContext(NamedTuple):  # a tuple: the loop makes one for each event
    """Hold the arguments of events.

    Attributes:
        loaders: `train_dataloader` of the run and `eval_dataloader` of the last evaluation; each is None before.
        loss: loss of the last step on this rank; None before the first step.
    """

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    model: nn.Module
    processing_class: Any
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: LRScheduler | None
    loaders: Mapping[str, Any]
    loss: torch.Tensor | None


class ExportedState:
    """Save what a callback's method `state` returns as a part of a checkpoint: `args` and `attributes`.

    Restored attributes are set on the callback. A constructor argument keeps its current value if the user changed it
    since the saved run. Every other argument comes from the checkpoint, because some callbacks keep their progress
    in arguments.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._given = self._read()["args"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, and the arguments that the callback was built with."""
        return {**self._read(), "given": self._given}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the callback. Checkpoints of other programs hold only the attributes."""
        callback, name = self._callback, type(self._callback).__name__
        if "given" not in state_dict:
            _set_attributes(callback, state_dict)
            return
        saved, then, own = state_dict["args"], state_dict["given"], self._given
        changed = {key for key in own if key in then and _differ(own[key], then[key])}
        for key in sorted(changed):
            logger.info("callback %s: %s: %r -> %r", name, key, then[key], own[key])
        wanted = {key: own[key] if key in changed else saved.get(key, own[key]) for key in own}
        if _differ(wanted, self._read()["args"]):
            # Builds a new one for what the class derives from its arguments; the user's object stays.
            vars(callback).update(vars(type(callback)(**copy.deepcopy(wanted))))
        _set_attributes(callback, state_dict["attributes"])

    def _read(self) -> dict[str, Any]:
        state, name = self._callback.state(), type(self._callback).__name__
        if not isinstance(state, Mapping) or not all(
            isinstance(state.get(part, {}), Mapping) for part in ("args", "attributes")
        ):
            raise TypeError(
                f"{name}.state() returned {state!r}; it must return a dict of two dicts: 'args', with what the class "
                "is called with, and 'attributes', with what is then set; or give the callback state_dict() and "
                "load_state_dict() in its place"
            )
        return {part: copy.deepcopy(dict(state.get(part, {}))) for part in ("args", "attributes")}


def _set_attributes(callback: Any, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(callback, name, value)


def _differ(one: Any, other: Any) -> bool:
    return bool(one != other)


_MUTATING = (
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "remove",
    "reverse",
    "sort",
    "__delitem__",
    "__iadd__",
    "__imul__",
    "__setitem__",
)


class WatchedList(list[Any]):
    """A list that calls a function after every change."""

    def __init__(self, items: Iterable[Any], on_change: Callable[[], None]) -> None:
        super().__init__(items)
        self._on_change = on_change

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as items and function: a copy built item by item would call a missing function."""
        return WatchedList, (list(self), self._on_change)


def _watched(name: str) -> Callable[..., Any]:
    usual = getattr(list, name)

    @wraps(usual)
    def change(self: WatchedList, *args: Any, **kwargs: Any) -> Any:
        answer = usual(self, *args, **kwargs)
        self._on_change()
        return answer

    return change


for _name in _MUTATING:
    setattr(WatchedList, _name, _watched(_name))
