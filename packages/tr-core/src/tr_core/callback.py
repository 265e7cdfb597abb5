"""Define the events of a run, and send each event to the callbacks that define it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

from tr_args import TrainingArguments
from tr_core.protocols import Stateful
from tr_core.signatures import is_overridden, names_argument
from tr_core.state import EventContext, ExportedState, TrainerControl, TrainerState, WatchedList, exports_state

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_micro_batch_end",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_evaluate",
    "on_predict",
    "on_prediction_step",
    "on_save",
    "on_log",
    "on_push_begin",
)

# Not among them: it may come from another thread, so that it has no control to steer and no state to look at.
CHECKPOINT = "on_checkpoint"

# The flags that an event finds cleared, unless it is fired within another one.
_CLEARED = {
    "on_train_begin": ("should_training_stop", "should_log", "should_evaluate", "should_save"),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}

# Events at which it is looked at once more which events every callback defines: methods may be set on it at any time.
_REINDEX_AT = frozenset({"on_train_begin", "on_epoch_begin", "on_evaluate", "on_save"})


class TrainerCallback:
    """Watch a run and steer it: inherit and override the events that matter.

    Each gets `(args, state, control, **kwargs)` with the keyword arguments `model`, `processing_class`, `tokenizer`
    (the same object), `optimizer`, `lr_scheduler`, `train_dataloader`, `eval_dataloader`; `on_log` also gets `logs`,
    `on_evaluate` and `on_predict` get `metrics`, `on_train_end` gets `error`, the exception that ended the run or
    None. `on_micro_batch_end` gets `loss`, `inputs` and `outputs`, and a method `on_step_end` that names `loss` gets
    the step's. An event returns None, or the control object, or a dict of its flags, as
    `{"should_training_stop": True}`. Of several ranks each has callbacks of its own, and what one of them asks for all
    do: at once if it is asked for on every rank, or in an event that follows an exchange; else at the end of the next
    step.
    `on_optimizer_step` gets `applied`, False where a float16 overflow left the update out; what `on_nonfinite` leaves
    out is known to the device alone, and `applied` is True.
    A callback with `state_dict` and `load_state_dict` is saved in every checkpoint and restored from it; so is one that
    has `state` and `from_state`, as an `ExportableState` of transformers. One that has the model evaluated with other
    weights than those that train is a `tr_core.protocols.EvaluationWeights`.

    Any object with methods of these names will do; only the events that it defines reach it.
    """

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """At the end of the Trainer's construction."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Before the first step, with everything prepared and restored."""

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """At the end of training, whichever way it ends, with `error`."""

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Before a pass over the data."""

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After a pass over the data, one that was stopped early included."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Before the first micro-batch of an optimizer step."""

    def on_micro_batch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """After forward and backward of each micro-batch, before `on_substep_end`.

        With `loss`, its share of the step's loss on this rank: a detached scalar on the device, not scaled for float16;
        the step's micro-batches add up to the step's loss, so that of N it is an N-th of its own mean. With `inputs`,
        the batch as the loader gave it, with host tensors. With `outputs`, what the model gave, detached, if the method
        of some callback names that parameter; else None, and nothing is kept. An override of `training_step` that does
        not call the one it overrides gives none. Reading a tensor that is on the device waits for it:
        `trainer.log_metric` averages without.
        """

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """After each micro-batch of a step but the last."""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """After clipping, before the optimizer's step."""

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """After the optimizer's step, before the schedule's and before gradients are cleared, with `applied`."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After a step, with `state.global_step` and `state.epoch` advanced.

        A method that names the parameter `loss` gets the step's loss on this rank, a detached scalar on the device.
        """

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an evaluation, once for each data set, with `metrics`."""

    def on_predict(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After a prediction, with `metrics`."""

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """After each batch of an evaluation or prediction."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After a checkpoint is complete."""

    def on_checkpoint(self, folder: Path, step: int) -> None:
        """As soon as a checkpoint is complete in `folder`, before any older one is removed; on the main process only.

        It is given these two and returns nothing. With `save_async` it is called by the thread that writes, while
        training goes on: it must not touch the model, and return soon. What it raises is logged.
        """

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an entry was added to `state.log_history`, with `logs`."""

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Before files are pushed to the Hub."""


