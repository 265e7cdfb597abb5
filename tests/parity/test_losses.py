"""Losses: what they are divided by under accumulation, and what is left out of the log."""

import math

import parity_data as data
import parity_models as models
import pytest
from torch.nn import functional as F


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("model", [models.llama, models.gpt2])
def test_a_causal_model_with_masked_tokens_is_the_same(parity, model, accumulation):
    parity(
        model,
        data.tokens(),
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=2,
        learning_rate=0.01,
    )


def test_a_causal_model_with_ragged_sequences_is_the_same(parity):
    parity(
        models.llama,
        data.ragged_tokens(),
        options={"data_collator": data.pad_tokens},
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.01,
    )


def test_a_classifier_of_transformers_is_the_same(parity):
    parity(models.bert_classifier, data.sentences(), learning_rate=0.01)


@pytest.mark.parametrize("model", [models.bert_tagger, models.t5])
def test_other_models_with_masked_targets_are_the_same(parity, model):
    parity(model, data.tokens(), data.tokens(6, seed=9, masked=False), learning_rate=0.01, eval_strategy="epoch")


def summed(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"]
    if num_items_in_batch is None:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_a_loss_function_that_divides_by_the_count_is_the_same(parity, accumulation):
    parity(
        models.Mlp,
        data.classes(),
        data.classes(9, seed=8),
        options={"compute_loss_func": summed},
        gradient_accumulation_steps=accumulation,
        eval_strategy="epoch",
    )


def poisoned():
    """Return samples of which one is not a number."""
    samples = data.classes()
    samples.samples[4]["x"][0] = math.nan
    return samples


@pytest.mark.parametrize("accumulation", [1, 2])
def test_both_leave_losses_that_are_no_number_out_of_the_log_if_that_is_asked_for(parity, accumulation):
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
