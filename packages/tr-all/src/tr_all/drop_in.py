"""Run a program written for the Trainer of transformers on this one, with nothing edited: `trainer drop-in SCRIPT`."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from textwrap import fill
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
# The same for modules of libraries that hold a copy of a class of transformers. They are left alone until imported.
COPIES: dict[str, dict[str, str]] = {"trl.scripts._hf_argparser": {"HfArgumentParser": "tr_args"}}

HELP_WIDTH = 78
COMPARED = """with --compare:
  The script runs twice, in a process each, first on transformers' Trainer, then
  on this one. Both run in the current folder. What is given as --output_dir, and
  the output_dir of any other arguments of a Trainer, becomes a folder of that
  name below transformers/ and ours/ in a temporary folder, which is removed where
  both runs are equal, or in that of --into. What the script writes elsewhere, the
  second run writes over. Log entries, metrics of predictions and weights are
  compared, but for times of the clock and figures of memory.
  With --same-draws, random numbers of dropout, collators and transforms, which
  the two draw in another order, are seeded for each batch and each forward pass.
  Exit status: 0 equal to the bit, 1 different, 2 one of the runs failed."""


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
    copies = _Copies(before)
    try:
        sys.meta_path.insert(0, copies)
        for module_name, names in REPLACED.items():
            module = modules[module_name]
            for name, origin in names.items():
                for place in (module, package) if hasattr(package, name) else (module,):
                    _replace(place, name, origin, before)
        logger.info("drop-in: %s of transformers are this project's", ", ".join(_names()))
        yield
    finally:
        sys.meta_path.remove(copies)
        for place, name, value in reversed(before):
            setattr(place, name, value)


def _replace(place: Any, name: str, origin: str, before: list[tuple[Any, str, Any]]) -> None:
    before.append((place, name, getattr(place, name)))
    setattr(place, name, getattr(import_module(origin), name))


class _Copies(MetaPathFinder):
    """Replaces the names of `COPIES` in a module once it is imported."""

    def __init__(self, before: list[tuple[Any, str, Any]]) -> None:
        self._before = before

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return what the other finders find, with a loader that replaces names after the module has run."""
        if fullname not in COPIES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_replace(module: Any) -> None:
            run(module)
            for name, origin in COPIES[fullname].items():
                if hasattr(module, name):
                    _replace(module, name, origin, self._before)

        vars(spec.loader)["exec_module"] = run_and_replace
        return spec


def _names() -> list[str]:
    return sorted(name for names in REPLACED.values() for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script whose `transformers.Trainer` is this project's.

    Args:
        argv: the words after `trainer drop-in`; None takes this program's.
    """
    parser = argparse.ArgumentParser(
        prog="trainer drop-in",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a script written for the Trainer of transformers on this Trainer, with nothing edited.\n\n"
        + fill(f"Replaced: {', '.join(_names())}.", HELP_WIDTH),
        epilog=COMPARED,
    )
    parser.add_argument(
        "--compare", action="store_true", help="run the script on both Trainers and show where their numbers part"
    )
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="where both runs of --compare write, and stay")
    parser.add_argument("--same-draws", action="store_true", help="with --compare: both runs draw the same numbers")
    parser.add_argument("script", type=Path, help="the script to run as a program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(argv)
    if not given.script.is_file():
        parser.error(f"there is no file {given.script}")
    if given.compare:
        compare_script = import_module("tr_all.compare").compare_script
        return compare_script(given.script, given.arguments, given.into, given.same_draws)
    if given.into is not None or given.same_draws:
        parser.error(
            "--into and --same-draws need --compare: without it, the script writes and draws as it always does"
        )
    with drop_in():
        sys.argv = [str(given.script), *given.arguments]
        sys.path.insert(0, str(given.script.parent.resolve()))
        runpy.run_path(str(given.script), run_name="__main__")
    return 0
