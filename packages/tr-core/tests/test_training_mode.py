"""Every micro-batch is computed in training mode, whatever was left behind before it."""

import pytest
import torch
from small_models import Base, samples
from torch import nn

from tr_core import Trainer, TrainerCallback


class Recording(Base):
    """Notes in which mode each forward of training finds the model and its norm layer."""

    def __init__(self):
        super().__init__(dropout=0.5)
        self.norm = nn.BatchNorm1d(3)
        self.modes = []

    def forward(self, x, labels=None):
        if torch.is_grad_enabled():
            self.modes.append((self.training, self.layers[2].training, self.norm.training))
        logits = self.norm(self.layers(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


ALL, FROZEN_NORM = (True, True, True), (True, True, False)


def at(event, act):
    def method(self, args, state, control, **kwargs):
        act(kwargs["model"])

    return type("Act", (TrainerCallback,), {event: method})()


def modes(make_trainer, model=None, **changes):
    trainer = make_trainer(16, model=model or Recording(), gradient_accumulation_steps=2, **changes)
    trainer.train()
    return trainer.model.modes


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_substep_end", "on_step_end", "on_log"])
def test_a_model_left_in_evaluation_mode_by_a_callback_trains_in_training_mode(make_trainer, event):
    assert modes(make_trainer, callbacks=[at(event, nn.Module.eval)]) == [ALL] * 4


def test_a_model_left_in_evaluation_mode_by_compute_loss_trains_in_training_mode(make_trainer):
    class Leaves(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs)
            model.eval()
            return loss

    assert modes(make_trainer, trainer_class=Leaves) == [ALL] * 4


def test_dropout_after_a_callback_that_leaves_evaluation_mode_is_that_of_a_run_without_it(make_trainer):
    def weights(**changes):
        torch.manual_seed(1)
        trainer = make_trainer(16, model=Recording(), **changes)
        trainer.train()
        return [p.detach().clone() for p in trainer.model.parameters()]

    left, plain = weights(callbacks=[at("on_step_end", nn.Module.eval)]), weights()
    assert all(torch.equal(a, b) for a, b in zip(left, plain, strict=True))


def test_a_model_that_arrives_in_evaluation_mode_is_trained_as_a_whole(make_trainer):
    assert modes(make_trainer, model=Recording().eval()) == [ALL] * 4


def test_a_pretrained_part_that_arrives_in_evaluation_mode_is_trained(make_trainer):
    model = Recording()
    model.layers.eval()
    assert modes(make_trainer, model=model) == [ALL] * 4


def test_a_norm_layer_frozen_before_training_stays_frozen(make_trainer):
    model = Recording()
    model.norm.eval()
    assert modes(make_trainer, model=model) == [FROZEN_NORM] * 4
    assert torch.equal(model.norm.running_mean, torch.zeros(3))


def test_a_norm_layer_frozen_by_a_callback_stays_frozen(make_trainer):
    freeze = at("on_train_begin", lambda model: model.norm.eval())
    assert modes(make_trainer, callbacks=[freeze]) == [FROZEN_NORM] * 4


def test_a_frozen_norm_layer_stays_frozen_where_the_model_is_left_in_evaluation_mode(make_trainer):
    freeze, leave = at("on_epoch_begin", lambda model: model.norm.eval()), at("on_step_end", nn.Module.eval)
    assert modes(make_trainer, callbacks=[freeze, leave]) == [FROZEN_NORM] * 4


def test_a_part_that_a_callback_puts_into_evaluation_mode_stays_in_it(make_trainer):
    turn_off = at("on_step_end", lambda model: model.layers[2].eval())
    assert modes(make_trainer, callbacks=[turn_off]) == [ALL] * 2 + [(True, False, True)] * 2


def test_an_evaluation_changes_no_mode_of_training(make_trainer):
    freeze = at("on_train_begin", lambda model: model.norm.eval())
    found = modes(make_trainer, callbacks=[freeze], eval_dataset=samples(4), eval_strategy="steps", eval_steps=1)
    assert found == [FROZEN_NORM] * 4
