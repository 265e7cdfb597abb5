r"""Fine-tune a pretrained encoder to classify texts, evaluate it, and predict.

    python text_classification.py --model_name_or_path bert-base-cased --train_file train.csv \
        --validation_file dev.csv --do_train --do_eval --max_seq_length 128 --per_device_train_batch_size 16 \
        --learning_rate 5e-5 --num_train_epochs 3 --output_dir outputs/mine

Data is a `--task_name` (`real_data.py` lists them) or files (`labelled_text.py` says which). The same script runs on
several processes: `torchrun --nproc-per-node 2 text_classification.py ...`.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from classification_metrics import classification_metrics
from continuing import begin_in, checkpoints, continuing_command
from encoded_text import encode, longest_first
from head_rate import HeadRateTrainer
from input_error import InputError
from labelled_text import Columns, Sample, label_names, read_samples
from predictions_file import write_predictions
from real_data import load_task
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from tr_all import ArgumentParser, DataCollatorWithPadding, EvalPrediction, Trainer, TrainingArguments, set_seed
from tr_args import ArgumentsError

_ABOUT = "Fine-tune a pretrained encoder to classify texts, evaluate it, and predict."


@dataclass
class ModelArguments:
    """Model."""

    model_name_or_path: str
    """Folder or hub name of the pretrained model."""

    max_seq_length: int = 128
    """Tokens of a text that are used; what is beyond is cut off."""

    head_learning_rate: float | None = None
    """Learning rate of the new classifier on top, which bears a hundred times that of the pretrained rest. Unset is
    learning_rate."""

    def __post_init__(self) -> None:
        """Refuse a rate that does not train."""
        if self.head_learning_rate is not None and not self.head_learning_rate > 0:
            raise ValueError(f"head_learning_rate={self.head_learning_rate} must be above 0; or leave it out")


@dataclass
class DataArguments:
    """Data."""

    task_name: str | None = None
    """Published data set: reuters-r8 or rotten-tomatoes. Instead of files."""

    train_file: str | None = None
    """CSV, TSV or JSON Lines file to train on."""

    validation_file: str | None = None
    """File to evaluate on."""

    test_file: str | None = None
    """File to predict for; it may have no labels."""

    text_column: str = "text"
    """Column of the text."""

    text_pair_column: str | None = None
    """Column of the second text, in tasks on pairs."""

    label_column: str = "label"
    """Column of the label."""

    max_train_samples: int | None = None
    """Train on so many samples, drawn at random by the seed."""

    max_eval_samples: int | None = None
    """Evaluate on so many samples, likewise."""

    max_predict_samples: int | None = None
    """Predict for so many samples, likewise."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        files = [name for name in ("train_file", "validation_file", "test_file") if getattr(self, name)]
        if self.task_name is not None and files:
            raise ValueError(f"task_name={self.task_name!r} brings its own data; leave out {', '.join(files)}")
        for name in ("max_train_samples", "max_eval_samples", "max_predict_samples"):
            if (limit := getattr(self, name)) is not None and limit < 1:
                raise ValueError(f"{name}={limit} leaves no sample; give 1 or more, or leave it out")


