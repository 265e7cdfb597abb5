"""Losses of models and functions that ignore the count: one batch, or several of its parts, give the same step."""

import parity_data as data
import parity_models as models
import pytest
from parity_harness import OURS, REFERENCE, Scenario, run
from torch.nn import functional as F


def first_steps(side, scenario, folder, accumulation):
    """Train two steps of four samples, in so many parts; return losses and gradient norms."""
    scenario.arguments |= {
        "per_device_train_batch_size": 4 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 2,
        "max_grad_norm": 0.0,
        "learning_rate": 1e-3,
    }
    history = run(side, scenario, folder / f"{side.name}-{accumulation}").history
    return [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]


def assert_whole_as_the_reference_and_parts_as_the_whole(scenario, folder):
    whole = first_steps(OURS, scenario, folder, 1)
    assert whole == first_steps(REFERENCE, scenario, folder, 1)
    # Only the order of summation differs.
    for (loss, norm), (of_parts, norm_of_parts) in zip(whole, first_steps(OURS, scenario, folder, 4), strict=True):
        assert of_parts == pytest.approx(loss, rel=1e-5)
        assert norm_of_parts == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    ("model", "samples"),
    [
        (models.bert_classifier, data.sentences()),
        (models.bert_tagger, data.tokens(masked=False)),
        (models.t5, data.tokens(masked=False)),
    ],
)
def test_a_model_that_ignores_the_count_is_accumulated_to_the_same_loss(tmp_path, model, samples):
    """Its forward takes **kwargs, which the reference holds for a promise to divide by `num_items_in_batch`."""
    assert_whole_as_the_reference_and_parts_as_the_whole(Scenario(model, samples), tmp_path)


def test_a_compute_loss_that_ignores_the_count_is_accumulated_to_the_same_loss(tmp_path):
    def subclass(trainer):
        class MeanLoss(trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(inputs["input_ids"])
                loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
                return (loss, outputs) if return_outputs else loss

        return MeanLoss

    scenario = Scenario(models.llama, data.tokens(masked=False), subclass=subclass)
    assert_whole_as_the_reference_and_parts_as_the_whole(scenario, tmp_path)


def test_a_loss_function_that_ignores_the_count_is_accumulated_to_the_same_loss(tmp_path):
    def mean_loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels)

    scenario = Scenario(models.Mlp, data.classes(), options={"compute_loss_func": mean_loss})
    assert_whole_as_the_reference_and_parts_as_the_whole(scenario, tmp_path)


def test_gpt2_learns_the_same_from_one_batch_and_from_several(tmp_path):
    """Of a class without `loss_type` the reference counts the first label of each row, a target of nobody."""
    scenario = Scenario(models.gpt2_without_loss_type, data.tokens())
    whole, parts = (first_steps(OURS, scenario, tmp_path, accumulation) for accumulation in (1, 4))
    for (loss, _), (of_parts, _) in zip(whole, parts, strict=True):
        assert of_parts == pytest.approx(loss, rel=1e-5)
