"""Batches of rows, of sequences to sequences, of labels of tokens and of joined sequences."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.data import ToyTokenizer
from torch import nn

import tr_core
from tr_core import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)
from tr_core.collators import DataCollatorWithFlattening

EVERY = [
    lambda **options: DataCollatorForLanguageModeling(ToyTokenizer(), **options),
    lambda **options: DataCollatorForSeq2Seq(ToyTokenizer(), **options),
    lambda **options: DataCollatorForTokenClassification(ToyTokenizer(), **options),
    lambda **options: DataCollatorWithPadding(ToyTokenizer(), **options),
    DataCollatorWithFlattening,
]


@pytest.mark.parametrize("make", EVERY)
def test_a_batch_is_torch_tensors_or_arrays_of_numpy(make):
    rows = [{"input_ids": [5, 6, 7], "labels": [1, 2, 3]}, {"input_ids": [5, 6, 8], "labels": [1, 2, 4]}]
    tensors, arrays = make(return_tensors="pt"), make(return_tensors="np")
    expected = tensors([dict(row) for row in rows])
    for batch in (arrays([dict(row) for row in rows]), tensors([dict(row) for row in rows], return_tensors="np")):
        assert {type(value) for value in batch.values()} == {np.ndarray}
        assert {key: value.shape for key, value in batch.items()} == {k: tuple(v.shape) for k, v in expected.items()}
    with pytest.raises(ValueError, match="return_tensors='tf' is not known; choose 'pt'"):
        make(return_tensors="tf")


def test_samples_are_stacked_as_arrays_of_numpy_too():
    batch = default_data_collator([{"x": [1.0, 2.0], "label": 1}], return_tensors="np")
    assert batch["x"].tolist() == [[1.0, 2.0]]
    assert batch["labels"].dtype == np.int64


def test_the_collators_that_are_named_most_are_exported():
    for name in ("LanguageModeling", "Seq2Seq", "TokenClassification"):
        assert getattr(tr_core, f"DataCollatorFor{name}").__name__ in tr_core.__all__


def test_the_note_of_a_tokenizer_that_padding_is_slow_is_kept_back_while_a_collator_pads():
    class Noting(ToyTokenizer):
        deprecation_warnings = {}
        during = None

        def pad(self, features, **options):
            self.during = dict(self.deprecation_warnings)
            return super().pad(features, **options)

    tokenizer = Noting()
    DataCollatorWithPadding(tokenizer)([{"input_ids": [5]}])
    assert tokenizer.during == {"Asking-to-pad-a-fast-tokenizer": True}
    assert tokenizer.deprecation_warnings == {"Asking-to-pad-a-fast-tokenizer": False}


# Token classification


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["labels", "label"])
@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_labels_of_tokens_are_padded_as_the_tokens_are(side, name, convert):
    collate = DataCollatorForTokenClassification(ToyTokenizer(side), pad_to_multiple_of=2)
    batch = collate([{"input_ids": [5, 6, 7], name: convert([1, 2, 3])}, {"input_ids": [8], name: convert([4])}])
    expected = [[1, 2, 3, -100], [4, -100, -100, -100]]
    if side == "left":
        expected = [[-100, 1, 2, 3], [-100, -100, -100, 4]]
    assert batch["labels"].tolist() == expected
    assert batch["input_ids"].shape == (2, 4)
    assert "label" not in batch


def test_more_labels_than_tokens_are_refused_with_the_sample():
    collate = DataCollatorForTokenClassification(ToyTokenizer())
    with pytest.raises(ValueError, match="more labels than tokens: sample 1 of the batch has 3 values where 2 fit"):
        collate([{"input_ids": [5, 6], "labels": [1, 2]}, {"input_ids": [5], "labels": [1, 2, 3]}])


def test_tokens_without_labels_make_a_batch_without():
    batch = DataCollatorForTokenClassification(ToyTokenizer())([{"input_ids": [5]}])
    assert sorted(batch) == ["attention_mask", "input_ids"]


# Sequences to sequences


@pytest.mark.parametrize("side", ["right", "left"])
def test_labels_are_padded_to_a_length_of_their_own(side):
    features = [{"input_ids": [5, 6, 7], "labels": [1]}, {"input_ids": [8], "labels": torch.tensor([2, 3])}]
    batch = DataCollatorForSeq2Seq(ToyTokenizer(side), label_pad_token_id=-1)(features)
    assert batch["labels"].tolist() == ([[1, -1], [2, 3]] if side == "right" else [[-1, 1], [2, 3]])
    assert batch["input_ids"].shape == (2, 3)
    assert "decoder_input_ids" not in batch


def test_labels_are_padded_to_a_multiple_or_to_the_length_given():
    features = [{"input_ids": [5], "labels": [1, 2, 3]}]
    assert DataCollatorForSeq2Seq(ToyTokenizer(), pad_to_multiple_of=4)(features)["labels"].shape == (1, 4)
    collate = DataCollatorForSeq2Seq(ToyTokenizer(), padding="max_length", max_length=6)
    assert collate(features)["labels"].tolist() == [[1, 2, 3, -100, -100, -100]]
    collate.max_length = 2
    with pytest.raises(ValueError, match="labels longer than max_length=2: sample 0 .* has 3 values where 2 fit"):
        collate(features)


@pytest.mark.parametrize("padding", [False, "do_not_pad"])
def test_labels_are_left_as_they_are_without_padding(padding):
    collate = DataCollatorForSeq2Seq(ToyTokenizer(), padding=padding)
    assert collate([{"input_ids": [5], "labels": [1, 2]}] * 2)["labels"].tolist() == [[1, 2]] * 2
    with pytest.raises(ValueError, match=r"labels of different lengths, \[1, 2\], which make no tensor"):
        collate([{"input_ids": [5], "labels": [1]}, {"input_ids": [5], "labels": [1, 2]}])


def test_the_model_makes_the_inputs_of_its_decoder():
    class Shifting(nn.Module):
        def prepare_decoder_input_ids_from_labels(self, labels):
            return labels.roll(1, dims=1).masked_fill(labels.roll(1, dims=1) == -100, 0)

    batch = DataCollatorForSeq2Seq(ToyTokenizer(), Shifting())([{"input_ids": [5], "labels": [1, 2, 3]}])
    assert batch["decoder_input_ids"].tolist() == [[3, 1, 2]]
    plain = DataCollatorForSeq2Seq(ToyTokenizer(), nn.Linear(1, 1))([{"input_ids": [5], "labels": [1]}])
    assert "decoder_input_ids" not in plain


@pytest.mark.parametrize("features", [[{"input_ids": [5]}], [{"input_ids": [5], "labels": None}]])
def test_samples_without_labels_make_a_batch_without(features):
    batch = DataCollatorForSeq2Seq(ToyTokenizer(), nn.Linear(1, 1))(features)
    assert sorted(batch) == ["attention_mask", "input_ids"]


# Flattening


def test_sequences_are_joined_and_their_first_tokens_are_no_labels():
    batch = DataCollatorWithFlattening()([{"input_ids": [5, 6, 7]}, {"input_ids": torch.tensor([8, 9])}])
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "labels": [[-100, 6, 7, -100, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
    }


def test_joined_sequences_can_be_described_in_more_ways():
    collate = DataCollatorWithFlattening(
        separator_id=-1, return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=2
    )
    given = torch.tensor([4, 3])
    batch = collate([{"input_ids": [5, 6, 7], "labels": [1, 1, 2]}, {"input_ids": [8, 9], "labels": given}])
    assert batch["labels"].tolist() == [[-1, 1, 2, -1, 3]]
    assert given.tolist() == [4, 3]
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert batch["cu_seq_lens_q"].dtype == batch["seq_idx"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert "position_ids" not in DataCollatorWithFlattening(return_position_ids=False)([{"input_ids": [5]}])


def test_rows_of_unequal_length_without_padding_are_refused_with_what_pads_them():
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [1]}]
    with pytest.raises(ValueError, match="'input_ids' has rows of 1 to 3 values.*processing_class or a data_collator"):
        tr_core.default_data_collator(rows)


@pytest.mark.parametrize("name", ["label", "label_ids", "labels"])
@pytest.mark.parametrize("collate", [DataCollatorWithPadding(ToyTokenizer()), tr_core.default_data_collator])
def test_a_label_that_is_a_word_is_refused_by_its_name(name, collate):
    rows = [{"input_ids": [1], name: "positive"}]
    with pytest.raises(ValueError, match=f"'{name}' is the string 'positive'; a model takes class numbers"):
        collate(rows)


def test_other_words_and_none_are_left_out_of_a_stacked_batch():
    rows = [{"x": 1.0, "text": "a", "nothing": None, "label": 2}]
    assert list(tr_core.default_data_collator(rows)) == ["x", "labels"]


# Stacked and padded rows


def test_labels_become_int64_or_float32_and_strings_are_left_out():
    batch = default_data_collator(
        [{"label": 1, "x": [1.0, 2.0], "name": "a"}, {"label": 2, "x": [3.0, 4.0], "name": "b"}]
    )
    assert batch["labels"].dtype == torch.int64
    assert batch["x"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert "name" not in batch
    assert default_data_collator([{"label": 0.5}, {"label": 1.0}])["labels"].dtype == torch.float32
    assert default_data_collator([{"label_ids": [1, 2]}, {"label_ids": [3, 4]}])["labels"].tolist() == [[1, 2], [3, 4]]
    both = [{"label": 3, "label_ids": [1, 2]}, {"label": 4, "label_ids": [3, 4]}]
    assert default_data_collator(both)["labels"].tolist() == [3, 4]
    neither = [{"label": None, "label_ids": 1}, {"label": None, "label_ids": 2}]
    assert default_data_collator(neither)["labels"].tolist() == [1, 2]
    alone = default_data_collator([SimpleNamespace(x=[1.0, 2.0], label=1, note="text")])
    assert {name: value.tolist() for name, value in alone.items()} == {"x": [[1.0, 2.0]], "labels": [1]}
    arrays = default_data_collator([{"x": np.ones(2), "label": None}] * 2)
    assert arrays["x"].shape == (2, 2)


def test_a_tokenizer_pads_and_labels_get_their_name():
    class Tokenizer:
        def pad(self, features, padding, max_length, pad_to_multiple_of, return_tensors):
            width = max(len(feature["input_ids"]) for feature in features)
            rows = [feature["input_ids"] + [0] * (width - len(feature["input_ids"])) for feature in features]
            return {"input_ids": torch.tensor(rows), "label": torch.tensor([feature["label"] for feature in features])}

    batch = DataCollatorWithPadding(Tokenizer())([{"input_ids": [1], "label": 0}, {"input_ids": [1, 2], "label": 1}])
    assert batch["input_ids"].tolist() == [[1, 0], [1, 2]]
    assert batch["labels"].tolist() == [0, 1]
