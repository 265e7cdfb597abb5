from types import SimpleNamespace

import pytest
import torch
from small_models import Base, CountedSum, IgnoresCount, samples
from torch import nn

from tr_core import SingleDevice, Trainer
from tr_core.model_io import accepts_count, loss_of
from tr_core.signatures import takes_argument


def first_gradient(make_trainer, model, accumulation, batch_size, trainer_class=Trainer, **parts):
    """Return the gradient of the first step as the optimizer sees it, with the loss that was logged for it."""
    seen = {}

    class Keep(nn.Module):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            seen.setdefault("grads", [p.grad.clone() for p in model.parameters()])

    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    trainer = make_trainer(
        8,
        trainer_class,
        model=model,
        callbacks=[Keep()],
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=batch_size,
        max_grad_norm=0.0,
        **parts,
    )
    trainer.train()
    return seen["grads"], trainer.state.log_history[0]["loss"]


MODELS = {"mean": IgnoresCount, "counted": CountedSum}


@pytest.mark.parametrize("kind", MODELS)
def test_one_batch_of_n_and_n_batches_of_one_give_the_same_step(make_trainer, kind):
    """A forward with **kwargs that ignores the count gets a loss N times too large from the reference."""
    whole, whole_loss = first_gradient(make_trainer, MODELS[kind](), 1, 8)
    parts, parts_loss = first_gradient(make_trainer, MODELS[kind](), 8, 1)
    assert whole_loss == pytest.approx(parts_loss, rel=1e-6)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("uses_count", [True, False])
def test_a_loss_function_is_normalised_by_what_it_does_with_the_count(make_trainer, uses_count):
    def loss_function(outputs, labels, num_items_in_batch=None):
        reduction = "sum" if uses_count else "mean"
        loss = nn.functional.cross_entropy(outputs["logits"], labels, reduction=reduction)
        return loss / num_items_in_batch if uses_count else loss

    results = [first_gradient(make_trainer, IgnoresCount(), n, 8 // n, compute_loss_func=loss_function) for n in (1, 4)]
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6)
    for one, other in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_loss_function_without_a_count_parameter_works(make_trainer):
    def loss_function(outputs, labels):
        return nn.functional.cross_entropy(outputs["logits"], labels)

    grads, loss = first_gradient(make_trainer, IgnoresCount(), 2, 4, compute_loss_func=loss_function)
    assert loss > 0
    assert len(grads) == 4


def test_a_compute_loss_from_before_the_count_existed_works_unchanged(make_trainer):
    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weights = torch.tensor([1.0, 2.0, 3.0])
            loss = nn.functional.cross_entropy(outputs.get("logits"), labels, weight=weights)
            return (loss, outputs) if return_outputs else loss

    trainer = make_trainer(8, Weighted, eval_dataset=samples(4), eval_strategy="epoch", gradient_accumulation_steps=2)
    trainer.train()
    assert any("eval_loss" in entry for entry in trainer.state.log_history)


def test_a_training_step_from_before_the_count_existed_works_unchanged(make_trainer):
    calls = []

    class Old(Trainer):
        def training_step(self, model, inputs):
            calls.append(len(inputs["x"]))
            return super().training_step(model, inputs)

    make_trainer(10, Old).train()
    assert calls == [4, 4, 2]


def test_who_is_told_the_count_depends_on_the_model():
    class Named(nn.Module):
        def forward(self, x, num_items_in_batch=None): ...

    class Anything(nn.Module):
        def forward(self, x, **kwargs): ...

    class Declares(Anything):
        accepts_loss_kwargs = True

    class WithLossFunction(Anything):
        @property
        def loss_function(self): ...

    told = [accepts_count(model()) for model in (Named, Anything, Declares, WithLossFunction)]
    assert told == [True, False, True, True]
    assert takes_argument(lambda outputs, labels, **kwargs: None, "num_items_in_batch")


def test_ignored_targets_are_not_counted():
    from tr_core.data.sampler import MicroBatch
    from tr_core.loss import LossRule

    rule = LossRule(CountedSum(), None, SingleDevice("cpu"))
    batches = [MicroBatch({"labels": torch.tensor([[1, -100], [2, 3]])}, 1.0, 2, 2)] * 2
    assert rule.count(batches).item() == 6
    assert rule.count([MicroBatch({"x": torch.ones(1)}, 1.0, 1, 1)]) is None


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"logits": torch.ones(2)}, r"dict returned by the model holds no loss, only \['logits'\]"),
        ((), r"tuple returned by the model holds no loss, only \[\]"),
        (torch.ones(3, 2), r"Tensor returned by the model holds no loss, only \['a tensor of shape \(3, 2\)'\]"),
    ],
)
def test_outputs_without_a_loss_say_what_was_given_and_what_to_change(outputs, message):
    with pytest.raises(ValueError, match=message) as caught:
        loss_of(outputs, {"x": 1})
    assert "the model was given ['x']. Give it labels (see label_names), pass compute_loss_func" in str(caught.value)


def test_losses_are_found_in_dicts_tuples_objects_and_scalars():
    loss = torch.tensor(2.0)

    class Output:
        def __init__(self):
            self.loss = loss

    for outputs in ({"loss": loss}, (loss, torch.ones(2)), [loss], Output(), loss):
        assert loss_of(outputs, {}) is loss


def test_smoothed_labels_act_in_training_and_evaluation_and_do_not_depend_on_accumulation(make_trainer):
    plain = first_gradient(make_trainer, IgnoresCount(), 1, 8)[1]
    results = [first_gradient(make_trainer, IgnoresCount(), n, 8 // n, label_smoothing_factor=0.3) for n in (1, 4)]
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6)
    assert abs(results[0][1] - plain) > 1e-3
    trainer = make_trainer(8, model=Base(), label_smoothing_factor=0.3, eval_dataset=samples(4))
    with pytest.raises(ValueError, match="label_smoothing_factor needs a batch with 'labels'"):
        trainer.loss_function({"logits": torch.ones(1, 3)}, None)


def test_outputs_in_a_tuple_are_all_kept_where_the_loss_is_computed_outside(make_trainer):
    class OnlyLogits(Base):
        def forward(self, x, labels=None):
            return (self.layers(x),)

    output = make_trainer(8, model=OnlyLogits(), label_smoothing_factor=0.1).predict(samples(5))
    assert output.predictions.shape == (5, 3)
    assert output.metrics["test_loss"] > 0


def test_smoothing_labels_of_several_a_sample_is_refused(make_trainer):
    model = IgnoresCount()
    model.config = SimpleNamespace(problem_type="multi_label_classification")
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0.1 has no meaning for problem_type='multi_label"):
        make_trainer(8, model=model, label_smoothing_factor=0.1)
