"""Data: columns, collators, tokenizers, and data sets of other kinds."""

import parity_data as data
import parity_models as models
import pytest
import tokenizers
import torch
import transformers

WORDS = [f"w{number}" for number in range(14)]


def tokenizer():
    """Return a word tokenizer made in memory."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{word: number for number, word in enumerate(WORDS, start=2)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")


def texts(count=11):
    """Return encoded texts of different lengths with labels, and columns that no model takes."""
    encode = tokenizer()
    samples = []
    for number in range(count):
        text = " ".join(WORDS[(number * 3 + k) % 14] for k in range(2 + number % 5))
        samples.append({**encode(text), "label": number % 2, "text": text, "number": number})
    return data.Samples(samples)


def test_a_tokenizer_pads_the_batches_the_same(parity):
    reference, ours = parity(
        models.bert_classifier,
        texts(),
        texts(5),
        options={"processing_class": tokenizer()},
        learning_rate=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        per_device_train_batch_size=3,
    )
    checkpoint = ours.folder / "checkpoint-8"
    written = {path.name for path in (reference.folder / "checkpoint-8").glob("tokenizer*")}
    assert written
    assert written == {path.name for path in checkpoint.glob("tokenizer*")}
    loaded = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert loaded("w0 w1")["input_ids"] == [2, 3]


def test_columns_that_the_model_does_not_take_are_dropped_the_same(parity):
    samples = data.classes()
    for number, sample in enumerate(samples.samples):
        sample |= {"note": "text", "weight": float(number)}
    parity(models.Mlp, samples)


@pytest.mark.parametrize("key", ["label", "labels"])
def test_the_names_of_labels_are_understood_the_same(parity, key):
    samples = data.classes()
    for sample in samples.samples:
        sample[key] = sample.pop("labels")
    parity(models.Mlp, samples)


def test_rows_of_label_ids_are_understood_the_same(parity):
    samples = data.regression()
    for sample in samples.samples:
        sample["label_ids"] = sample.pop("labels").tolist()
    parity(models.Linear, samples)


@pytest.mark.parametrize("kind", ["list", "array", "integer tensor", "number"])
def test_values_are_stacked_the_same(parity, kind):
    convert = {
        "list": lambda x: x.tolist(),
        "array": lambda x: x.numpy(),
        "integer tensor": lambda x: x.long(),
        "number": lambda x: float(x[0]),
    }[kind]
    samples = data.regression()
    for sample in samples.samples:
        sample["x"] = convert(sample["x"])

    class Any(models.Linear):
        def forward(self, x, labels=None):
            return super().forward(x.float().reshape(len(x), -1).expand(-1, 5), labels)

    parity(Any, samples)


class Fetched(data.Samples):
    """Samples that are fetched many at a time."""

    def __getitems__(self, indices):
        return [self.samples[index] for index in indices]


def test_samples_that_are_fetched_many_at_a_time_are_the_same(parity):
    parity(models.Mlp, Fetched(data.classes().samples))


class Restarting(data.Stream):
    """A stream in another order each pass."""

    def __init__(self, samples):
        super().__init__(samples)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        count = len(self.samples)
        return iter([self.samples[(index + 5 * self.epoch) % count] for index in range(count)])


def test_a_stream_is_told_the_epoch_in_both(parity):
    parity(models.Mlp, Restarting(data.classes()), max_steps=9)


class Sized(data.Stream):
    """A stream that knows its length."""

    def __len__(self):
        return len(self.samples)


def test_a_stream_with_a_length_is_the_same(parity):
    _, ours = parity(models.Mlp, Sized(data.classes()), gradient_accumulation_steps=2)
    assert ours.trainer.state.max_steps == 6


def test_a_list_of_samples_is_data_enough(parity):
    parity(models.Mlp, [dict(sample) for sample in data.classes().samples])


def test_torch_tensors_of_labels_are_kept_as_they_are(parity):
    samples = data.classes()
    for sample in samples.samples:
        sample["labels"] = torch.tensor(sample["labels"])
    parity(models.Mlp, samples)
