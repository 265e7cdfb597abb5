"""Train a translator from scratch on messages of programs, and test it on messages it has not seen.

    python translation.py
    python translation.py --language ko --output_dir outputs/translation-ko
    python translation.py --resume

Shows: evaluation of what the model writes and not of its loss (`predict_with_generate`), the best model by that,
label smoothing, a test against what a lookup would give. The settings are in `translation.args`; what is given on the
command line goes before them, and `--help` lists all that can be given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from message_pairs import Pair, read_pairs, split
from nearest_pair import most_frequent_translation, nearest_pairs
from small_translator import encode, small_translator, train_tokenizer

from tr_all import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

try:
    from sacrebleu.metrics import CHRF
except ImportError:
    raise SystemExit(
        "error: sacrebleu, which computes chrF, is missing; run: python -m pip install sacrebleu"
    ) from None

_ABOUT = "Train a translator of the messages of programs; translation.args holds what is not given here."

# Evaluations during training take the most probable token at each step; the test can afford to look further.
TEST_BEAMS = 4


@dataclass
class ExampleArguments:
    """Model and data."""

    language: Literal["zh", "ko", "ar"] = "zh"
    """Language to translate into: Chinese, Korean or Arabic."""

    max_characters: int = 60
    """Leave longer messages out."""

    vocab_size: int = 2000
    """Tokens of both languages together."""

    hidden_size: int = 128
    """Width of the model."""

    num_layers: int = 2
    """Layers of the encoder, and of the decoder."""

    dropout: float = 0.2
    """Share of the hidden values left out at random."""

    resume: bool = False
    """Go on from the newest checkpoint in the output folder, if there is one."""

    show: int = 12
    """Translations printed at the end."""


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and test; returns the test metrics.

    Args:
        argv: the arguments; None takes this program's.

    Raises:
        SystemExit: the data is missing, or nothing is to be generated.
    """
    parser = HfArgumentParser((ExampleArguments, Seq2SeqTrainingArguments), description=_ABOUT)
    example, args = parser.parse_args_into_dataclasses(argv, args_filename=Path(__file__).with_suffix(".args"))
    if not args.predict_with_generate:
        raise SystemExit("error: this example measures what the model writes; leave predict_with_generate=True")
    pairs = split(read_pairs(example.language, example.max_characters))
    tokenizer = train_tokenizer([text for pair in pairs["train"] for text in pair], example.vocab_size)
    data = {name: encode(part, tokenizer) for name, part in pairs.items()}
    set_seed(args.seed)  # the weights are drawn from it
    model = small_translator(tokenizer, example.hidden_size, example.num_layers, example.dropout)
    trainer = Seq2SeqTrainer(
        model,
        args,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        compute_metrics=measure_with(tokenizer),
    )
    trainer.train(resume_from_checkpoint="auto" if example.resume else None)
    trainer.save_model()
    output = trainer.predict(data["test"], num_beams=args.generation_num_beams or TEST_BEAMS)
    metrics = {**output.metrics, **lookup_metrics(pairs["train"], pairs["test"])}
    trainer.log_metrics("test", metrics)
    trainer.save_metrics("test", metrics)
    report(pairs["test"], decode(output.predictions, tokenizer), example.show)
    return metrics


def measure_with(tokenizer: Any) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a function that gives chrF of generated tokens, and the share of texts that are wholly right."""

    def measure(prediction: EvalPrediction) -> dict[str, float]:
        written, right = decode(prediction.predictions, tokenizer), decode(prediction.label_ids, tokenizer)
        return {"chrf": chrf(written, right), "exact": exact(written, right)}

    return measure


def chrf(written: Sequence[str], right: Sequence[str]) -> float:
    """Return chrF of all texts together, from 0 to 100."""
    return CHRF().corpus_score(list(written), [list(right)]).score


def exact(written: Sequence[str], right: Sequence[str]) -> float:
    """Return the share of texts that are wholly right."""
    return float(np.mean([one == other for one, other in zip(written, right, strict=True)]))


def decode(tokens: np.ndarray, tokenizer: Any) -> list[str]:
    """Return the texts of rows of tokens; negative ones are padding."""
    rows = np.where(tokens < 0, tokenizer.pad_token_id, tokens)
    return [text.strip() for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]


def lookup_metrics(train: Sequence[Pair], test: Sequence[Pair]) -> dict[str, float]:
    """Return how good it is to translate as the most similar training message, and always by the same."""
    right = [pair.translation for pair in test]
    nearest = [pair.translation for pair in nearest_pairs(train, [pair.english for pair in test])]
    always = [most_frequent_translation(train)] * len(right)
    return {
        "test_nearest_chrf": chrf(nearest, right),
        "test_nearest_exact": exact(nearest, right),
        "test_most_frequent_chrf": chrf(always, right),
    }


def report(test: Sequence[Pair], written: Sequence[str], count: int) -> None:
    """Print messages of the test, spread evenly over it, with what the model wrote and what is right."""
    count = min(count, len(test))
    for place in (number * len(test) // count for number in range(count)):
        pair = test[place]
        right = "right" if written[place] == pair.translation else f"reference: {pair.translation}"
        print(f"{pair.english}  ->  {written[place]}  ({right})")


if __name__ == "__main__":
    main()
