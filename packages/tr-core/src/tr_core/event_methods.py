"""Send events as methods of the list of callbacks, and by functions that replace those methods.

Subclasses written for transformers call `callback_handler.on_log(...)` and put their own `call_event` in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from tr_args import TrainingArguments
from tr_core.signatures import is_overridden, names_argument
from tr_core.state import EventContext, TrainerControl, TrainerState

# What an event gets by position after `(args, state, control)`, where it is called as a method.
_POSITIONAL = {"on_evaluate": ("metrics",), "on_predict": ("metrics",), "on_log": ("logs",)}

# What callbacks get by keyword is an attribute of the list too.
_PARTS = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
_GIVEN = frozenset({*_PARTS, "tokenizer"})

# A function that was written for transformers calls each event on every callback. It does not know these.
_ONLY_HERE = frozenset({"on_micro_batch_end", "on_draw"})


class EventMethods:
    """Give a list of callbacks the methods and attributes that subclasses written for transformers use.

    A `call_event` of a subclass or one that was assigned to the list sends the events in its place, with the arguments
    of transformers: `call_event(event, args, state, control, **extra)`. So does an assigned `on_log`, for this event.
    """

    events: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]] = _PARTS
    context: Callable[[], EventContext]
    fire: Callable[..., None]
    _index: Callable[[], None]
    _listeners: dict[str, list[Any]]
    # Of each event that a function of the user's sends: the methods that it would be sent to otherwise.
    _behind: dict[str, list[Any]]

    def call_event(self, event: str, *given: Any, **extra: Any) -> TrainerControl:
        """Send an event as subclasses written for transformers do, and return the control object.

        Events are methods too: `on_log(args, state, control, logs)`. Callbacks get the Trainer's own first three, or
        those that a function in the place of this method hands on.
        """
        named = {**_named(event, given), **extra}
        if event not in self._behind:
            self.fire(event, **named)
            return self.context().control
        now = self.context()
        first_three: tuple[Any, ...] = (*given[:3], *(now.args, now.state, now.control)[len(given) :])
        args, state, control = first_three
        arguments = {**{name: getattr(self, name) for name in _PARTS}, "tokenizer": now.processing_class, **named}
        for method in self._behind[event]:
            answer = method(args, state, control, **arguments)
            if answer is not None and answer is not control:
                apply_answer(answer, control, method)
        return control

    def __getattr__(self, name: str) -> Any:
        if name in _PARTS:  # `callback_handler.model` and the like
            now = self.context()
            return now.loaders[name] if name in now.loaders else getattr(now, name)
        if name not in self.events:
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}; events are {', '.join(self.events)}"
            )
        return partial(self._send, name)

    def _send(self, event: str, *given: Any, **extra: Any) -> TrainerControl:
        if event in vars(self):  # the method that a function was put in the place of, called by that function
            return self.call_event(event, *given[:3], **_named(event, given), **extra)
        self._index()  # a function may have been assigned since the last event
        self.fire(event, **_named(event, given), **extra)
        return self.context().control

    def _send_by_replacements(self) -> None:
        """Send events by the functions that replace their methods, instead of to the callbacks."""
        self._behind = {}
        replaces_all = is_overridden(self, "call_event", EventMethods)
        for event in self.events:
            own = vars(self).get(event) or getattr(type(self), event, None)
            if (replaces_all and event not in _ONLY_HERE) or own is not None:
                self._behind[event] = self._listeners[event]
                self._listeners[event] = [partial(self._hand_over, event)]

    def _hand_over(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **arguments: Any
    ) -> Any:
        extra = {name: value for name, value in arguments.items() if name not in _GIVEN}
        if any(names_argument(method, "loss") for method in self._behind[event]) and event == "on_step_end":
            extra["loss"] = self.context().loss
        if event in vars(self) or hasattr(type(self), event):
            return getattr(self, event)(args, state, control, **extra)
        return self.call_event(event, args, state, control, **extra)


def apply_answer(answer: Any, control: TrainerControl, method: Any) -> None:
    """Set the flags that a method returned: a control object, or a dict of flags.

    Raises:
        TypeError: it is neither.
    """
    source = getattr(method, "__qualname__", repr(method))
    if isinstance(answer, TrainerControl):
        control.update(vars(answer), source)
    elif isinstance(answer, dict):
        control.update(answer, source)
    else:
        raise TypeError(
            f"{source} returned {answer!r}; an event returns None, the control object, or a dict of its flags"
        )


def _named(event: str, given: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(_POSITIONAL.get(event, ()), given[3:], strict=False))
