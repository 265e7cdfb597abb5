"""Optimizers with two sets of weights are evaluated, saved and left with those to judge."""

from types import SimpleNamespace

import pytest
import torch
from support.data import samples

from tr_core import TrainerCallback
from tr_core.callbacks.evaluation_weights import OptimizerMode


class TwoSets(torch.optim.SGD):
    """Trains weights `y`; what is to be judged, `x`, lies half-way between them and the first ones."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.first = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.mode = "eval"
        self.trained = None

    def train(self):
        if self.mode == "eval" and self.trained is not None:
            self._put(self.trained)
        self.mode = "train"

    def eval(self):
        if self.mode == "train":
            self.trained = [p.detach().clone() for p in self._parameters()]
            self._put([(a + b) / 2 for a, b in zip(self.first, self.trained, strict=True)])
        self.mode = "eval"

    def step(self, closure=None):
        assert self.mode == "train"
        return super().step(closure)

    def _parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def _put(self, values):
        for parameter, value in zip(self._parameters(), values, strict=True):
            parameter.copy_(value)


class Modes(TrainerCallback):
    def __init__(self, optimizer):
        self.optimizer, self.seen = optimizer, []

    def on_prediction_step(self, args, state, control, **kwargs):
        self.seen.append(("evaluated", self.optimizer.mode))

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(("step", self.optimizer.mode))


def test_an_evaluation_is_of_the_weights_to_judge_and_training_continues_with_the_others(make_trained, model):
    optimizer = TwoSets(model.parameters())
    modes = Modes(optimizer)
    make_trained(
        8, optimizers=(optimizer, None), callbacks=[modes], eval_dataset=samples(4), eval_strategy="steps", eval_steps=1
    )
    assert modes.seen == [("step", "train"), ("evaluated", "eval")] * 2


def test_the_weights_trained_are_those_of_a_run_without_evaluations(make_trainer, model):
    def trained(**changes):
        torch.manual_seed(0)
        own = type(model)()
        optimizer = TwoSets(own.parameters())
        make_trainer(16, model=own, optimizers=(optimizer, None), **changes).train()
        return optimizer.trained

    often = trained(eval_dataset=samples(4), eval_strategy="steps", eval_steps=1)
    assert all(torch.equal(a, b) for a, b in zip(often, trained(), strict=True))


def test_after_training_the_model_has_the_weights_to_judge(make_trained, model):
    optimizer = TwoSets(model.parameters())
    trainer = make_trained(16, optimizers=(optimizer, None), eval_dataset=samples(4))
    expected = [(a + b) / 2 for a, b in zip(optimizer.first, optimizer.trained, strict=True)]
    trainer.evaluate()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), expected, strict=True))


def test_a_checkpoint_and_save_model_hold_the_weights_to_judge(make_trained, model, tmp_path):
    class Keeps:
        modes = ()

        def save(self, step, parts, **options):
            self.modes = (*self.modes, optimizer.mode)
            return tmp_path

        def steps(self):
            return []

        def path(self, step):
            return tmp_path

        restore = check = wait = close = lambda self, *args, **kwargs: None

    optimizer, keeper = TwoSets(model.parameters()), Keeps()
    trainer = make_trained(8, optimizers=(optimizer, None), checkpointer=keeper, save_strategy="steps", save_steps=1)
    assert keeper.modes == ("eval", "eval")
    assert int(trainer.state.global_step) == 2


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
