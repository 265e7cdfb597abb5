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


def test_more_labels_than_tokens_are_refused_with_the_sample():
    collate = DataCollatorForTokenClassification(ToyTokenizer())
    with pytest.raises(ValueError, match="more labels than tokens: sample 1 of the batch has 3 values where 2 fit"):
        collate([{"input_ids": [5, 6], "labels": [1, 2]}, {"input_ids": [5], "labels": [1, 2, 3]}])


def test_tokens_without_labels_make_a_batch_without():
    batch = DataCollatorForTokenClassification(ToyTokenizer())([{"input_ids": [5]}])
    assert sorted(batch) == ["attention_mask", "input_ids"]


# Sequences to sequences


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


@pytest.mark.parametrize("features", [[{"input_ids": [5]}], [{"input_ids": [5], "labels": None}]])
def test_samples_without_labels_make_a_batch_without(features):
    batch = DataCollatorForSeq2Seq(ToyTokenizer(), nn.Linear(1, 1))(features)
    assert sorted(batch) == ["attention_mask", "input_ids"]


# Flattening


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
