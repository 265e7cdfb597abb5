"""Train a small model as a script does, and print what the run was. Started by the tests of launchers.

Usage: launched_run.py [--only_arguments] [--die_at STEP] [--wait_at STEP] TRAINING_ARGUMENTS ...
"""

import json
import os
import sys
import time
from dataclasses import dataclass

from tr_args import HfArgumentParser, TrainingArguments


@dataclass
class ScriptArguments:
    only_arguments: bool = False
    """Print the arguments and end."""

    die_at: int = -1
    """Step in which the last rank is killed, in the first start."""

    wait_at: int = -1
    """Step in which all ranks wait long."""


def say(**facts):
    """Print a line in one piece: several processes share the pipe."""
    os.write(sys.stdout.fileno(), (json.dumps(facts) + "\n").encode())


def train(script, args):
    import torch
    from torch import nn

    from tr_core import Trainer, TrainerCallback

    class BertLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(8, 8)

        def forward(self, x):
            return torch.tanh(self.dense(x))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(BertLayer(), BertLayer(), nn.Linear(8, 3))

        def forward(self, x, labels=None):
            logits = self.layers(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if state.global_step == script.die_at and is_first_start and args.process_index == args.world_size - 1:
                os.kill(os.getpid(), 9)
            if state.global_step == script.wait_at:
                say(waits=state.global_step)
                time.sleep(5)

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(8, generator=generator), "labels": torch.tensor(i % 3)} for i in range(64)]
    trainer = Trainer(Network(), args, train_dataset=rows, callbacks=[Steps()])
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        facts = {"world_size": trainer.strategy.world_size, "strategy": type(trainer.strategy).__name__}
        say(**facts, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), losses=losses)
    trainer.end()


def main():
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    if script.only_arguments:
        fields = ("bf16", "fp16", "use_cpu", "fsdp", "fsdp_config", "deepspeed", "max_grad_norm")
        place = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")}
        say(**place, **{name: getattr(args, name) for name in fields})
    else:
        train(script, args)


if __name__ == "__main__":
    main()
