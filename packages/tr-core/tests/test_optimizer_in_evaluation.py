"""When an optimizer that knows two sets of weights is asked to exchange them."""

from types import SimpleNamespace

import pytest

from tr_core.callbacks.evaluation_weights import OptimizerMode


def optimizer_with(calls, modes=("train", "eval")):
    return SimpleNamespace(**{mode: lambda mode=mode: calls.append(mode) for mode in modes})


def test_it_is_asked_once_before_and_once_after_however_deep():
    calls, mode = [], OptimizerMode()
    optimizer = optimizer_with(calls)
    with mode.evaluating(optimizer):
        assert mode.is_evaluating
        with mode.evaluating(optimizer):
            assert calls == ["eval"]
        assert calls == ["eval"]
    assert calls == ["eval", "train"]
    assert not mode.is_evaluating
    with pytest.raises(KeyError), mode.evaluating(optimizer):
        raise KeyError
    assert calls == ["eval", "train"] * 2


def test_outside_of_a_run_it_is_not_asked(make_trainer):
    calls, trainer = [], make_trainer(8)
    trainer.optimizer = optimizer_with(calls)
    with trainer.optimizer_in_evaluation():
        assert calls == []
    trainer.is_in_train = True
    with trainer.optimizer_in_evaluation():
        assert calls == ["eval"]
    assert calls == ["eval", "train"]


@pytest.mark.parametrize("modes", [(), ("train",), ("eval",)])
def test_one_without_both_methods_is_not_asked(modes):
    calls = []
    with OptimizerMode().evaluating(optimizer_with(calls, modes)):
        assert calls == []
    assert calls == []
