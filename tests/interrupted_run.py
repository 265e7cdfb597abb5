"""Train a small model, as a script does: step by step said on stdout. Run by test_interruption_processes.py.

Usage: interrupted_run.py FOLDER [--workers N] [--step_s SECONDS] [--wait_at N] [--end FILE] [--save_async]
"""

import argparse
import multiprocessing
import os
import sys
import time

import torch
from shared.data import rows
from shared.models import Classifier

from tr_core import Trainer, TrainerCallback, TrainingArguments


def say(line):
    """Write a line at once and in one piece: several processes share the pipe."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


class Tell(TrainerCallback):
    """Says where the run is, takes its time, and waits in one step for a line on stdin."""

    def __init__(self, step_s, wait_at):
        self.step_s, self.wait_at = step_s, wait_at

    def on_step_begin(self, args, state, control, **kwargs):
        workers = [child.pid for child in multiprocessing.active_children()]
        say(f"begin {state.global_step} process {os.getpid()} workers {workers}")
        time.sleep(self.step_s)
        if state.global_step == self.wait_at:
            sys.stdin.readline()

    def on_save(self, args, state, control, **kwargs):
        say(f"saved {state.global_step}")

    def on_train_end(self, args, state, control, error=None, **kwargs):
        say(f"end {state.global_step} {type(error).__name__}")


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--step_s", type=float, default=0.0)
    parser.add_argument("--wait_at", type=int, default=-1)
    parser.add_argument("--end")
    parser.add_argument("--save_async", action="store_true")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    args = TrainingArguments(
        given.folder,
        per_device_train_batch_size=2,
        max_steps=30,
        save_steps=1000,
        logging_steps=5,
        disable_tqdm=True,
        use_cpu=True,
        dataloader_num_workers=given.workers,
        resume_from_checkpoint="auto",
        save_async=given.save_async,
    )
    trainer = Trainer(Classifier(seed=0), args, train_dataset=rows(64), callbacks=[Tell(given.step_s, given.wait_at)])
    trainer.train()
    if given.end and trainer.is_world_process_zero():
        torch.save(list(trainer.model.state_dict().values()), given.end)
    trainer.end()


if __name__ == "__main__":
    main()
