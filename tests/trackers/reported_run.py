"""Train with trackers, as a script does: `python reported_run.py ENDING TRAINING_ARGUMENTS ...`.

ENDING is `whole`, or what happens in step 6: `killed`, `failed`, `stopped` (by SIGTERM) or `interrupted` (by Ctrl-C).
"""

import math
import os
import signal
import sys

import torch
from torch import nn

from tr_all import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM, "interrupted": signal.SIGINT}
IN_STEP = 6


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)

    def forward(self, x, labels):
        predictions = self.layer(x)
        return {"loss": (predictions - labels).square().mean(), "logits": predictions}


class Reporting(Trainer):
    """Logs values of its own, numbers that JSON does not have among them."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        if model.training:
            self.log_metric("bias", model.layer.bias.detach().sum())
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Events(TrainerCallback):
    """Logs at step 3, and ends the run in step 6 if asked to."""

    def __init__(self, ending):
        self.ending, self.trainer = ending, None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            values = {
                "lost": math.nan,
                "large": math.inf,
                "small": -math.inf,
                "count": 7,
                "flag": True,
                "note": "words",
            }
            self.trainer.log({**values, "of a tensor": torch.tensor(0.1), "f1@5 (top)": 1e-300})

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == IN_STEP - 1 and self.ending in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.ending])
        elif state.global_step == IN_STEP - 1 and self.ending == "failed":
            raise ArithmeticError("as planned")


def metrics_of(prediction):
    error = abs(prediction.predictions - prediction.label_ids).mean()
    return {"error": error, "undefined": math.nan, "precision@1": 1 / 3}


def main():
    events = Events(sys.argv[1])
    [args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[2:])
    rows = [{"x": torch.tensor([1.0, float(number)]), "labels": torch.tensor([0.5 * number])} for number in range(16)]
    trainer = Reporting(
        Line(), args, train_dataset=rows, eval_dataset=rows[:4], compute_metrics=metrics_of, callbacks=[events]
    )
    events.trainer = trainer
    trainer.train()
    trainer.evaluate()
    trainer.predict(rows[:4])


if __name__ == "__main__":
    main()
