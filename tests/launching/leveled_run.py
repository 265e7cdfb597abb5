"""Be one rank of a job on two nodes: set levels, build a Trainer, log at every level, train, save, and note what is so.

Usage: leveled_run.py (ours | transformers) FOLDER SETTINGS, the latter a JSON list of objects with `words` (training
arguments), `out`, `block` (set levels as the documentation's script does), `trains` and `verbosity` (the user's own).
What rank R prints in setting K is in FOLDER/K/rank-R.out and .err, and what it found out in rank-R.json.
"""

import json
import logging
import os
import shlex
import sys
from pathlib import Path

import datasets
import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.documented_logging import LOGGING

LIBRARIES = ("my_app", "tr_args", "tr_log", "tr_core", "tr_ckpt", "tr_optim", "tr_dist", "transformers", "datasets")
LEVELS = ("debug", "info", "warning", "error", "critical")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 3)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows():
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, generator=generator), "labels": torch.tensor(i % 3)} for i in range(32)]


def as_at_first(verbosity):
    """Undo what the setting before this one has set, and take the user's own level."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.NOTSET)
    for library in (transformers, datasets):
        library.utils.logging.set_verbosity(logging.WARNING)
    os.environ.pop("TR_VERBOSITY", None)
    if verbosity:
        os.environ["TR_VERBOSITY"] = verbosity
        transformers.utils.logging.set_verbosity(getattr(logging, verbosity))


def as_documented(training_args):
    """Set levels by the lines of the documentation."""
    lines = LOGGING.partition("trainer =")[0]
    names = {"logging": logging, "sys": sys, "datasets": datasets, "transformers": transformers}
    exec(lines, {"__name__": "my_app", "training_args": training_args, **names})


def run(kind, folder, setting):
    if kind == "ours":
        from tr_all import HfArgumentParser, Trainer, TrainingArguments
    else:
        from transformers import HfArgumentParser, Trainer, TrainingArguments

    usual = "--per_device_train_batch_size 2 --max_steps 2 --logging_steps 1 --save_steps 2 --use_cpu --report_to none"
    out = str(folder / setting["out"]).replace("NODE", os.environ["GROUP_RANK"])
    words = shlex.split(f"--output_dir {shlex.quote(out)} {usual} {setting['words']}")
    [args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    facts = {"level": args.get_process_log_level()}
    if setting["block"]:
        as_documented(args)
    trainer = Trainer(Network(), args, train_dataset=rows())
    for name in LIBRARIES:
        for level in LEVELS:
            getattr(logging.getLogger(f"{name}.part"), level)(f"{name} says {level}")
    for name in ("should_log", "should_save", "disable_tqdm", "process_index", "local_process_index", "world_size"):
        facts[name] = getattr(args, name)
    facts["is_world_process_zero"] = trainer.is_world_process_zero()
    facts["is_local_process_zero"] = trainer.is_local_process_zero()
    if setting["trains"]:
        metrics = trainer.train().metrics
        trainer.save_model(f"{out}/final")
        trainer.save_state()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
    if kind == "ours":
        trainer.end()
    return facts


def main():
    kind, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    for number, setting in enumerate(settings):
        place = folder / str(number)
        place.mkdir(parents=True, exist_ok=True)
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            stream.flush()
            with (place / f"rank-{rank}.{name}").open("wb") as file:
                os.dup2(file.fileno(), stream.fileno())
        as_at_first(setting["verbosity"])
        facts = run(kind, place, setting)
        (place / f"rank-{rank}.json").write_text(json.dumps(facts), "utf-8")
    sys.stdout.flush()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
