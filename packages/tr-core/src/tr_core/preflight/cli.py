"""Check a script or a configuration from the command line, before it trains."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tr_core.preflight.config import check_config
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