@dataclass
class Data:
    """The samples of a run; None for what it does not need."""

    train: list[Sample] | None
    validation: list[Sample] | None
    test: list[Sample] | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; returns 0, or 2 if what was given cannot be used.

    Args:
        argv: its words; None takes this program's.
    """
    parser = ArgumentParser((ModelArguments, DataArguments, TrainingArguments), description=_ABOUT)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        model_args, data_args, args = parser.parse_args_into_dataclasses(words)
        run(model_args, data_args, args, words)
    except (ArgumentsError, InputError) as error:
        if os.environ.get("RANK", "0") == "0":  # all processes find the same; one says it
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(model_args: ModelArguments, data_args: DataArguments, args: TrainingArguments, words: list[str]) -> None:
    """Do what the switches say: train, evaluate, predict, report.

    Raises:
        InputError: something that was given cannot be used.
    """
    if not (args.do_train or args.do_eval or args.do_predict):
        raise InputError("there is nothing to do; give one or more of --do_train, --do_eval, --do_predict")
    if args.do_train:
        begin_in(args)
    data = load_data(data_args, args)
    model, tokenizer, names = load_model(model_args, args, data)
    trainer, test, order = build_trainer(model, tokenizer, names, model_args, args, data)
    results: dict[str, float] = {}
    if args.do_train and (metrics := trainer.train().metrics):  # none where the run that is resumed was finished
        trainer.save_model()
        trainer.save_state()
        report_metrics(trainer, "train", metrics)
    if args.do_eval:
        metrics = trainer.evaluate()
        report_metrics(trainer, "eval", metrics)
        results |= metrics
    if args.do_predict and data.test:
        output = trainer.predict(test, metric_key_prefix="predict")
        report_metrics(trainer, "predict", output.metrics)
        results |= output.metrics
        if trainer.is_world_process_zero():
            write_predictions(Path(args.output_dir) / "predictions.csv", data.test, order, output.predictions, names)
    if trainer.is_world_process_zero():
        report(trainer, results, words)


def load_data(data_args: DataArguments, args: TrainingArguments) -> Data:
    """Read the samples that the run needs, and draw those that a limit leaves.

    Raises:
        InputError: data that is needed was not given, or cannot be used.
    """
    read = _task_reader(data_args.task_name) if data_args.task_name else _file_reader(data_args)
    limits = (data_args.max_train_samples, data_args.max_eval_samples, data_args.max_predict_samples)
    wanted = (args.do_train, args.do_eval, args.do_predict)
    splits = ("train", "validation", "test")
    return Data(
        *(
            _draw(read(split), limit, args.seed) if needed else None
            for split, needed, limit in zip(splits, wanted, limits, strict=True)
        )
    )


def load_model(model_args: ModelArguments, args: TrainingArguments, data: Data) -> tuple[Any, Any, list[str]]:
    """Return model, tokenizer and the names of the classes, in the order of the model's outputs.

    Raises:
        InputError: the model cannot be loaded or does not fit the data.
    """
    name = model_args.model_name_or_path
    transformers.utils.logging.set_verbosity_error()  # what it would say of the new head is what is meant to be
    transformers.utils.logging.disable_progress_bar()
    with args.main_process_first(desc="loading the model"):
        try:
            config = AutoConfig.from_pretrained(name)
            tokenizer = AutoTokenizer.from_pretrained(name)
            names = choose_labels(config, data, name)
            set_seed(args.seed)  # the new head is drawn from it
            model = AutoModelForSequenceClassification.from_pretrained(
                name,
                num_labels=len(names),
                id2label=dict(enumerate(names)),
                label2id={label: number for number, label in enumerate(names)},
                problem_type="single_label_classification",
                # A head made for other classes is made anew, but only to be trained.
                ignore_mismatched_sizes=args.do_train,
            )
        except OSError as error:
            raise InputError(f"model {name!r} cannot be loaded: {error}") from error
    longest = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", sys.maxsize))
    if not 3 <= model_args.max_seq_length <= longest:
        raise InputError(f"--max_seq_length {model_args.max_seq_length}: {name} takes 3 to {longest} tokens")
    if tokenizer.pad_token is None:
        raise InputError(f"the tokenizer of {name!r} has no padding token; set pad_token in its tokenizer_config.json")
    return model, tokenizer, names


def choose_labels(config: Any, data: Data, name: str) -> list[str]:
    """Return the names of the classes: those of the training data, else those that the model was trained for.

    Raises:
        InputError: the training data has fewer than two, or the model was trained for none.
    """
    known = [config.id2label[number] for number in sorted(config.id2label)]
    if data.train is None:
        if all(label == f"LABEL_{number}" for number, label in enumerate(known)):
            raise InputError(
                f"model {name!r} was not trained to classify: it names no classes; add --do_train, or give the "
                "--output_dir of an earlier run as --model_name_or_path"
            )
        return known
    names = label_names(data.train)
    if len(names) < 2:
        raise InputError(f"the training data has one label only, {names[0]!r}; classifying needs two or more")
    return known if sorted(known) == sorted(names) else names  # outputs that mean these classes already go on doing so


def build_trainer(
    model: Any,
    tokenizer: Any,
    names: list[str],
    model_args: ModelArguments,
    args: TrainingArguments,
    data: Data,
) -> tuple[Trainer, list[dict[str, Any]], list[int]]:
    """Return the trainer, the encoded test data, and the place in the file of each of its samples."""
    length = model_args.max_seq_length
    train, validation, test = (
        encode(samples or [], names, tokenizer, length, source)
        for samples, source in ((data.train, "training"), (data.validation, "validation"), (data.test, "test"))
    )
    # Samples of one length together need the least padding; where each came from is needed again for its prediction.
    order = longest_first(test)
    trainer = HeadRateTrainer(
        model=model,
        args=args,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=train or None,
        eval_dataset=[validation[place] for place in longest_first(validation)] or None,
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
        head_learning_rate=model_args.head_learning_rate,
    )
    return trainer, [test[place] for place in order], order


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return accuracy and macro F1 of logits."""
    return classification_metrics(np.argmax(prediction.predictions, axis=-1), prediction.label_ids)


def report_metrics(trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
    """Print metrics and write them to the output folder, on the main process."""
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


def report(trainer: Trainer, results: dict[str, float], words: list[str]) -> None:
    """Print what the user wants to know in the end: how good, where, and how to go on."""
    args, state = trainer.args, trainer.state
    folder = Path(args.output_dir)
    print()
    for split, data in (("eval", "validation"), ("predict", "test")):
        if f"{split}_accuracy" in results:
            print(f"{data} accuracy {results[f'{split}_accuracy']:.4f}, macro F1 {results[f'{split}_f1']:.4f}")
    files = {
        "metrics": "all_results.json",
        "curves": "report.html",
        "model": "model.safetensors",
        "predictions": "predictions.csv",
    }
    rows = [(what, folder / name) for what, name in files.items() if (folder / name).exists()]
    found = checkpoints(folder)
    rows += [("checkpoint", found[-1])] if found else []
    print("\nfiles:", *(f"  {what:<11}  {path}" for what, path in rows), sep="\n")
    if args.do_train and found:
        print("\nto continue this run:", f"  {continuing_command(words, __file__, args, state)}", sep="\n")


def _task_reader(task: str) -> Any:
    splits = load_task(task)
    return lambda split: getattr(splits, split)


def _file_reader(data_args: DataArguments) -> Any:
    columns = Columns(data_args.text_column, data_args.text_pair_column, data_args.label_column)
    switches = {"train": "--do_train", "validation": "--do_eval", "test": "--do_predict"}

    def read(split: str) -> list[Sample]:
        path = getattr(data_args, f"{split}_file")
        if path is None:
            raise InputError(
                f"{switches[split]} needs data; give --{split}_file, or --task_name for a published data set"
            )
        return read_samples(path, columns, labels_required=split != "test")

    return read


def _draw(samples: list[Sample], limit: int | None, seed: int) -> list[Sample]:
    if limit is None or limit >= len(samples):
        return samples
    return [samples[place] for place in sorted(random.Random(seed).sample(range(len(samples)), limit))]


if __name__ == "__main__":
    sys.exit(main())
