"""Models that are quantized, placed on devices, or left in evaluation mode."""

from types import SimpleNamespace

import pytest
import torch
from support.callbacks import on
from support.data import samples
from support.models import Base, Classifier
from torch import nn

from tr_core import SingleDevice, Trainer
from tr_core.model import place_on_device
from tr_core.preflight import check


def quantizer(trainable=True, aware=False):
    config = SimpleNamespace(quant_method="bitsandbytes")
    return SimpleNamespace(is_trainable=trainable, is_qat_trainable=aware, quantization_config=config)


def quantized(**attributes):
    """A model whose first layer cannot be trained, as where it is held in few bits."""
    model = Classifier()
    model.layers[0].requires_grad_(False)
    for name, value in {"is_quantized": True, "hf_quantizer": quantizer(), **attributes}.items():
        setattr(model, name, value)
    return model


REFUSED = [
    ({}, r"is quantized by bitsandbytes and has no adapter: .* only 51 numbers beside them; add an adapter"),
    ({"hf_quantizer": None}, "is quantized and has no adapter"),
    ({"hf_quantizer": quantizer(trainable=False), "peft_config": {"default": 1}}, "cannot be trained, not even with"),
    ({"hf_quantizer": quantizer(trainable=False, aware=True)}, "cannot be trained, not even with"),
]


@pytest.mark.parametrize(("attributes", "message"), REFUSED)
def test_a_quantized_model_without_what_can_be_trained_is_refused_before_a_step(make_trainer, attributes, message):
    trainer = make_trainer(model=quantized(**attributes), eval_dataset=samples(8, 1))
    with pytest.raises(ValueError, match=message) as refusal:
        trainer.train()
    assert trainer.state.global_step == 0
    assert "eval_loss" in trainer.evaluate()  # it can be evaluated
    (problem,) = [problem for problem in check(trainer).problems if problem.severity == "error"]
    assert (problem.code, problem.message) == ("T501", str(refusal.value))


@pytest.mark.parametrize(
    "attributes",
    [
        {"peft_config": {"default": 1}},
        {"_hf_peft_config_loaded": True},
        {"hf_quantizer": quantizer(aware=True)},
        {"is_quantized": False, "hf_quantizer": None},
    ],
)
def test_one_with_adapters_or_made_for_training_is_trained(make_trainer, attributes):
    trainer = make_trainer(model=quantized(**attributes))
    assert trainer.train().global_step == 5
    assert [problem for problem in check(trainer).problems if problem.severity == "error"] == []


def test_one_that_is_given_later_or_made_by_model_init_is_refused_too(make_trainer):
    with pytest.raises(ValueError, match="has no adapter"):
        make_trainer(model_init=quantized).train()


class Fixed(Classifier):
    """Refuses to be moved, as one with quantized weights or hooks of accelerate does."""

    def to(self, *args, **kwargs):
        raise RuntimeError("cannot be moved")


@pytest.mark.parametrize(
    "attributes",
    [
        {"hf_device_map": {"layers.0": "cpu", "layers.3": "cpu"}},
        {"hf_device_map": {"layers.0": 0, "layers.3": 1}},
        {"hf_device_map": {"": "disk"}},
        {"quantization_method": "bitsandbytes"},
        {"quantization_method": "bitsandbytes", "hf_device_map": {"": 0}},
    ],
)
def test_a_model_that_was_put_in_place_is_left_there(make_trainer, attributes):
    model = Fixed()
    for name, value in attributes.items():
        setattr(model, name, value)
    assert make_trainer(model=model).train().global_step == 5
    assert place_on_device(model, torch.device("cuda", 0)) is model


def test_one_that_lies_on_another_accelerator_is_refused():
    model = Classifier()
    model.hf_device_map = {"": "cuda:1"}
    with pytest.raises(
        ValueError, match=r"loaded onto cuda:1 .* computes on cuda:0; load it with device_map={'': 'cuda:0'}"
    ):
        place_on_device(model, torch.device("cuda", 0))


def test_one_that_was_loaded_onto_the_cpu_or_by_no_map_is_moved():
    model = Classifier()
    assert SingleDevice("meta").prepare(model).layers[0].weight.device.type == "meta"
    model = Classifier()
    model.hf_device_map = {"": "cpu"}
    assert SingleDevice("meta").prepare(model).layers[0].weight.device.type == "meta"


def test_arguments_of_a_subclass_may_leave_the_model_where_it_is(make_args):
    from tr_core import TrainingArguments

    class Staying(TrainingArguments):
        @property
        def place_model_on_device(self):
            return False

    kept = ("output_dir", "use_cpu", "save_strategy")
    args = Staying(**{name: value for name, value in vars(make_args()).items() if name in kept})
    trainer = Trainer(Fixed(), args, train_dataset=samples(8))
    assert trainer.train().global_step > 0


# Training mode


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
    return on(event, lambda model, **_: act(model))


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


@pytest.mark.parametrize(("part", "expected"), [("", ALL), ("layers", ALL), ("norm", FROZEN_NORM)])
def test_a_model_or_part_that_arrives_in_evaluation_mode_is_trained_but_a_norm_layer_stays_frozen(
    make_trainer, part, expected
):
    model = Recording()
    model.get_submodule(part).eval()
    assert modes(make_trainer, model=model) == [expected] * 4
    assert torch.equal(model.norm.running_mean, torch.zeros(3)) == (part == "norm")


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
