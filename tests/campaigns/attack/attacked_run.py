"""Be one process of a job that is attacked: train a little and be struck where and how it is asked for.

Usage: attacked_run.py OUT [--strike WORDS] [OPTION ...], or attacked_run.py OUT --command JSON for `trainer ckpt`.
Started by launchers, or forked of an interpreter that has everything imported.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "robustness"))
sys.path.insert(0, str(Path(__file__).parent))

from rank_run import Record
from strikes import Strike, Striker

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TR_RENDEZVOUS_FILE")


def main() -> None:
    """Do what the command line says."""
    options = read_options()
    if options.plain:
        for name in _LAUNCHER:
            os.environ.pop(name, None)
    if options.notebook:
        from tr_dist import notebook_launcher

        notebook_launcher(_start, (options,), num_processes=2)
    else:
        _start(options)


def _start(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    os.chdir(options.out.parent)
    striker = Striker(options.out, int(os.environ.get("RANK", "0")), options.strike)
    striker.reach("start")
    if options.command:
        sys.exit(_command(options, striker))
    train(options, striker)


def read_options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--strike", type=Strike.read)
    parser.add_argument("--plain", action="store_true", help="without a launcher's variables")
    parser.add_argument("--notebook", action="store_true", help="be a notebook that launches two ranks")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--arguments", type=json.loads, default={}, help="further training arguments")
    parser.add_argument("--command", type=json.loads, help="words of `trainer ckpt`, in place of training")
    return parser.parse_args()


def _command(options: argparse.Namespace, striker: Striker) -> int:
    from shared.commands import command

    watch_files(striker)
    return command("ckpt")(options.command)


def train(options: argparse.Namespace, striker: Striker) -> None:
    """Train from the newest checkpoint if there is one, evaluate, predict, and end."""
    import torch
    from attacked_parts import Attacked, build_parts

    torch.set_num_threads(1)
    record = Record(options.out)
    atexit.register(striker.reach, "atexit")
    from tr_core import TrainingArguments

    settings = {
        "output_dir": str(options.out / "run"),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 2,
        "save_total_limit": 1,
        "ddp_timeout": 20,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "dataloader_num_workers": options.workers,
        "resume_from_checkpoint": "auto",
        **options.arguments,
    }
    watch_files(striker)
    trainer = Attacked(args=TrainingArguments(**settings), **build_parts(striker, record, options.rows))
    trainer.attach(striker, record)
    trainer.train()
    weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        record.end(trainer, weights)
    trainer.predict(trainer.eval_dataset)
    striker.reach("closing")
    trainer.end()
    striker.reach("after")


def watch_files(striker: Striker) -> None:
    """Have every operation on files be a place: `file`, and `file:` with its name, or `folder` if of no checkpoint."""
    from disk import path_of, replace_every_operation

    def reach(name: str, operation: Any, arguments: tuple[Any, ...]) -> Any:
        striker.reach("file")
        is_saving = any("checkpoint-" in path_of(each) for each in arguments)
        striker.reach(f"file:{name}" if is_saving else "folder")
        return operation(*arguments)

    replace_every_operation(reach)


if __name__ == "__main__":
    main()
