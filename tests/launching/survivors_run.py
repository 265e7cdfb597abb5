"""A run whose processes come and go: FOLDER STEPS. Each process prints the SHA-256 of its weights and of the log."""

import hashlib
import json
import sys
import time

import torch
from torch import nn

from tr_core import Trainer, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Dropout(0.3), nn.Linear(37, 5))

    def forward(self, x, labels=None):
        time.sleep(0.01)  # steps that last long enough to be hit
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def digest(data):
    return hashlib.sha256(data).hexdigest()


def main():
    folder, steps = sys.argv[1:]
    drawn = torch.Generator().manual_seed(0)
    rows = [
        {"x": torch.randn(13, generator=drawn), "labels": torch.randint(5, (), generator=drawn)} for _ in range(203)
    ]
    args = TrainingArguments(
        folder,
        elastic="bitwise",
        virtual_shards=4,
        snapshot_steps=16,
        use_cpu=True,
        max_steps=int(steps),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=40,
        save_steps=40,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        log_level="info",
    )
    torch.manual_seed(0)
    trainer = Trainer(Model(), args, train_dataset=rows, eval_dataset=rows[:30])
    trainer.train()
    weights = trainer.model.state_dict()
    logs = [
        {name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name}
        for entry in trainer.state.log_history
        if "train_runtime" not in entry
    ]
    held = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    print("END", digest(held), digest(json.dumps(logs, sort_keys=True).encode()), flush=True)


main()
