"""Which arguments a function takes, and which methods are those of a user."""

import functools

import pytest

from tr_core import Seq2SeqTrainer, Trainer
from tr_core.signatures import is_overridden, names_argument, takes_argument

OWN = ("prediction_step", "evaluate", "predict", "get_train_dataloader", "compute_loss", "floating_point_ops")


@pytest.mark.parametrize("kind", [Trainer, Seq2SeqTrainer])
def test_no_method_of_our_own_classes_counts_as_a_users(kind):
    assert not kind.__new__(kind).overrides(*OWN)


@pytest.mark.parametrize("kind", [Trainer, Seq2SeqTrainer])
@pytest.mark.parametrize("name", OWN)
def test_a_method_of_a_subclass_counts_as_a_users(kind, name):
    class Own(kind):
        pass

    assert not Own.__new__(Own).overrides(name)
    # One that says it is the original, as decorators have it, is another one all the same.
    setattr(Own, name, functools.wraps(getattr(kind, name))(lambda self, *args, **kwargs: None))
    trainer = Own.__new__(Own)
    assert trainer.overrides(name)
    assert trainer.overrides("get_eval_dataloader", name)
    assert not trainer.overrides("get_eval_dataloader")


def test_a_function_assigned_to_an_object_replaces_its_method():
    class Callback:
        def on_log(self):
            pass

    callback = Callback()
    assert not is_overridden(callback, "on_log", Callback)
    callback.on_log = lambda: None
    assert is_overridden(callback, "on_log", Callback)


def test_a_parameter_among_others_is_not_named():
    assert names_argument(lambda outputs, **others: None, "outputs")
    assert not names_argument(lambda **others: None, "outputs")


def test_an_argument_is_taken_by_its_name_or_by_keywords_of_any_name():
    assert takes_argument(lambda a, count=None: None, "count")
    assert takes_argument(lambda **others: None, "count")
    assert not takes_argument(lambda *count: None, "other")
    assert not takes_argument(lambda a: None, "count")
