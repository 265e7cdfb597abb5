"""Check a script or a configuration from the command line, before it trains."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tr_args import ArgumentParser, ArgumentsError, Seq2SeqTrainingArguments
from tr_args.files import read_mapping
from tr_core.plugins import PluginError
from tr_core.preflight.origins import (
    Origins,
    argument_problems,
    chain,
    frames_of,
    last_line,
    passed_through,
    raised_at,
    shown,
)
from tr_core.preflight.report import Problem, Report, read_report
from tr_core.preflight.requested import VARIABLE, PreflightDone, is_first_process

USAGE_ERROR = 2
_CONFIGURATIONS = (".yaml", ".yml", ".toml", ".json")
_DESCRIPTION = """\
Find out before a run what would stop or spoil it, without training a step.

A configuration file (YAML, TOML, JSON) is checked as far as that is possible without the model.
A script runs, with its arguments, up to the point where a Trainer would train, evaluate or predict.
There two samples go forward and backward, and the script ends; the Trainer writes and sends nothing.
What the script itself does before is done. A loop of its own ends at the optimizer's first step.
"""
_EPILOG = """\
examples:
  trainer check run.yaml --learning_rate 1e-4
  trainer check --json train.py --config run.yaml > report.json

exit codes: 0 no errors; 1 errors, with --strict also warnings; 2 this command line is wrong.
What is checked, and codes such as T105, are listed in docs/check-codes.md of tr-core.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 if there is an error, or with --strict a warning; 2 if the target is missing or of unknown kind.
    """
    arguments = _parser().parse_args(argv)
    path = Path(arguments.file)
    try:
        _check_usage(path, arguments.words)
        dataclasses = [_dataclass(name) for name in arguments.dataclass]
    except ValueError as error:
        print(f"trainer check: {error}", file=sys.stderr)
        return USAGE_ERROR
    # The output of a script is not part of the report.
    with contextlib.redirect_stdout(sys.stderr):
        is_script = path.suffix.lower() == ".py"
        report = check_script(path, arguments.words) if is_script else check_config(path, arguments.words, dataclasses)
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


def _check_usage(path: Path, words: Sequence[str]) -> None:
    """Raise ValueError if the target is not a file of a known kind, or an option of the command comes after it."""
    kinds = (".py", *_CONFIGURATIONS)
    if path.suffix.lower() not in kinds:
        raise ValueError(
            f"{str(path)!r} has the ending {path.suffix!r}; give a file that ends in one of {', '.join(kinds)}"
        )
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    if path.suffix.lower() != ".py" and any(word.partition("=")[0] == "--dataclass" for word in words):
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

    Where options are wrong, the others are checked too, unless some come from the command line.
    """
    from tr_core.preflight.checks import check_arguments  # late, so that help and a mistyped word come at once

    parser, given = ArgumentParser((Seq2SeqTrainingArguments, *dataclasses)), ["--config", str(path), *words]
    try:
        args = parser.parse_args_into_dataclasses(given, look_for_args_file=False)[0]
        return check_arguments(args, Origins(args, path, words), str(path))
    except ArgumentsError as error:
        problems = list(argument_problems(error, Origins(None, path, words)))
        wrong = {name for problem in error.problems for name in (problem.field, *(o[0] for o in problem.others))}
    if not dataclasses:
        hint = "; if it belongs to a dataclass of the script, name that with --dataclass MODULE:CLASS"
        problems = [Problem(p.code, p.message + hint * _is_strange(p), p.origin) for p in problems]
    with contextlib.suppress(ArgumentsError):
        if not words:
            args = parser.parse_dict(_without(read_mapping(path), wrong))[0]
            return check_arguments(args, Origins(None, path), str(path), problems)
    return Report(str(path), problems)


def _is_strange(problem: Problem) -> bool:
    return problem.code == "T001" and "did you mean" not in problem.message and "no longer" not in problem.message


def _without(values: Any, wrong: set[str]) -> Any:
    """Return values without wrong ones, in sections too."""
    if not isinstance(values, dict):
        return values
    return {name: _without(value, wrong) for name, value in values.items() if name not in wrong}


class OwnLoopError(SystemExit):
    """Raised at an optimizer step outside of a Trainer."""


def check_script(script: Path, words: Sequence[str]) -> Report:
    """Run `script` as a program until it would train, evaluate or predict, and return the report of that point.

    The script ends there. It also ends at an optimizer step without a Trainer, as in its own loop.
    """
    error: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        answer = Path(folder) / "report.json"
        with _as_program(script, words, answer):
            try:
                runpy.run_path(str(script.absolute()), run_name="__main__")
            except KeyboardInterrupt:
                raise
            except BaseException as caught:  # report whatever a script raises, SystemExit included
                error = caught
        report = read_report(answer)
    if report is not None:
        report.target = str(script)
        return report
    if isinstance(error, PreflightDone):  # another rank has the report
        return Report(str(script))
    return Report(str(script), list(_instead(script, Origins(None, script, words), error)))


@contextlib.contextmanager
def _as_program(script: Path, words: Sequence[str], answer: Path) -> Iterator[None]:
    """Make the process one of the script's own inside the block: it is to be checked, and no optimizer makes a step."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def refuse(optimizer: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if all(parameter.device.type == "meta" for group in optimizer.param_groups for parameter in group["params"]):
            return  # the preflight's own step, which measures the size of an optimizer's state
        raise OwnLoopError(1)

    arguments, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.absolute().parent))
    os.environ[VARIABLE] = str(answer)
    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, path
        del os.environ[VARIABLE]
        handle.remove()


def _instead(script: Path, origin: Origins, error: BaseException | None) -> Iterator[Problem]:
    """Yield the reason for a missing report of a Trainer."""
    needed = "needed is a script that calls train, evaluate or predict of a tr_core Trainer"
    if error is None or (isinstance(error, SystemExit) and not error.code):
        yield Problem("T006", f"{script.name} ended, and no Trainer began to train, evaluate or predict; {needed}")
        return
    where = raised_at(error) or shown(script)
    refused = next((cause for cause in chain(error) if isinstance(cause, ArgumentsError)), None)
    if isinstance(error, OwnLoopError):
        yield Problem("T011", f"an optimizer made a step without a Trainer; {needed}", where)
    elif refused is not None:
        for problem in argument_problems(refused, origin):
            yield Problem(problem.code, problem.message, problem.origin or where)
    else:
        yield Problem(*_refused(script, error), where)


def _refused(script: Path, error: BaseException) -> tuple[str, str]:
    """Return the code and the words for an exception that ended a script before it began to train."""
    refuses = isinstance(error, ValueError | TypeError) and "tr_core" in Path(_file_of(error)).parts
    for code, fits in (
        ("T301", any(isinstance(cause, PluginError) for cause in chain(error))),
        ("T007", isinstance(error, Exception) and passed_through(error, "refuse_unsupported")),
        ("T302", isinstance(error, ImportError) and passed_through(error, "default_callbacks")),
        ("T303", passed_through(error, "choose_strategy")),
        ("T009", refuses),
    ):
        if fits:
            return code, str(error)
    ended = f"it ended itself with the exit code {error.code!r}" if isinstance(error, SystemExit) else last_line(error)
    return "T005", f"{script.name} failed before it began to train: {ended}"


def _file_of(error: BaseException) -> str:
    return frames_of(error)[-1].f_code.co_filename
