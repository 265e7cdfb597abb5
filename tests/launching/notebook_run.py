"""Launch a function as a cell of a notebook does. Usage: notebook_run.py LAUNCHER LOOP [--with_model].

LAUNCHER is `tr_dist` or `accelerate`: whose notebook_launcher it is. LOOP is `accelerate`, the documentation's, or
`trainer`, the one with a Trainer.
"""

import importlib
import json
import os
import sys

import torch
from transformers import AutoModelForSequenceClassification


def built():
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)


def with_trainer(model=None):
    from accelerate_train import texts

    from tr_all import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=int(os.environ.get("BATCH_SIZE", "2")),
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(built() if model is None else model, args, train_dataset=texts(24, 0))
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        facts = {"world_size": trainer.strategy.world_size, "strategy": type(trainer.strategy).__name__}
        os.write(sys.stdout.fileno(), (json.dumps({**facts, "losses": losses}) + "\n").encode())
    trainer.end()


def main():
    launcher, loop, *options = sys.argv[1:]
    notebook_launcher = importlib.import_module(launcher).notebook_launcher
    if loop == "trainer":
        training_function = with_trainer
    else:
        from accelerate_train import training_function
    args = (built(),) if "--with_model" in options else ()
    notebook_launcher(training_function, args, num_processes=int(os.environ.get("PROCESSES", "2")))


if __name__ == "__main__":
    main()
