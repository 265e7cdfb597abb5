"""A script for `trainer blame`: trains on rows of which some spoil their step.

Started as: blamed_run.py FOLDER PLAN, where PLAN is JSON: `faults` by index, `options`, `number` of rows.
"""

import json
import sys

import torch
from torch import nn

from tr_core import Trainer, TrainingArguments, set_seed

FAULTS = ("nan", "label", "gradient", "spike")


class Regression(nn.Module):
    """Two layers with dropout, and a norm whose gradient at 0 is not finite."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 1)

    def forward(self, x, scale, labels=None):
        hidden = self.body(x)
        norms = (hidden * scale[:, None]).pow(2).sum(1).sqrt()
        loss = nn.functional.mse_loss(self.head(hidden)[:, 0], labels) + 1e-3 * norms.mean()
        return {"loss": loss}


def rows(number, faults):
    drawn, found = torch.Generator().manual_seed(1), []
    for index in range(number):
        row = {
            "x": torch.randn(6, generator=drawn),
            "scale": torch.ones(()),
            "labels": torch.randn((), generator=drawn),
        }
        fault = faults.get(str(index))
        if fault == "nan":
            row["x"][2] = torch.nan
        elif fault == "gradient":
            row["scale"] = torch.zeros(())
        elif fault is not None:
            row["labels"] = torch.tensor({"label": 1e30, "spike": 1e3}[fault])
        found.append(row)
    return found


class OwnBatches(Trainer):
    """Has a loader of its own."""

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4)


class OwnStep(Trainer):
    """Computes its gradients itself."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


def collate_flat(samples):
    """Put the samples behind each other, without a row for each."""
    columns = {name: torch.stack([sample[name] for sample in samples]) for name in ("scale", "labels")}
    return {"flat": torch.cat([sample["x"] for sample in samples]), **columns}


class Flat(Regression):
    """Takes flat batches."""

    def forward(self, flat, scale, labels=None):
        return super().forward(flat.reshape(-1, 6), scale, labels)


class Names:
    """Decodes rows."""

    model_input_names = ("x",)

    def decode(self, ids):
        return f"a row of {len(ids)}"


def main(folder, plan):
    options = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
    }
    set_seed(5)
    kind = {"own batches": OwnBatches, "own step": OwnStep}.get(plan.get("trainer"), Trainer)
    given = {"data_collator": collate_flat} if plan.get("flat") else {}
    data = rows(plan["number"], plan["faults"])
    args = TrainingArguments(folder, **options | plan.get("options", {}))
    model = Flat() if plan.get("flat") else Regression()
    trainer = kind(model, args, train_dataset=data, processing_class=Names() if plan.get("named") else None, **given)
    if plan.get("evaluates"):
        trainer.evaluate(data)
    trainer.train(resume_from_checkpoint=plan.get("resume"))
    trainer.strategy.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
