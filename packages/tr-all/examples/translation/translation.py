"""Train a translator from scratch on messages of programs, and test it on messages it has not seen.

    python translation.py
    python translation.py --language ko --output_dir outputs/translation-ko
    python translation.py --resume

Shows: evaluation of what the model writes and not of its loss (`predict_with_generate`), the best model by that,
label smoothing, a test against what a lookup would give. The model is shown, with each message, the most similar one
of the training data with its translation: data this small teaches it more by example than by heart. All training
arguments can be given; `--help` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from chrf import chrf
from message_pairs import Pair, read_pairs, split
from small_translator import encode, small_translator, train_tokenizer
from translation_memory import most_frequent_translation, nearest_pairs

from tr_all import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


@dataclass
class ExampleArguments:
    """Model and data."""

    language: Literal["zh", "ko", "ar"] = "zh"
    """Language to translate into: Chinese, Korean or Arabic."""

    max_characters: int = 60
    """Leave longer messages out."""

    memory: bool = True
    """Show the model the most similar training message with its translation."""

    vocab_size: int = 2000
    """Tokens of both languages together."""

    hidden_size: int = 128
    """Width of the model."""

    num_layers: int = 2
    """Layers of the encoder, and of the decoder."""

    dropout: float = 0.1
    """Share of the hidden values left out at random."""

    resume: bool = False
    """Go on from the newest checkpoint in the output folder, if there is one."""

    min_chrf: float | None = None
    """Fail if the translations of the test messages are worse than this."""

    show: int = 12
    """Translations printed at the end."""


@dataclass
class Arguments(Seq2SeqTrainingArguments):
    """Training: what suits this example unless it is given."""

    output_dir: str = "outputs/translation"
    """Folder for checkpoints, the model and metrics."""
    num_train_epochs: float = 16
    """Passes over the training messages."""
    per_device_train_batch_size: int = 32
    """Messages a step."""
    per_device_eval_batch_size: int = 128
    """Messages translated at a time."""
    learning_rate: float = 2e-3
    """Peak learning rate."""
    warmup_steps: float = 0.1
    """Share of the steps, or number of steps, over which the learning rate rises."""
    adam_beta2: float = 0.98
    """Decay of AdamW's mean of squares."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    label_smoothing_factor: float = 0.1
    """Share of each label spread over all tokens."""
    train_sampling_strategy: str = "group_by_length"
    """Which messages form a batch: those of like length need little padding."""
    predict_with_generate: bool = True
    """Translate in evaluations; False leaves them the loss alone."""
    generation_max_length: int | None = 48
    """Tokens of a translation at most."""
    eval_strategy: str = "steps"
    """When to evaluate."""
    eval_steps: float | None = 0.25
    """Share of the steps, or number of steps, between two evaluations."""
    save_steps: float = 0.25
    """Share of the steps, or number of steps, between two checkpoints."""
    save_total_limit: int | None = 2
    """Checkpoints that are kept: the best and the last."""
    load_best_model_at_end: bool = True
    """Test the best model, not the last."""
    metric_for_best_model: str | None = "chrf"
    """What is best."""
    logging_steps: float = 100
    """Steps between two entries of the log."""


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and test; returns the test metrics.

    Args:
        argv: the arguments; None takes this program's.

    Raises:
        SystemExit: the data is missing, or `min_chrf` is not reached.
    """
    parser = HfArgumentParser((ExampleArguments, Arguments), description=__doc__.splitlines()[0])
    example, args = parser.parse_args_into_dataclasses(argv)
    pairs = split(read_pairs(example.language, example.max_characters))
    tokenizer = train_tokenizer([text for pair in pairs["train"] for text in pair], example.vocab_size)
    near = {name: nearest_pairs(pairs["train"], [pair.english for pair in part]) for name, part in pairs.items()}
    data = {name: encode(part, tokenizer, near[name] if example.memory else None) for name, part in pairs.items()}
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
    output = trainer.predict(data["test"])
    metrics = {**output.metrics, **lookup_metrics(pairs, near["test"])}
    trainer.log_metrics("test", metrics)
    trainer.save_metrics("test", metrics)
    if args.predict_with_generate:
        report(pairs["test"], decode(output.predictions, tokenizer), example.show)
        require(metrics, example.min_chrf)
    return metrics


def measure_with(tokenizer: Any) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a function that gives chrF of generated tokens, and the share of texts that are wholly right."""

    def measure(prediction: EvalPrediction) -> dict[str, float]:
        written, right = decode(prediction.predictions, tokenizer), decode(prediction.label_ids, tokenizer)
        same = [one == other for one, other in zip(written, right, strict=True)]
        return {"chrf": chrf(written, right), "exact": float(np.mean(same))}

    return measure


def decode(tokens: np.ndarray, tokenizer: Any) -> list[str]:
    """Return the texts of rows of tokens; negative ones are padding."""
    rows = np.where(tokens < 0, tokenizer.pad_token_id, tokens)
    return [text.strip() for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]


def lookup_metrics(pairs: dict[str, list[Pair]], near: Sequence[Pair]) -> dict[str, float]:
    """Return chrF of translating without a model: as the most similar training message, and always the same."""
    references = [pair.translation for pair in pairs["test"]]
    always = [most_frequent_translation(pairs["train"])] * len(references)
    return {
        "test_nearest_chrf": chrf([pair.translation for pair in near], references),
        "test_most_frequent_chrf": chrf(always, references),
    }


def report(test: Sequence[Pair], written: Sequence[str], count: int) -> None:
    """Print messages of the test, spread evenly over it, with what the model wrote and what is right."""
    count = min(count, len(test))
    for place in (number * len(test) // count for number in range(count)):
        pair = test[place]
        right = "right" if written[place] == pair.translation else f"reference: {pair.translation}"
        print(f"{pair.english}  ->  {written[place]}  ({right})")


def require(metrics: dict[str, float], min_chrf: float | None) -> None:
    """Raise if the translations are worse than was asked for.

    Raises:
        SystemExit: they are.
    """
    if min_chrf is not None and metrics["test_chrf"] < min_chrf:
        raise SystemExit(
            f"error: chrF of the test messages is {metrics['test_chrf']:.1f}, and at least {min_chrf} was asked for"
        )


if __name__ == "__main__":
    main()
