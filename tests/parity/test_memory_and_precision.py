"""Memory, precision and compilation: runs that both trainers make alike."""

import parity_data as data
import parity_models as models
import pytest
from parity_harness import EVAL_LOSS_TOLERANCE, OURS, REFERENCE, Scenario, build, run, same_tensors, warnings_of

LLAMA = {"learning_rate": 0.01, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def test_activation_checkpointing_ends_with_training(tmp_path):
    scenario = Scenario(models.llama, data.tokens(), arguments={"activation_checkpointing": True})
    model = run(OURS, scenario, tmp_path).trainer.model
    assert not model.is_activation_checkpointing
    assert not model.model.embed_tokens._forward_hooks


@pytest.mark.parametrize("option", ["bf16_full_eval", "fp16_full_eval"])
@pytest.mark.parametrize("model", [models.llama, models.bert_classifier])
def test_evaluation_and_prediction_in_16_bits_are_the_same(tmp_path, option, model):
    samples = data.sentences() if model is models.bert_classifier else data.tokens(7, seed=8, masked=False)
    scenario = Scenario(model, samples, samples, {option: True, "per_device_eval_batch_size": 4})
    results = []
    for side in (REFERENCE, OURS):
        outcome = build(side, scenario, tmp_path / side.name)
        with warnings_of(side):
            metrics = outcome.trainer.evaluate()
            prediction = outcome.trainer.predict(samples)
        results.append((metrics["eval_loss"], prediction.metrics["test_loss"], prediction.predictions))
    (eval_loss, test_loss, predictions), ours = results
    assert ours[2].dtype == predictions.dtype
    assert (ours[2] == predictions).all()
    # The reference takes the mean of losses in float16 in float16.
    tolerance = 5e-4 if option == "fp16_full_eval" else EVAL_LOSS_TOLERANCE
    assert ours[:2] == pytest.approx((eval_loss, test_loss), rel=tolerance)


def test_memory_metrics_have_the_same_names(tmp_path):
    samples = data.classes(9, seed=8)
    scenario = Scenario(models.Mlp, data.classes(), samples, {"skip_memory_metrics": False})
    names = []
    for side in (REFERENCE, OURS):
        outcome = build(side, scenario, tmp_path / side.name)
        with warnings_of(side):
            found = [
                outcome.trainer.train().metrics,
                outcome.trainer.evaluate(),
                outcome.trainer.predict(samples).metrics,
            ]
        names.append([sorted(name for name in metrics if "_mem_" in name) for metrics in found])
    theirs, ours = names
    # The reference adds what building the Trainer took to the first of them. Building ours takes nothing.
    assert [[name for name in stage if "init" not in name] for stage in theirs] == ours
    assert all(ours)


def test_checkpointed_weights_are_those_of_a_plain_run(parity):
    """Against our own run without it: the parity above would hide a fault that both have."""
    _, checkpointed = parity(models.llama, data.tokens(), activation_checkpointing=True, **LLAMA)
    _, plain = parity(models.llama, data.tokens(), **LLAMA)
    assert same_tensors(plain.weights, checkpointed.weights)
    assert not any(getattr(m, "gradient_checkpointing", False) for m in checkpointed.trainer.model.modules())
