"""Be one rank of a job of several machines: train, and say who it is.

Usage: node_run.py OUT SETTINGS, the latter a JSON list of lists of training arguments, each for a run of its own.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

from tr_args import HfArgumentParser
from tr_core import Trainer, TrainingArguments


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def say(**facts):
    """Print a line in one piece: several processes share the file."""
    os.write(sys.stdout.fileno(), (json.dumps(facts) + "\n").encode())


def main():
    out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(8, generator=generator), "labels": torch.tensor(i % 3)} for i in range(48)]
    for number, words in enumerate(settings):
        folder = str(out).replace("NODE", os.environ["GROUP_RANK"])
        usual = ["--output_dir", folder, "--per_device_train_batch_size", "2", "--disable_tqdm", "--use_cpu"]
        [training_args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*usual, *words])
        trainer = Trainer(Network(), training_args, train_dataset=rows)
        trainer.train()
        if trainer.is_world_process_zero() or training_args.save_on_each_node:
            weights = [value.tolist() for value in trainer.model.state_dict().values()]
            place = {name: int(os.environ[name]) for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
            say(run=number, rank=rank, world_size=trainer.strategy.world_size, weights=weights, **place)
        trainer.end()


if __name__ == "__main__":
    main()
