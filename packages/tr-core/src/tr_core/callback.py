"""Define the events of a run, and send each event to the callbacks that define it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from tr_args import TrainingArguments
from tr_core.event_methods import EventMethods, apply_answer
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
    "on_draw",
    "on_push_begin",
)

# Not an event: it may fire in the writer thread, so it gets no control and no state.
CHECKPOINT = "on_checkpoint"

# The flags that an event clears, unless it is fired within another one.
_CLEARED = {
    "on_train_begin": ("should_training_stop", "should_log", "should_evaluate", "should_save"),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}

# At these events the index of methods is rebuilt: methods may be set on a callback at any time.
_REINDEX_AT = frozenset({"on_train_begin", "on_epoch_begin", "on_evaluate", "on_save"})

# The other events do nothing if no method listens. A step sends five of them.
_ALWAYS_SENT = _REINDEX_AT | set(_CLEARED)


class TrainerCallback:
    """Watch and steer a run: inherit and override the events that matter.

    Each event gets `(args, state, control, **kwargs)`. The keyword arguments are `model`, `processing_class`,
    `tokenizer` (the same object), `optimizer`, `lr_scheduler`, `train_dataloader` and `eval_dataloader`. `on_log` also
    gets `logs`; `on_evaluate` and `on_predict` get `metrics`. `on_train_end` gets `error`, the exception that ended the
    run or None. `on_micro_batch_end` gets `loss`, `inputs` and `outputs`. A method `on_step_end` that names `loss` gets
    the step's loss. An event returns None, the control object, or a dict of its flags, as
    `{"should_training_stop": True}`.

    Each rank has its own callbacks. All ranks do what a callback of one rank asks for. They do it at once if every rank
    asks, or in an event that follows an exchange. Otherwise they do it at the end of the next step.

    `on_optimizer_step` gets `applied`, which is False where a float16 overflow skipped the update. Only the device
    knows which updates `on_nonfinite` leaves out, so `applied` is True for those too. For them it gets `left_out`: a
    scalar tensor on the device, not 0 where the update was left out, or None where `on_nonfinite` leaves out none.
    Reading it waits for the device; `torch.where(left_out, ...)` does not.

    Every checkpoint saves and restores a callback with `state_dict` and `load_state_dict`. It also saves one with
    `state` and `from_state`, as an `ExportableState` of transformers. A callback that swaps in other weights for
    evaluation is a `tr_core.protocols.EvaluationWeights`.

    Any object with methods of these names works. It gets only the events that it defines.
    """

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """At the end of the Trainer's construction."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Before the first step, with everything prepared and restored."""

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """At the end of training, also after an exception, with `error`."""

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Before an epoch."""

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an epoch, also after one that was stopped early."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Before the first micro-batch of an optimizer step."""

    def on_micro_batch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """After forward and backward of each micro-batch, before `on_substep_end`.

        `loss` is the micro-batch's share of the step's loss on this rank: a detached scalar on the device, not scaled
        for float16. The shares of a step add up to its loss, so with N micro-batches a share is its own mean over N.
        `inputs` is the batch as the loader gave it, with host tensors. `outputs` is what the model returned, detached,
        if the method of some callback names that parameter. Otherwise it is None, and nothing is kept. It is also None
        where an override of `training_step` does not call the overridden method. Reading a tensor on the device waits
        for the device. `trainer.log_metric` averages without waiting.
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
        """After the optimizer's step, before the schedule's, with the gradients, `applied` and `left_out`."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After a step, with `state.global_step` and `state.epoch` advanced.

        A method that names the parameter `loss` gets the step's loss on this rank: a detached scalar on the device.
        """

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an evaluation, once for each dataset, with `metrics`."""

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

        It gets these two arguments and returns nothing. With `save_async` the writer thread calls it during training:
        it must not touch the model, and it must return soon. Its exceptions are logged.
        """

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """After an entry was added to `state.log_history`, with `logs`."""

    def on_draw(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """For what is logged to be drawn, with `drawings`: objects such as `tr_log.Table`, by name."""

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Before files are pushed to the Hub."""


