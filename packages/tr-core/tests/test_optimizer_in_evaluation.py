"""When an optimizer that knows two sets of weights is asked to exchange them."""

from types import SimpleNamespace

import pytest

from tr_core.callbacks.evaluation_weights import optimizer_in_evaluation


def trainer_with(calls, *, is_in_train=True, modes=("train", "eval")):
    optimizer = SimpleNamespace(**{mode: lambda mode=mode: calls.append(mode) for mode in modes})
    return SimpleNamespace(is_in_train=is_in_train, is_optimizer_in_evaluation=False, optimizer=optimizer)


def test_within_a_run_it_is_asked_once_before_and_once_after_however_deep():
    calls = []
    trainer = trainer_with(calls)
    with optimizer_in_evaluation(trainer):
        assert trainer.is_optimizer_in_evaluation
        with optimizer_in_evaluation(trainer):
            assert calls == ["eval"]
        assert calls == ["eval"]
    assert calls == ["eval", "train"]
    assert not trainer.is_optimizer_in_evaluation
    with pytest.raises(KeyError), optimizer_in_evaluation(trainer):
        raise KeyError
    assert calls == ["eval", "train"] * 2


def test_outside_of_a_run_it_is_not_asked():
    calls = []
    with optimizer_in_evaluation(trainer_with(calls, is_in_train=False)):
        assert calls == []
    assert calls == []


@pytest.mark.parametrize("modes", [(), ("train",), ("eval",)])
def test_one_without_both_methods_is_not_asked(modes):
    calls = []
    with optimizer_in_evaluation(trainer_with(calls, modes=modes)):
        assert calls == []
    assert calls == []
