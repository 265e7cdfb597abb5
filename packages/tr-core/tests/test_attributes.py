"""Attributes that transformers' Trainer assigns: an assignment acts, or is refused in words."""

from types import SimpleNamespace

import pytest
import torch
from support.data import samples
from support.models import Classifier
from torch import nn

from tr_core import Trainer
from tr_core.label_smoothing import LabelSmoother


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("is_deepspeed_enabled", True, "set it in the arguments, or pass strategy= to the Trainer"),
        ("deepspeed", nn.Linear(1, 1), "set it in the arguments, or pass strategy= to the Trainer"),
        ("is_fsdp_enabled", True, "set it in the arguments, or pass strategy= to the Trainer"),
        ("place_model_on_device", False, "override the property place_model_on_device"),
        ("neftune_noise_alpha", 5.0, "set args.neftune_noise_alpha"),
        ("hp_search_backend", "optuna", "call hyperparameter_search"),
        ("accelerator", SimpleNamespace(), "Pass strategy=tr_dist.accelerate_strategy.AcceleratorStrategy"),
        ("gather_function", print, "override evaluation_loop"),
        ("push_in_progress", object(), "call push_to_hub"),
        ("_globalstep_last_logged", 3, "belongs to a run"),
    ],
)
def test_an_assignment_that_would_do_nothing_is_refused(make_trainer, name, value, instead):
    trainer = make_trainer()
    with pytest.raises((AttributeError, RuntimeError), match=instead):
        setattr(trainer, name, value)


def test_the_value_that_an_attribute_has_may_be_assigned(make_trainer):
    trainer = make_trainer()
    for name in ("is_deepspeed_enabled", "is_fsdp_enabled", "place_model_on_device", "accelerator", "hub_model_id"):
        setattr(trainer, name, getattr(trainer, name))
    trainer.gather_function = trainer.accelerator.gather_for_metrics
    assert (trainer.is_fsdp_xla_enabled, trainer.hp_search_backend, trainer.deepspeed) == (False, None, None)


def test_what_another_trainer_sets_in_a_search_is_not_there_in_words(make_trainer):
    trainer = make_trainer()
    assert trainer.push_in_progress is None
    with pytest.raises(
        AttributeError, match="compute_objective is set by transformers.*pass it to hyperparameter_search"
    ):
        _ = trainer.compute_objective
    assert not hasattr(trainer, "_eval_dataloaders")
    trainer.objective = 3  # a subclass may have its own
    assert trainer.objective == 3


def test_a_push_is_under_way_for_overrides_that_would_copy_files_for_it():
    pushing = SimpleNamespace(args=SimpleNamespace(push_to_hub=True))
    assert not Trainer.push_in_progress.__get__(pushing).is_done()
    assert Trainer.push_in_progress.__get__(pushing).wait_until_done() is None


def test_an_accelerator_that_a_subclass_builds_itself_is_refused(make_trainer):
    class Builds(Trainer):
        def create_accelerator_and_postprocess(self):
            self.accelerator = SimpleNamespace()

    with pytest.raises(AttributeError, match=r"trainer.accelerator = SimpleNamespace\(...\) would not train"):
        make_trainer(trainer_class=Builds)


def test_a_batch_size_that_is_assigned_acts(make_trainer):
    trainer = make_trainer(16)
    trainer._train_batch_size = 8
    assert trainer.get_total_train_batch_size(trainer.args) == 8
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_name_on_the_hub_is_that_of_the_arguments(make_trainer):
    trainer = make_trainer()
    trainer.hub_model_id = "me/model"
    assert trainer.args.hub_model_id == "me/model"


def test_a_model_may_be_called_divided(make_trainer):
    trainer = make_trainer()
    assert trainer.is_model_parallel is False
    trainer.is_model_parallel = True
    assert trainer.is_model_parallel is True


class Smoother:
    """A smoother of another library, as far as it is read."""

    epsilon, ignore_index = 0.2, -100


Smoother.__name__ = "LabelSmoother"


def test_a_smoother_that_is_assigned_smooths(make_trainer):
    losses = []
    for given in ("argument", "attribute"):
        torch.manual_seed(0)
        trainer = make_trainer(8, model=Classifier(), label_smoothing_factor=0.2 if given == "argument" else 0.0)
        if given == "attribute":
            trainer.label_smoother = Smoother()
        assert trainer.label_smoother.epsilon == 0.2
        trainer.train()
        losses.append([entry.get("loss") for entry in trainer.state.log_history])
    assert losses[0] == losses[1]
    trainer.label_smoother = None
    assert trainer.args.label_smoothing_factor == 0.0
    assert trainer.label_smoother is None


def test_a_smoother_of_another_kind_is_refused(make_trainer):
    trainer = make_trainer()
    with pytest.raises(TypeError, match="is not a LabelSmoother with ignore_index=-100; pass compute_loss_func="):
        trainer.label_smoother = nn.CrossEntropyLoss()


def test_a_smoother_shifts_as_it_is_asked():
    logits, labels = torch.randn(2, 5, 3), torch.randint(3, (2, 5))
    smoother = LabelSmoother(0.1, nn.Linear(1, 1))
    shifted = smoother({"logits": logits[:, :-1]}, labels[:, 1:])
    assert torch.equal(smoother({"logits": logits}, labels, shift_labels=True), shifted)
    assert torch.equal(smoother({"logits": logits}, labels), smoother({"logits": logits}, labels, shift_labels=False))


def test_a_step_may_set_the_number_that_its_loss_is_divided_by(make_trainer):
    class Whole(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            self.current_gradient_accumulation_steps = 1
            return super().training_step(model, inputs, num_items_in_batch)

    found = []
    for kind in (Trainer, Whole):
        trainer = make_trainer(8, trainer_class=kind, gradient_accumulation_steps=2, learning_rate=0.0)
        trainer.train()
        found.append(trainer.state.log_history[0]["loss"])
    assert found[1] == pytest.approx(2 * found[0])


def test_a_subclass_with_its_own_evaluation_loop_may_gather_otherwise(make_trainer):
    class Own(Trainer):
        def evaluation_loop(self, *given, **named):
            self.gather_function = self.accelerator.gather
            gathered = self.gather_function(torch.ones(1))
            self.gather_function = self.accelerator.gather_for_metrics
            assert gathered.tolist() == [1.0]
            return super().evaluation_loop(*given, **named)

    assert "eval_loss" in make_trainer(trainer_class=Own, eval_dataset=samples(4)).evaluate()
