"""Columns of `datasets`: dropped as there, but not from a transform or a collator that needs them."""

import datasets
import parity_data as data
import parity_models as models
import pytest
import transformers
from parity_harness import OURS, REFERENCE, Scenario, run, run_both
from parity_tokenizers import WORDS, word_tokenizer

from tr_core.testing import measure_lengths


def rows(count=18):
    samples = data.classes(count).samples
    return [
        {**sample, "x": sample["x"].tolist(), "note": f"n{i}", "weight": float(i)} for i, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_gets_the_columns_that_it_makes_the_inputs_of(tmp_path, workers):
    """The reference removes the texts before the transform sees them, unless it is told to keep all columns."""
    encode = word_tokenizer()

    def transform(batch):
        encoded = encode(batch["text"], padding="max_length", max_length=6)
        ids = [[number % 17 for number in row] for row in encoded["input_ids"]]
        return {"input_ids": ids, "attention_mask": encoded["attention_mask"], "labels": batch["topic"]}

    def make():
        texts = [{"text": " ".join(WORDS[i : i + 3]), "topic": i % 2} for i in range(10)]
        return datasets.Dataset.from_list(texts).with_transform(transform)

    scenario = Scenario(models.bert_classifier, make, arguments={"dataloader_num_workers": workers})
    kept = Scenario(
        models.bert_classifier, make, arguments={"dataloader_num_workers": workers, "remove_unused_columns": False}
    )
    ours, theirs = run(OURS, scenario, tmp_path / "ours"), run(REFERENCE, kept, tmp_path / "kept")
    assert ours.losses == theirs.losses


def test_lengths_of_a_table_come_from_its_column_whatever_its_format():
    plain = datasets.Dataset.from_list([{"input_ids": [1] * n, "length": 10 * n} for n in (3, 1, 2)])
    formats = [plain, plain.with_format("torch"), plain.with_format("numpy"), plain.with_transform(lambda batch: batch)]
    for dataset in formats:
        assert measure_lengths(dataset, "length", "input_ids").tolist() == [30, 10, 20]
        assert measure_lengths(dataset, "other", "input_ids").tolist() == [3, 1, 2]


def test_lengths_are_those_that_a_transform_makes():
    raw = datasets.Dataset.from_list([{"text": "a" * n} for n in (3, 1, 2)])
    lazy = raw.with_transform(lambda batch: {"input_ids": [[1] * len(text) for text in batch["text"]]})
    assert measure_lengths(lazy, "length", "input_ids").tolist() == [3, 1, 2]


def test_a_collator_that_gets_all_columns_in_both_is_the_same(tmp_path):
    def collate(samples):
        assert all("weight" in sample for sample in samples)
        return transformers.default_data_collator([{k: s[k] for k in ("x", "labels")} for s in samples])

    arguments = {"remove_unused_columns": False}
    reference, ours = run_both(Scenario(models.Mlp, rows, None, arguments, {"data_collator": collate}), tmp_path)
    assert ours.losses == reference.losses
