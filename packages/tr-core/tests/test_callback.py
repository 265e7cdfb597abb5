"""The list of callbacks may be changed by hand, and events within events leave the flags of the run as they are."""

import copy
import pickle

import pytest
from support.callbacks import on
from support.data import samples
from support.runs import steps_with

from tr_core import TrainerCallback
from tr_core.callback import WatchedList


class Steps(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


CHANGES = {
    "append": (lambda items: items.append(1), [3, 2, 1]),
    "clear": (lambda items: items.clear(), []),
    "delete": (lambda items: items.__delitem__(0), [2]),
    "extend": (lambda items: items.extend([1]), [3, 2, 1]),
    "add": (lambda items: items.__iadd__([1]), [3, 2, 1]),
    "insert": (lambda items: items.insert(0, 1), [1, 3, 2]),
    "pop": (lambda items: items.pop(), [3]),
    "remove": (lambda items: items.remove(3), [2]),
    "repeat": (lambda items: items.__imul__(2), [3, 2, 3, 2]),
    "reverse": (lambda items: items.reverse(), [2, 3]),
    "set": (lambda items: items.__setitem__(0, 1), [1, 2]),
    "sort": (lambda items: items.sort(), [2, 3]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_watched_list_calls_after_every_change(name):
    change, expected = CHANGES[name]
    seen = []
    items = WatchedList([3, 2], lambda: seen.append(list(items)))
    change(items)
    assert items == expected
    assert seen == [expected]


def test_a_trainer_and_its_callbacks_can_be_copied(make_trainer):
    trainer = make_trainer(4, callbacks=[Steps()])
    other = copy.deepcopy(trainer.callback_handler)
    other.callbacks.append(Steps())
    assert len(other.callbacks) == len(trainer.callback_handler.callbacks) + 1
    assert pickle.loads(pickle.dumps(WatchedList([1], int))) == [1]


def test_a_list_of_callbacks_that_is_set_is_the_one_called(make_trainer):
    first, second = Steps(), Steps()
    trainer = make_trainer(8, callbacks=[first])
    trainer.callback_handler.callbacks = [*trainer.callback_handler.callbacks[:-1], second]
    trainer.train()
    assert (first.steps, second.steps) == ([], [1, 2])


def test_what_is_no_callback_is_refused_in_the_list_too(make_trainer):
    trainer = make_trainer(4)
    with pytest.raises(TypeError, match="is not a callback: it defines none of the events"):
        trainer.callback_handler.callbacks = [print]
    with pytest.raises(TypeError, match="is a class; add_callback makes an instance of it"):
        trainer.callback_handler.callbacks.append(Steps)


def test_a_method_set_on_a_callback_is_called_from_the_next_epoch(make_trainer):
    steps = []

    class Late(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                self.on_step_begin = lambda args, state, control, **kwargs: steps.append(state.global_step)

    make_trainer(8, callbacks=[Late()], num_train_epochs=2).train()
    assert steps == [2, 3]


def test_a_log_and_an_evaluation_within_an_event_leave_those_of_the_run(make_trainer):
    trainer = make_trainer(8, eval_dataset=samples(4), eval_strategy="steps", eval_steps=1)

    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.evaluate(metric_key_prefix="mine")
            trainer.log({"note": 1.0})

    trainer.add_callback(Evaluates())
    trainer.train()
    history = trainer.state.log_history
    for name in ("loss", "eval_loss", "mine_loss", "note"):
        assert [entry["step"] for entry in history if name in entry] == [1, 2], name


def test_an_exception_in_an_event_leaves_the_next_run_its_flags(make_trainer):
    trainer = make_trainer(8, logging_steps=2)

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise ZeroDivisionError

    failing = Fails()
    trainer.add_callback(failing)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.remove_callback(failing)
    trainer.train()
    assert steps_with(trainer, "loss") == [2]


def test_training_within_training_is_refused(make_trainer):
    trainer = make_trainer(8)
    trainer.add_callback(on("on_step_end", lambda **_: trainer.train()))
    with pytest.raises(
        RuntimeError, match=r"train\(\) was called while this Trainer is training already, at step 1 of 2"
    ):
        trainer.train()


def test_a_class_of_the_same_name_from_elsewhere_removes_the_callback_of_these_packages(make_trainer):
    class PrinterCallback(TrainerCallback):
        pass

    trainer = make_trainer(4)
    kinds = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert type(trainer.pop_callback(PrinterCallback)).__module__.startswith("tr_log")
    kinds.remove("PrinterCallback")
    assert [type(callback).__name__ for callback in trainer.callback_handler.callbacks] == kinds
    assert trainer.pop_callback(PrinterCallback) is None


def test_a_class_of_ones_own_is_removed_before_one_of_its_name(make_trainer):
    class PrinterCallback(TrainerCallback):
        pass

    mine = PrinterCallback()
    trainer = make_trainer(4, callbacks=[mine])
    assert trainer.pop_callback(PrinterCallback) is mine
