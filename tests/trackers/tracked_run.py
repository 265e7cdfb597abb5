"""Train two steps with Aim: `python tracked_run.py FOLDER PART_OF_A_TOKEN ...`."""

import sys

import torch
from reported_run import Line

from tr_core import Trainer, TrainingArguments

if __name__ == "__main__":
    rows = [{"x": torch.tensor([1.0, float(number)]), "labels": torch.tensor([1.0])} for number in range(4)]
    args = TrainingArguments(
        sys.argv[1],
        report_to=["aim"],
        run_name="first",
        max_steps=2,
        per_device_train_batch_size=2,
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        hub_token="".join(sys.argv[2:]),
    )
    trainer = Trainer(Line(), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("losses", *losses, trainer.state.log_history[-1]["eval_loss"])