class CallbackList(EventMethods):
    """Hold the callbacks of a run in order, and for each event the methods that define it.

    Args:
        context: returns the arguments of the events. It is called for each event: parts of a Trainer may be assigned.

    Attributes:
        wants_outputs: whether one of them wants the outputs of every micro-batch.
    """

    events = EVENTS

    def __init__(self, context: Callable[[], EventContext], callbacks: Iterable[Any] = ()) -> None:
        self.context = context
        self._exported: dict[int, ExportedState] = {}
        self._listeners: dict[str, list[Any]] = {event: [] for event in EVENTS}
        self._behind, self._last = {}, {}
        self._depth = 0
        self.wants_outputs = False
        self._callbacks = WatchedList((), self._index)
        for callback in callbacks:
            self.add(callback)

    @property
    def callbacks(self) -> list[Any]:
        """Return the callbacks, in the order of their calls."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Iterable[Any]) -> None:
        self._callbacks = WatchedList(map(_checked, callbacks), self._index)
        self._index()

    def add(self, callback: Any, *, first: bool = False) -> None:
        """Append a callback, or insert it before all others; instantiate a class.

        Raises:
            TypeError: the callback defines none of the events.
        """
        place = 0 if first else len(self.callbacks)
        self.callbacks.insert(place, _checked(callback() if isinstance(callback, type) else callback))

    def pop(self, callback: Any) -> Any:
        """Remove and return a callback: this object, or the first of this class; None if there is none.

        If no callback is of the class, it removes the first one of these packages with the same class name: ported
        scripts remove `PrinterCallback` as imported from their original library.
        """
        for matches in (_matches, _has_same_name):
            for number, candidate in enumerate(self.callbacks):
                if matches(candidate, callback):
                    del self.callbacks[number]
                    return candidate
        return None

    def listen(self, event: str, method: Callable[..., Any]) -> None:
        """Call a method at an event, after the methods of all callbacks. It is not a callback and has no state.

        A signal handler may call this at any moment. An event that is being sent at that moment reaches the method too.
        """
        last = self._last.setdefault(event, [])
        if method not in last:
            last.append(method)
            self._listeners[event].append(method)

    def unlisten(self, event: str, method: Callable[..., Any]) -> None:
        """Undo `listen`."""
        if method in self._last.get(event, ()):
            self._last[event].remove(method)
            self._index()

    def listeners(self, event: str) -> list[Callable[..., Any]]:
        """Return the methods that `fire` calls for an event."""
        return self._listeners[event]

    def fire(self, event: str, **extra: Any) -> None:
        """Clear the flags of `event`, call every method that defines it, and apply what each returns.

        Within another event, as where a callback evaluates, no flag is cleared: the run still does what it was about
        to do.
        """
        if not self._listeners[event] and event not in _ALWAYS_SENT:
            return
        if event in _REINDEX_AT:
            self._index()
        now = self.context()
        control = now.control
        for flag in () if self._depth else _CLEARED.get(event, ()):
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
            for method in self._listeners[event]:
                answer = method(now.args, now.state, control, **arguments)
                if answer is not None and answer is not control:
                    apply_answer(answer, control, method)
        finally:
            self._depth -= 1

    add_callback, pop_callback, remove_callback = add, pop, pop

    @property
    def callback_list(self) -> str:
        """The names of the callbacks' classes, one a line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def announce(self, folder: Path, step: int) -> None:
        """Call `on_checkpoint` of every callback that defines it, for a complete checkpoint.

        Raises:
            Exception: the exception of the last callback that failed. All others were still called.
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
        """Return the callbacks that have a state, by class name; the second of one class is `Name#2`."""
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
        """Load each callback's saved state; a callback without one keeps its own."""
        for name, callback in self.stateful().items():
            if name in state_dict:
                callback.load_state_dict(state_dict[name])

    def _index(self) -> None:
        for callback in self._callbacks:  # a callback put into the list directly is checked here first
            _checked(callback)
        exporting = [c for c in self._callbacks if exports_state(c) and not isinstance(c, Stateful)]
        self._exported = {id(c): self._exported.get(id(c)) or ExportedState(c) for c in exporting}
        # Built once here, so that a step costs nothing for events without listeners.
        self._listeners = {
            event: [getattr(callback, event) for callback in self.callbacks if _defines(callback, event)]
            for event in EVENTS
        }
        self.wants_outputs = any(names_argument(method, "outputs") for method in self._listeners["on_micro_batch_end"])
        steps = self._listeners["on_step_end"]
        steps[:] = [self._with_loss(method) if names_argument(method, "loss") else method for method in steps]
        self._send_by_replacements()
        for event in list(self._last):  # a copy: a signal handler may have added an event meanwhile
            listeners = self._listeners[event]
            listeners += [method for method in self._last[event] if method not in listeners]

    def _with_loss(self, method: Any) -> Any:
        @wraps(method)
        def call(*args: Any, **context: Any) -> Any:
            return method(*args, **{**context, "loss": self.context().loss})

        return call


class AdoptedCallbacks(CallbackList):
    """Hold the callbacks of a `CallbackHandler` of transformers, which itself sends every event to them.

    Both have one list of callbacks. The handler's other attributes are read and set here too.

    Args:
        handler: a handler, or one of a subclass.
        context: as in `CallbackList`; the handler's `model`, `optimizer` and the like are set from it.
    """

    def __init__(self, handler: Any, context: Callable[[], EventContext]) -> None:
        super().__init__(context, handler.callbacks)
        self.handler = handler
        self._index()

    def call_event(self, event: str, *given: Any, **extra: Any) -> Any:
        """Have the handler send an event."""
        for name in self.parts:
            setattr(self.handler, name, getattr(self, name))
        send = getattr(self.handler, event, None) or partial(self.handler.call_event, event)
        return send(*given, **extra)

    def _index(self) -> None:
        if "handler" in vars(self):
            self.handler.callbacks = self._callbacks
        super()._index()

    def __getattr__(self, name: str) -> Any:
        is_own = name in (*self.parts, *self.events) or "handler" not in vars(self)
        return super().__getattr__(name) if is_own else getattr(self.handler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in (*vars(self), *self.events) or hasattr(type(self), name) or "handler" not in vars(self)
        object.__setattr__(self if is_own else self.handler, name, value)


def adopted(handler: Any, context: Callable[[], EventContext]) -> CallbackList:
    """Return a list of callbacks for a handler that was assigned to a Trainer.

    Raises:
        TypeError: it is neither such a list nor made as a `CallbackHandler` of transformers.
    """
    if isinstance(handler, CallbackList):
        return handler
    if not isinstance(getattr(handler, "callbacks", None), list) or not callable(getattr(handler, "call_event", None)):
        raise TypeError(
            f"trainer.callback_handler = {handler!r} cannot send events: it needs a list `callbacks` and a method "
            "`call_event`, as a CallbackHandler of transformers has; or call trainer.add_callback"
        )
    return AdoptedCallbacks(handler, context)


def _defines(callback: Any, event: str) -> bool:
    method = getattr(callback, event, None)
    # Callbacks of packages that know no Trainer have methods that do nothing, for trainers that call every event.
    does_something = method is not None and getattr(method, "is_no_event", None) is not True
    return does_something and is_overridden(callback, event, TrainerCallback)


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
        f"{callback!r} is not a callback: it defines none of the events; inherit from TrainerCallback or define one of "
        + ", ".join(EVENTS)
    )
