"""Events are methods of the list of callbacks, and functions put in the place of these methods send the events."""

import pytest

from tr_core import TrainerCallback
from tr_core.callback import EVENTS, CallbackList
from tr_log import ReportFile


def test_events_are_methods_of_the_callback_handler_too(make_trainer):
    class Metrics(TrainerCallback):
        seen = []

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            self.seen.append(metrics)

    trainer = make_trainer(callbacks=[Metrics])
    handler = trainer.callback_handler
    assert handler.on_evaluate(trainer.args, trainer.state, trainer.control, {"eval_a": 1.0}) is trainer.control
    handler.call_event("on_evaluate", trainer.args, trainer.state, trainer.control, metrics={"eval_b": 2.0})
    assert Metrics.seen == [{"eval_a": 1.0}, {"eval_b": 2.0}]
    assert "Metrics" in handler.callback_list
    assert handler.model is trainer.model
    assert handler.train_dataloader is None
    assert isinstance(handler.pop_callback(Metrics), Metrics)
    with pytest.raises(AttributeError, match="no attribute 'on_evaluation'; events are"):
        _ = handler.on_evaluation


class Steps(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs, model, **kwargs):
        self.seen.append((args, "loss" in logs, model))

    def on_step_end(self, args, state, control, loss, **kwargs):
        self.seen.append(loss.ndim)
        control.should_training_stop = state.global_step == 2
        return control


def test_a_call_event_that_was_assigned_sends_the_events_with_what_it_likes(make_trainer):
    callback, sent = Steps(), []
    trainer = make_trainer(8, callbacks=[callback], logging_steps=1, max_steps=4)
    handler = trainer.callback_handler

    def call_event(event, args, state, control, **extra):
        sent.append(event)
        for one in handler.callbacks:
            own = "own" if one is callback else args
            getattr(one, event)(own, state, control, model="mine", optimizer=handler.optimizer, **extra)
        return control

    handler.call_event = call_event
    handler.on_init_end(trainer.args, trainer.state, trainer.control)
    assert sent == ["on_init_end"]
    trainer.train()
    assert trainer.state.global_step == 2
    assert callback.seen[:2] == [0, ("own", True, "mine")]
    assert [sent.count(event) for event in ("on_init_end", "on_step_begin", "on_pre_optimizer_step")] == [1, 2, 2]
    assert "on_micro_batch_end" not in sent


def test_a_replaced_call_event_may_call_the_one_that_it_replaces(make_trainer):
    callback, sent = Steps(), []
    trainer = make_trainer(8, callbacks=[callback], logging_steps=1, max_steps=4)
    handler = trainer.callback_handler
    usual, log = handler.call_event, handler.on_log
    handler.call_event = lambda event, *given, **extra: sent.append(event) or usual(event, *given, **extra)
    handler.on_log = lambda args, state, control, logs: log(args, state, control, {**logs, "more": 1})
    trainer.train()
    assert trainer.state.global_step == 2
    assert callback.seen[:2] == [0, (trainer.args, True, trainer.model)]
    assert sent.count("on_step_end") == sent.count("on_log") - 1 == 2


def test_a_list_of_callbacks_with_its_own_call_event_sends_by_it(make_trainer):
    class Own(CallbackList):
        def call_event(self, event, args, state, control, **extra):
            sent.append(event)
            return super().call_event(event, args, state, control, **extra)

    callback, sent = Steps(), []
    trainer = make_trainer(8, logging_steps=1, max_steps=4)
    trainer.callback_handler = Own(trainer.callback_handler.context, [*trainer.callback_handler.callbacks, callback])
    trainer.train()
    assert trainer.state.global_step == 2
    assert sent.count("on_step_end") == 2
    assert callback.seen[1] == (trainer.args, True, trainer.model)


class Handler:
    """A handler as that of transformers, which hands on a part of its own."""

    reference = "first"

    def __init__(self, callbacks):
        self.callbacks, self.sent = list(callbacks), []

    def on_log(self, args, state, control, logs):
        return self.call_event("on_log", args, state, control, logs={**logs, "more": 1})

    def call_event(self, event, args, state, control, **extra):
        self.sent.append(event)
        given = {"model": self.model, "optimizer": self.optimizer, "reference": self.reference, **extra}
        for callback in self.callbacks:
            getattr(callback, event)(args, state, control, **given)
        return control


class Hearing(TrainerCallback):
    def __init__(self):
        self.heard = []

    def on_step_end(self, args, state, control, reference=None, **context):
        self.heard.append((state.global_step, reference, context["model"], context["optimizer"] is not None))

    def on_log(self, args, state, control, logs=None, **context):
        self.heard.append(logs["more"])


def test_a_handler_as_that_of_transformers_sends_the_events_of_the_trainer_it_is_assigned_to(make_trainer):
    trainer, callback = make_trainer(8, logging_steps=1, max_steps=2), Hearing()
    handler = Handler(trainer.callback_handler.callbacks)
    trainer.callback_handler = handler
    trainer.add_callback(callback)
    assert handler.callbacks[-1] is callback
    trainer.callback_handler.reference = "second"
    assert handler.reference == trainer.callback_handler.reference == "second"
    trainer.control = trainer.callback_handler.on_init_end(trainer.args, trainer.state, trainer.control)
    trainer.train()
    assert callback.heard == [(1, "second", trainer.model, True), 1, (2, "second", trainer.model, True), 1, 1]
    assert [handler.sent.count(event) for event in ("on_init_end", "on_train_end", "on_micro_batch_end")] == [1, 1, 0]
    handler.callbacks.remove(callback)
    assert callback not in trainer.callback_handler.callbacks
    trainer.callback_handler.callbacks = [callback]
    assert handler.callbacks == [callback]


def test_a_handler_without_callbacks_or_events_is_refused_when_it_is_assigned(make_trainer):
    trainer = make_trainer()
    with pytest.raises(TypeError, match="cannot send events: it needs a list `callbacks` and a method `call_event`"):
        trainer.callback_handler = object()


def test_a_handler_is_not_replaced_in_a_run(make_trainer):
    class Replacing(TrainerCallback):
        def on_step_end(self, args, state, control, **context):
            trainer.callback_handler = Handler([])

    trainer = make_trainer(callbacks=[Replacing()])
    with pytest.raises(RuntimeError, match="callback_handler was assigned while .*; call trainer.add_callback"):
        trainer.train()


def test_callbacks_of_these_packages_have_every_event_and_hear_only_those_that_they_use(make_trainer):
    handler = make_trainer(callbacks=[ReportFile()], disable_tqdm=False).callback_handler
    for callback in handler.callbacks:
        for event in EVENTS:
            if event != "on_micro_batch_end":
                assert callable(getattr(callback, event))
    assert not handler._listeners["on_substep_end"]
