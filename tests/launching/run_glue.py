"""Train and evaluate a classifier of texts, with the options of the documentation's run_glue.py.

The texts are tokens already: `--task_name` names a rule that makes them, for tests are without network.
"""

import json
import os
import sys
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForSequenceClassification

from tr_all import HfArgumentParser, Trainer, TrainingArguments

NUM_TEXTS = {"mrpc": 60}  # the last batch is not full
NUM_LABELS = 2


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Folder of a model."})


@dataclass
class DataTrainingArguments:
    task_name: str = field(metadata={"help": "Name of the task."})

    max_seq_length: int = 128
    """Longer texts are cut."""


def texts(task_name, max_length, vocabulary, seed):
    """Return texts of one length, whose first token says what they are."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(NUM_TEXTS[task_name]):
        tokens = torch.randint(vocabulary, (min(max_length, 12),), generator=generator)
        made.append({"input_ids": tokens, "labels": tokens[0] % NUM_LABELS})
    return made


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    of_model, of_data, args = parser.parse_args_into_dataclasses()
    torch.set_num_threads(1)
    model = AutoModelForSequenceClassification.from_pretrained(of_model.model_name_or_path, num_labels=NUM_LABELS)
    vocabulary = model.config.vocab_size
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=texts(of_data.task_name, of_data.max_seq_length, vocabulary, 0) if args.do_train else None,
        eval_dataset=texts(of_data.task_name, of_data.max_seq_length, vocabulary, 1) if args.do_eval else None,
    )
    losses = []
    if args.do_train:
        losses.append(trainer.train().training_loss)
    if args.do_eval:
        losses.append(trainer.evaluate()["eval_loss"])
    trainer.save_model()
    if trainer.is_world_process_zero():
        facts = {"world_size": trainer.strategy.world_size, "strategy": type(trainer.strategy).__name__}
        place = {"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "losses": losses}
        os.write(sys.stdout.fileno(), (json.dumps({**facts, **place}) + "\n").encode())
    trainer.end()


if __name__ == "__main__":
    main()
