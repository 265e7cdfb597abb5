"""Run a program written for the Trainer of transformers on this one, with nothing edited: `trainer drop-in SCRIPT`."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from tr_log import get_logger

logger = get_logger(__name__)

# Module of transformers -> names in it -> where ours are. `transformers` itself has most of these names too.
REPLACED: dict[str, dict[str, str]] = {
    "transformers.trainer": {"DEFAULT_CALLBACKS": "tr_core.callbacks.defaults", "Trainer": "tr_core"},
    "transformers.trainer_seq2seq": {"Seq2SeqTrainer": "tr_core"},
    "transformers.training_args": {"TrainingArguments": "tr_args"},
    "transformers.training_args_seq2seq": {"Seq2SeqTrainingArguments": "tr_args"},
    "transformers.trainer_callback": {
        "DefaultFlowCallback": "tr_core",
        "EarlyStoppingCallback": "tr_core",
        "PrinterCallback": "tr_log",
        "ProgressCallback": "tr_log",
        "TrainerCallback": "tr_core",
        "TrainerControl": "tr_core",
        "TrainerState": "tr_core",
    },
    "transformers.hf_argparser": {"HfArgumentParser": "tr_args"},
}


@contextmanager
def drop_in() -> Iterator[None]:
    """Put this Trainer, its arguments and callbacks in the place of those of transformers, inside a block.

    Import the libraries that use the Trainer inside the block: a library that was imported before has its classes
    already.

    Raises:
        ImportError: transformers is not installed.
    """
    before: list[tuple[Any, str, Any]] = []
    modules = {name: import_module(name) for name in REPLACED}
    package = import_module("transformers")  # after its modules: importing them puts another object in its place
    try:
        for module_name, names in REPLACED.items():
            module = modules[module_name]
            for name, origin in names.items():
                ours = getattr(import_module(origin), name)
                for place in (module, package) if hasattr(package, name) else (module,):
                    before.append((place, name, getattr(place, name)))
                    setattr(place, name, ours)
        logger.info("drop-in: %s of transformers are this project's", ", ".join(_names()))
        yield
    finally:
        for place, name, value in reversed(before):
            setattr(place, name, value)


def _names() -> list[str]:
    return sorted(name for names in REPLACED.values() for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script whose `transformers.Trainer` is this project's.

    Args:
        argv: the words after `trainer drop-in`; None takes this program's.
    """
    parser = argparse.ArgumentParser(
        prog="trainer drop-in",
        description="Run a script written for the Trainer of transformers on this Trainer, with nothing edited. "
        f"Replaced: {', '.join(_names())}.",
    )
    parser.add_argument("script", type=Path, help="the script to run as a program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(argv)
    if not given.script.is_file():
        parser.error(f"there is no file {given.script}")
    with drop_in():
        sys.argv = [str(given.script), *given.arguments]
        sys.path.insert(0, str(given.script.parent.resolve()))
        runpy.run_path(str(given.script), run_name="__main__")
    return 0
