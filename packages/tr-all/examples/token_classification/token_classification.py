"""Train a part-of-speech tagger from scratch on the Greek New Testament, and test it on a book it has not seen.

    python token_classification.py
    python token_classification.py --num_train_epochs 4 --hidden_size 192 --output_dir outputs/tagger

Shows: a label for each token with words cut into pieces, padding of labels, metrics over words and not over pieces,
batches of verses of like length. The settings are in `token_classification.args`; what is given on the command line
goes before them, and `--help` lists all that can be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tag_metrics import lookup_accuracy, tag_metrics
from tagged_greek import NAMES, Verse, installed_folder, read_splits
from transformers import BertConfig, BertForTokenClassification
from word_pieces import encode, train_tokenizer

from tr_all import (
    ArgumentParser,
    DataCollatorForTokenClassification,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    set_seed,
)

_ABOUT = "Train a part-of-speech tagger of Greek; token_classification.args holds what is not given here."
MAX_LENGTH = 160
TAGS = sorted(NAMES)


@dataclass
class ExampleArguments:
    """Model."""

    vocab_size: int = 10_000
    """Pieces that words are cut into; fewer pieces are shorter ones, which need a larger model."""

    hidden_size: int = 128
    """Width of the model."""

    num_layers: int = 2
    """Transformer layers."""


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and test; returns the test metrics.

    Args:
        argv: the arguments; None takes this program's.
    """
    parser = ArgumentParser((ExampleArguments, TrainingArguments), description=_ABOUT)
    example, args = parser.parse_args_into_dataclasses(argv, args_filename=Path(__file__).with_suffix(".args"))
    verses = read_splits(installed_folder())
    tokenizer = train_tokenizer(verses["train"], example.vocab_size, MAX_LENGTH)
    data = {name: encode(split, tokenizer, TAGS) for name, split in verses.items()}
    set_seed(args.seed)  # the weights are drawn from it
    trainer = Trainer(
        build_model(example, len(tokenizer)),
        args,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()
    output = trainer.predict(data["test"])
    metrics = {**output.metrics, "test_lookup_accuracy": lookup_accuracy(verses["train"], verses["test"])}
    trainer.log_metrics("test", metrics)
    trainer.save_metrics("test", metrics)
    print("\nthe first verse of the test:", tagged(trainer.model, tokenizer, verses["test"][0]), sep="\n")
    return metrics


def build_model(example: ExampleArguments, vocab_size: int) -> Any:
    """Return a small encoder with a tagger on top, with random weights."""
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=example.hidden_size,
        num_hidden_layers=example.num_layers,
        num_attention_heads=4,
        intermediate_size=2 * example.hidden_size,
        max_position_embeddings=MAX_LENGTH,
        attention_probs_dropout_prob=0.0,
        id2label=dict(enumerate(TAGS)),
        label2id={tag: number for number, tag in enumerate(TAGS)},
    )
    return BertForTokenClassification(config)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return accuracy and F1 over words."""
    return tag_metrics(prediction.predictions.argmax(axis=-1), prediction.label_ids)


def tagged(model: Any, tokenizer: Any, verse: Verse) -> str:
    """Return a verse with what the model takes each word for, and the right tag where that is wrong."""
    row = encode([verse], tokenizer, TAGS)[0]
    batch = {key: torch.tensor([row[key]], device=model.device) for key in ("input_ids", "attention_mask")}
    model.eval()
    with torch.no_grad():
        predicted = model(**batch).logits[0].argmax(-1).tolist()
    tags = [TAGS[number] for number, label in zip(predicted, row["labels"], strict=True) if label >= 0]
    words = zip(verse.words, tags, verse.tags, strict=True)
    return " ".join(
        f"{word}/{NAMES[tag]}" + ("" if tag == actual else f" (it is: {NAMES[actual]})") for word, tag, actual in words
    )


if __name__ == "__main__":
    main()
