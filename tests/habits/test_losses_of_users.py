"""What `compute_loss`, `training_step` and models of users return and do to their inputs."""

import pytest
from habit_parts import Net, batches, by_hand, logged, rows

from tr_core import Trainer


def with_loss(function):
    """Make a class of Trainers whose `compute_loss` is a function of Trainer, model and inputs."""

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = function(self, model, inputs)
            return (loss, {"logits": model(inputs["x"])["logits"]}) if return_outputs else loss

    return Own


# What is done in one


def test_entries_logged_in_compute_loss_are_in_the_history_beside_those_of_the_steps(make_trainer):
    def log(self, model, inputs):
        self.log({"mine": 1.0})
        return model(**inputs)["loss"]

    trainer = make_trainer(with_loss(log))
    trainer.train()
    assert len(logged(trainer, "mine")) == 4
    assert len(logged(trainer)) == 4


def test_compute_loss_without_return_outputs_trains_and_evaluations_say_what_is_missing(make_trainer):
    class Short(Trainer):
        def compute_loss(self, model, inputs):
            return model(**inputs)["loss"]

    trainer, other = make_trainer(Short, eval_dataset=rows(4)), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))
    with pytest.raises(TypeError, match="return_outputs"):
        trainer.evaluate()
