"""Tokens of a tokenizer that a model's configurations have when training begins, as a chat's end of turn."""

import parity_models as models
import pytest
import transformers
from parity_data import tokens
from parity_harness import OURS, REFERENCE, Scenario, run
from parity_tokenizers import word_tokenizer

NAMES = ("eos_token_id", "bos_token_id", "pad_token_id")
ALL = {"eos_token": "w1", "bos_token": "w2", "pad_token": "w3"}
END, BEGIN, PADDING = 6, 7, 8  # their ids


def ids(model):
    """Return what the configurations of a model have, as one of them alone may be changed."""
    configs = [model.config, *filter(None, [getattr(model, "generation_config", None)])]
    return [[getattr(config, name, None) for name in NAMES] for config in configs]


def llama(config=(), generation=()):
    def make():
        model = models.llama()
        for name, value in dict(config).items():
            setattr(model.config, name, value)
        for name, value in dict(generation).items():
            setattr(model.generation_config, name, value)
        return model

    return make


def aligned(side, make, tokenizer, folder):
    scenario = Scenario(make, tokens(4), arguments={"max_steps": 1}, options={"processing_class": tokenizer})
    return ids(run(side, scenario, folder).trainer.model)


@pytest.mark.parametrize(
    "make",
    [
        llama(),
        llama({"eos_token_id": [2, 3]}, {"eos_token_id": [2, 3]}),
        llama({"eos_token_id": [2, END]}, {"eos_token_id": 2}),
        llama({"eos_token_id": END}, {"eos_token_id": [4, END]}),
        llama({"eos_token_id": END, "bos_token_id": BEGIN, "pad_token_id": PADDING}),
        llama({"eos_token_id": None, "pad_token_id": None}, {"eos_token_id": None, "pad_token_id": None}),
    ],
)
@pytest.mark.parametrize("settings", [ALL, {"pad_token": "w3"}, {"eos_token": "w1"}])
def test_configurations_have_the_tokens_of_the_tokenizer_as_in_the_reference(tmp_path, make, settings):
    reference = aligned(REFERENCE, make, word_tokenizer(**settings), tmp_path / "reference")
    assert aligned(OURS, make, word_tokenizer(**settings), tmp_path / "ours") == reference


def test_a_classifier_without_a_padding_token_trains_on_padded_rows_with_that_of_the_tokenizer(parity):
    """It finds the last token of a row by its padding, and refuses batches of several rows without such a token."""

    def classifier():
        sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "num_labels": 2}
        config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return transformers.GPT2ForSequenceClassification(config)

    tokenizer = word_tokenizer(pad_token="[PAD]")
    texts = ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w10"]
    rows = [{**tokenizer(text), "labels": number % 2} for number, text in enumerate(texts)]
    _, ours = parity(classifier, rows, rows, options={"processing_class": tokenizer}, per_device_train_batch_size=2)
    assert ours.trainer.model.config.pad_token_id == 0
