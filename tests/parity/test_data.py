"""Data: columns, collators, tokenizers, and data sets of other kinds."""

import parity_data as data
import parity_models as models
import tokenizers
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
