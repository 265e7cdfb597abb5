"""Texts as token numbers."""

import pytest
from encoded_text import encode, longest_first
from input_error import InputError
from labelled_text import Sample


def by_letter(texts, pairs, truncation, max_length):
    """Tokenize into letters; a pair follows its text after a 0."""
    assert truncation
    joined = texts if pairs is None else [f"{text}\0{pair}" for text, pair in zip(texts, pairs, strict=True)]
    return {"input_ids": [[ord(letter) for letter in text][:max_length] for text in joined]}


def test_texts_are_cut_to_the_length_and_labels_numbered():
    samples = [Sample("abc", None, "good"), Sample("d", None, "bad")]
    rows = encode(samples, ["bad", "good"], by_letter, 2, "training")
    assert rows == [{"input_ids": [97, 98], "label": 1}, {"input_ids": [100], "label": 0}]


def test_pairs_go_to_the_tokenizer_together():
    assert encode([Sample("a", "b")], [], by_letter, 9, "test") == [{"input_ids": [97, 0, 98]}]


def test_an_unknown_label_names_the_data():
    with pytest.raises(InputError, match=r"^validation data: 1 of 1 samples"):
        encode([Sample("a", None, "new")], ["old", "other"], by_letter, 9, "validation")


def test_no_samples_give_no_rows():
    assert encode([], ["a"], by_letter, 9, "test") == []


def test_the_longest_come_first_and_equals_stay_in_order():
    assert longest_first([{"input_ids": [1] * length} for length in (2, 5, 2, 9)]) == [3, 1, 0, 2]
