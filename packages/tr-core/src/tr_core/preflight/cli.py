"""Check a script or a configuration from the command line, before it trains."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tr_args import ArgumentParser, ArgumentsError, Seq2SeqTrainingArguments, TrainingArguments
from tr_args.files import read_mapping
from tr_args.flags import FlagTable
from tr_args.schema import schema
from tr_core.preflight.checks import check_arguments
from tr_core.preflight.origins import Origins, argument_problems
from tr_core.preflight.report import Problem, Report
from tr_core.preflight.requested import is_first_process
from tr_core.preflight.script import check_script

USAGE_ERROR = 2
_CONFIGURATIONS = (".yaml", ".yml", ".toml", ".json")
_DESCRIPTION = """\
Find out before a run what would stop or spoil it, without training a step.

A configuration file (YAML, TOML, JSON) is checked as far as that is possible without the model:
options, their values and how they go together, installed packages, output folder, resuming, disk.

A script runs, with its arguments, up to the point where a Trainer would train, evaluate or predict.
There two samples go forward and backward, and the script ends. Checked are also data, labels, loading
processes, what the loss is divided by, the names of the metrics, disk and memory for the whole run.
Nothing is written to output_dir, no tracker is opened and no Hub is contacted by the Trainer. What the
script itself does before that point is done. A loop of its own ends at the optimizer's first step.
"""
_EPILOG = """\
examples:
  trainer check run.yaml
  trainer check run.yaml --learning_rate 1e-4
  trainer check train.py --config run.yaml --output_dir out
  trainer check --json train.py > report.json

exit codes: 0 no errors; 1 errors, with --strict also warnings; 2 this command line is wrong.
Codes such as T105 are listed in docs/check-codes.md of tr-core.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the words after `trainer check`; None for this program's.

    Returns:
        0; 1 if there is an error, or with --strict a warning; 2 if the target is missing or of unknown kind.
    """
    arguments = _parser().parse_args(argv)
    path = Path(arguments.file)
    try:
        target = _target(path)
        if target:
            _refuse_late_options(path, arguments.words)
        dataclasses = [_dataclass(name) for name in arguments.dataclass]
    except ValueError as error:
        print(f"trainer check: {error}", file=sys.stderr)
        return USAGE_ERROR
    # The output of a script is not part of the report.
    with contextlib.redirect_stdout(sys.stderr):
        report = check_config(path, arguments.words, dataclasses) if target else check_script(path, arguments.words)
    if is_first_process():
        print(report.to_json() if arguments.json else str(report), flush=True)
    return report.exit_code(strict=arguments.strict)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer check",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--strict", action="store_true", help="let warnings count as problems in the exit code")
    parser.add_argument(
        "--dataclass",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="a dataclass of the script whose options a configuration file holds too; can be repeated",
    )
    parser.add_argument("file", metavar="SCRIPT|CONFIG", help="a .py, .yaml, .yml, .toml or .json file")
    words = parser.add_argument("words", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of the script")
    words.required = False  # else the message about a missing file requires these too
    return parser


def _target(path: Path) -> bool:
    """Whether the target is a configuration; raises ValueError if it is neither that nor a script."""
    if path.suffix.lower() not in (".py", *_CONFIGURATIONS):
        kinds = ", ".join((".py", *_CONFIGURATIONS))
        raise ValueError(f"{str(path)!r} has the ending {path.suffix!r}; give a file that ends in one of {kinds}")
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    return path.suffix.lower() != ".py"


def _refuse_late_options(path: Path, words: Sequence[str]) -> None:
    """Raise if `--dataclass` comes after a configuration file: it would be read as an argument of the run."""
    if any(word.partition("=")[0] == "--dataclass" for word in words):
        raise ValueError(f"--dataclass goes before {path}: what comes after the file are arguments like those in it")


def _dataclass(name: str) -> type:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"--dataclass {name}: write MODULE:CLASS")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--dataclass {name}: {error}") from None


def check_config(path: Path, words: Sequence[str], dataclasses: Sequence[type] = ()) -> Report:
    """Return the report on a YAML, TOML or JSON file of training arguments.

    Args:
        path: the file.
        words: further arguments, which override the file's values, as on a script's command line.
        dataclasses: further dataclasses whose options the file may hold.
    """
    classes = (_arguments_class(path), *dataclasses)
    try:
        parsed = ArgumentParser(classes).parse_args_into_dataclasses(
            ["--config", str(path), *words], look_for_args_file=False
        )
    except ArgumentsError as error:
        problems = list(_with_hint(error, Origins(None, path, words), classes, bool(dataclasses)))
        args = None if words else _without(path, error, classes)
        if args is None:
            return Report(str(path), problems)
        return check_arguments(args, _InFile(args, path), str(path), problems)
    return check_arguments(parsed[0], Origins(parsed[0], path, words), str(path))


class _InFile(Origins):
    """Returns the origins of arguments that were built from a file's values, not by reading the file."""

    def __init__(self, args: TrainingArguments, file: Path) -> None:
        super().__init__(args, file)
        self._path = file

    def __call__(self, name: str) -> str:
        source = super().__call__(name)
        return self.locate(name, f"file {self._path}") if source == "call" else source


def _with_hint(error: ArgumentsError, origin: Origins, classes: Sequence[type], has_others: bool) -> Iterator[Problem]:
    for problem in argument_problems(error, origin, *classes):
        is_strange = problem.code == "T001" and "did you mean" not in problem.message
        if not is_strange or has_others or "no longer" in problem.message:
            yield problem
            continue
        hint = "; if it belongs to a dataclass of the script, name that with --dataclass MODULE:CLASS"
        yield Problem(problem.code, problem.message + hint, problem.origin)


def _arguments_class(path: Path) -> type:
    """Return the class of training arguments that has the options of the file."""
    try:
        names = set(read_mapping(path))
    except ArgumentsError:
        return TrainingArguments
    further = set(schema(Seq2SeqTrainingArguments)) - set(schema(TrainingArguments))
    return Seq2SeqTrainingArguments if names & further else TrainingArguments


def _without(path: Path, error: ArgumentsError, classes: tuple[type, ...]) -> Any:
    """Return the arguments without invalid ones, so that the others are checked too; None if they fail."""
    wrong = {name for problem in error.problems for name in (problem.field, *(other[0] for other in problem.others))}
    try:
        values = read_mapping(path)
        return ArgumentParser(classes).parse_dict(_left(values, wrong, classes))[0]
    except ArgumentsError:
        return None


def _left(values: Mapping[str, Any], wrong: set[str], classes: tuple[type, ...]) -> dict[str, Any]:
    table = FlagTable(classes)
    left: dict[str, Any] = {}
    for name, value in values.items():
        option = table.named(name)
        if name in wrong or (option is not None and option.spec.name in wrong):
            continue
        left[name] = _left(value, wrong, classes) if option is None and isinstance(value, Mapping) else value
    return left
