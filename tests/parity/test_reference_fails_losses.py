"""Wrong numbers of the reference: losses under accumulation, and losses that are not numbers."""

import math

import parity_data as data
import parity_models as models
import pytest
from parity_harness import OURS, REFERENCE, Scenario, build, run, run_both, warnings_of
from torch.nn import functional as F

pytestmark = pytest.mark.reference_fails


def first_steps(scenario, folder, count):
    """Train with one batch of 4 and with 4 of 1, and return the first steps' losses and gradient norms of both."""
    found = {}
    for side in (REFERENCE, OURS):
        for batch_size, accumulation in ((4, 1), (1, 4)):
            scenario.arguments |= {
                "per_device_train_batch_size": batch_size,
                "gradient_accumulation_steps": accumulation,
                "max_steps": count,
                "max_grad_norm": 0.0,
                "learning_rate": 1e-3,
            }
            history = run(side, scenario, folder / f"{side.name}-{accumulation}").history
            found[side.name, accumulation] = [(e["loss"], e["grad_norm"]) for e in history if "loss" in e]
    return found


def assert_ours_agrees_and_reference_is_too_large(found):
    for (whole, whole_norm), (parts, parts_norm) in zip(found["ours", 1], found["ours", 4], strict=True):
        # Only the order of summation differs.
        assert parts == pytest.approx(whole, rel=1e-5)
        assert parts_norm == pytest.approx(whole_norm, rel=1e-4)
    (whole, whole_norm), (parts, parts_norm) = found["reference", 1][0], found["reference", 4][0]
    assert parts == pytest.approx(4 * whole, rel=1e-5)
    assert parts_norm == pytest.approx(4 * whole_norm, rel=1e-4)
    assert found["ours", 1] == found["reference", 1]


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
    assert_ours_agrees_and_reference_is_too_large(first_steps(Scenario(model, samples), tmp_path, 2))


def test_a_compute_loss_that_ignores_the_count_is_accumulated_to_the_same_loss(tmp_path):
    def subclass(trainer):
        class MeanLoss(trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(inputs["input_ids"])
                loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
                return (loss, outputs) if return_outputs else loss

        return MeanLoss

    scenario = Scenario(models.llama, data.tokens(masked=False), subclass=subclass)
    assert_ours_agrees_and_reference_is_too_large(first_steps(scenario, tmp_path, 2))


def test_a_loss_function_that_ignores_the_count_is_accumulated_to_the_same_loss(tmp_path):
    def mean_loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels)

    scenario = Scenario(models.Mlp, data.classes(), options={"compute_loss_func": mean_loss})
    assert_ours_agrees_and_reference_is_too_large(first_steps(scenario, tmp_path, 2))


def test_a_loss_function_without_the_count_can_be_used(tmp_path):
    options = {"compute_loss_func": lambda outputs, labels: F.cross_entropy(outputs["logits"], labels)}
    scenario = Scenario(models.Mlp, data.classes(), options=options, arguments={"gradient_accumulation_steps": 2})
    with pytest.raises(TypeError, match="num_items_in_batch"):
        run(REFERENCE, scenario, tmp_path / "reference")
    plain = Scenario(models.Mlp, data.classes(), arguments=scenario.arguments)
    assert run(OURS, scenario, tmp_path / "ours").losses == run(OURS, plain, tmp_path / "plain").losses


def test_an_evaluation_loss_of_tokens_does_not_depend_on_the_batch_size(tmp_path):
    evaluation = data.tokens(9, seed=8)
    found = {}
    for side in (REFERENCE, OURS):
        for batch_size in (1, 2, 4, 9):
            scenario = Scenario(models.llama, None, evaluation, {"per_device_eval_batch_size": batch_size})
            trainer = build(side, scenario, tmp_path / f"{side.name}-{batch_size}").trainer
            with warnings_of(side):
                found[side.name, batch_size] = trainer.evaluate()["eval_loss"]
    truth = found["reference", 9]  # one batch holds everything
    for batch_size in (1, 2, 4, 9):
        assert found["ours", batch_size] == pytest.approx(truth, rel=1e-6)
    assert len({round(found["reference", batch_size], 3) for batch_size in (1, 2, 4, 9)}) > 1


def poisoned():
    """Return samples of which one is not a number."""
    samples = data.classes()
    samples.samples[4]["x"][0] = math.nan
    return samples


def test_a_loss_that_is_not_a_number_is_shown(tmp_path):
    reference, ours = run_both(Scenario(models.Mlp, poisoned), tmp_path)
    for outcome in (reference, ours):
        assert all(weight.isnan().all() for weight in outcome.weights.values())
    assert math.isnan(ours.losses[-1])
    assert math.isnan(ours.output.training_loss)
    assert not any(math.isnan(loss) for loss in reference.losses)
    assert reference.losses[-1] == 0.0
    assert math.isfinite(reference.output.training_loss)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_both_leave_such_losses_out_of_the_log_if_that_is_asked_for(parity, accumulation):
    parity(
        models.Mlp,
        poisoned,
        poisoned,
        logging_nan_inf_filter=True,
        logging_steps=3,
        gradient_accumulation_steps=accumulation,
        eval_strategy="epoch",
        per_device_eval_batch_size=4,
    )


def test_after_a_lost_batch_the_log_recovers(tmp_path):
    """One step without a number in the loss, which the model survives, is shown once and not for ever."""

    class Survivor(models.Linear):
        def forward(self, x, labels=None):
            outputs = super().forward(x.nan_to_num(), labels)
            if x.isnan().any():
                outputs["loss"] = outputs["loss"].detach() * math.nan + 0.0 * outputs["loss"]
            return outputs

    samples = data.regression()
    samples.samples[4]["x"][0] = math.nan
    ours = run(OURS, Scenario(Survivor, samples), tmp_path)
    assert [math.isnan(loss) for loss in ours.losses].count(True) == 2  # once an epoch
    assert all(weight.isfinite().all() for weight in ours.weights.values())


def test_the_loss_of_gpt2_is_over_the_targets_that_it_has(tmp_path):
    """The reference counts the first label of each row, a target of nobody, for a class without `loss_type`."""
    rows = data.tokens(masked=False)
    scenario = Scenario(
        models.gpt2_without_loss_type, rows, arguments={"max_steps": 1, "per_device_train_batch_size": 4}
    )
    first = {side.name: run(side, scenario, tmp_path / side.name).history[0]["loss"] for side in (REFERENCE, OURS)}
    length = len(rows[0]["labels"])
    assert first["reference"] == pytest.approx(first["ours"] * (length - 1) / length, rel=1e-5)


def test_gpt2_learns_the_same_from_one_batch_and_from_several(tmp_path):
    found = first_steps(Scenario(models.gpt2_without_loss_type, data.tokens()), tmp_path, 2)
    for (whole, _), (parts, _) in zip(found["ours", 1], found["ours", 4], strict=True):
        assert parts == pytest.approx(whole, rel=1e-5)