class CallbackList:
    """The callbacks of a run in order, and for each event the methods that define it.

    Args:
        context: gives what the events are given, as it is when it is called: parts of a Trainer may be assigned.
        callbacks: callbacks or their classes.

    Attributes:
        context: the same.
        callbacks: the callbacks, in the order they are called; the list may be changed, or another one set.
        wants_outputs: whether one of them wants the outputs of every micro-batch.
    """

    def __init__(self, context: Callable[[], EventContext], callbacks: Iterable[Any] = ()) -> None:
        self.context = context
        self._exported: dict[int, ExportedState] = {}
        self._listeners: dict[str, list[Any]] = {event: [] for event in EVENTS}
        self._last: dict[str, list[Any]] = {}
        self._depth = 0
        self.wants_outputs = False
        self._callbacks = WatchedList((), self._index)
        for callback in callbacks:
            self.add(callback)

    @property
    def callbacks(self) -> list[Any]:
        """Return the callbacks, in the order they are called."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Iterable[Any]) -> None:
        self._callbacks = WatchedList(map(_checked, callbacks), self._index)
        self._index()

    def add(self, callback: Any, *, first: bool = False) -> None:
        """Append a callback, or have it called before all others; a class is instantiated.

        Raises:
            TypeError: it defines none of the events.
        """
        place = 0 if first else len(self.callbacks)
        self.callbacks.insert(place, _checked(callback() if isinstance(callback, type) else callback))

    def pop(self, callback: Any) -> Any:
        """Remove and return a callback: this object, or the first of this class; None if there is none.

        Where none is of the class, the first of these packages that has the class's name is meant: scripts remove
        `PrinterCallback` as they have imported it from the library that they come from.
        """
        for matches in (_matches, _has_same_name):
            for number, candidate in enumerate(self.callbacks):
                if matches(candidate, callback):
                    del self.callbacks[number]
                    return candidate
        return None

    def listen(self, event: str, method: Callable[..., Any]) -> None:
        """Have a method called at an event, after those of all callbacks; it is none of them, and has no state.

        A signal handler may call this at any moment: what is being sent just then reaches the method too.
        """
        last = self._last.setdefault(event, [])
        if method not in last:
            last.append(method)
            self._listeners[event].append(method)

    def unlisten(self, event: str, method: Callable[..., Any]) -> None:
        """Take back what `listen` did."""
        if method in self._last.get(event, ()):
            self._last[event].remove(method)
            self._index()

    def fire(self, event: str, **extra: Any) -> None:
        """Clear the flags that `event` clears, call every method that defines it, and take in what each returns.

        Within another event, as where a callback evaluates, no flag is cleared: what the run itself is about to do it
        does all the same.
        """
        cleared = () if self._depth else _CLEARED.get(event, ())
        if event in _REINDEX_AT:
            self._index()
        listeners = self._listeners[event]
        if not listeners and not cleared:
            return
        now = self.context()
        control = now.control
        for flag in cleared:
            setattr(control, flag, False)
        arguments = {
            "model": now.model,
            "processing_class": now.processing_class,
            "tokenizer": now.processing_class,
            "optimizer": now.optimizer,
            "lr_scheduler": now.lr_scheduler,
            **now.loaders,
            **extra,
        }
        self._depth += 1
        try:
            for method in listeners:
                answer = method(now.args, now.state, control, **arguments)
                if answer is not None and answer is not control:
                    _apply(answer, control, method)
        finally:
            self._depth -= 1

    def announce(self, folder: Path, step: int) -> None:
        """Tell every callback that defines `on_checkpoint` of a checkpoint that is complete.

        Raises:
            Exception: what the last that failed raised; the others were told all the same.
        """
        failure: Exception | None = None
        for callback in list(self.callbacks):
            try:
                if _defines(callback, CHECKPOINT):
                    callback.on_checkpoint(folder, step)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    def stateful(self) -> dict[str, Stateful]:
        """Return the callbacks that have a state, by class name; a second of one class is `Name#2`."""
        named: dict[str, Stateful] = {}
        for callback in self.callbacks:
            part = self._exported.get(id(callback), callback)
            if isinstance(part, Stateful):
                base = name = type(callback).__name__
                number = 1
                while name in named:
                    number += 1
                    name = f"{base}#{number}"
                named[name] = part
        return named

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all callbacks that have one, by name."""
        return {name: callback.state_dict() for name, callback in self.stateful().items()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Hand each callback its saved state; one that was not saved keeps its own."""
        for name, callback in self.stateful().items():
            if name in state_dict:
                callback.load_state_dict(state_dict[name])

    def _index(self) -> None:
        for callback in self._callbacks:  # what was put into the list itself is looked at here first
            _checked(callback)
        exporting = [c for c in self._callbacks if exports_state(c) and not isinstance(c, Stateful)]
        self._exported = {id(c): self._exported.get(id(c)) or ExportedState(c) for c in exporting}
        # Made once here, so that a step costs nothing for events that nobody listens to.
        self._listeners = {
            event: [getattr(callback, event) for callback in self.callbacks if _defines(callback, event)]
            for event in EVENTS
        }
        self.wants_outputs = any(names_argument(method, "outputs") for method in self._listeners["on_micro_batch_end"])
        steps = self._listeners["on_step_end"]
        steps[:] = [self._with_loss(method) if names_argument(method, "loss") else method for method in steps]
        for event in list(self._last):  # of now: a signal may have added one while all this was made
            listeners = self._listeners[event]
            listeners += [method for method in self._last[event] if method not in listeners]

    def _with_loss(self, method: Any) -> Any:
        @wraps(method)
        def call(*args: Any, **context: Any) -> Any:
            return method(*args, loss=self.context().loss, **context)

        return call


def _defines(callback: Any, event: str) -> bool:
    return getattr(callback, event, None) is not None and is_overridden(callback, event, TrainerCallback)


def _matches(candidate: Any, callback: Any) -> bool:
    return candidate is callback or (isinstance(callback, type) and type(candidate) is callback)


def _has_same_name(candidate: Any, callback: Any) -> bool:
    own = type(candidate)
    return isinstance(callback, type) and own.__name__ == callback.__name__ and own.__module__.startswith("tr_")


def _checked(callback: Any) -> Any:
    if isinstance(callback, type):
        raise TypeError(f"{callback!r} is a class; add_callback makes an instance of it, a list of callbacks does not")
    if isinstance(callback, TrainerCallback) or any(_defines(callback, event) for event in (*EVENTS, CHECKPOINT)):
        return callback
    raise TypeError(
        f"{callback!r} is no callback: it defines none of the events; inherit from TrainerCallback or define one of "
        + ", ".join(EVENTS)
    )


def _apply(answer: Any, control: TrainerControl, method: Any) -> None:
    source = getattr(method, "__qualname__", repr(method))
    if isinstance(answer, TrainerControl):
        control.update(vars(answer), source)
    elif isinstance(answer, dict):
        control.update(answer, source)
    else:
        raise TypeError(
            f"{source} returned {answer!r}; an event returns None, the control object, or a dict of its flags"
        )
