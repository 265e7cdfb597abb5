"""Check a script or a configuration from the command line, before it trains."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tr_args import ArgumentParser, ArgumentsError, Seq2SeqTrainingArguments
from tr_core.preflight.report import Problem, Report, argument_problems, last_line, raised_at
from tr_core.preflight.requested import VARIABLE, PreflightDone, is_first_process

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
    """Run the command; end the program with code 2 if a word is unknown or missing.

    Returns:
        0; 1 if there is an error, or with --strict a warning.
    """
    arguments = _parser().parse_args(argv)
    # The output of a script is not part of the report.
    with contextlib.redirect_stdout(sys.stderr):
        is_script = arguments.file.suffix.lower() == ".py"
        report = (check_script if is_script else check_config)(arguments.file, arguments.words)
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
    parser.add_argument("file", metavar="SCRIPT|CONFIG", type=Path, help="a .py, .yaml, .yml, .toml or .json file")
    words = parser.add_argument("words", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of the script")
    words.required = False  # else the message about a missing file requires these too
    return parser


def check_config(path: Path, words: Sequence[str]) -> Report:
    """Return the report on a YAML, TOML or JSON file of training arguments: wrong ones, or what they lead to."""
    from tr_core.preflight.checks import check_arguments  # late, so that help and a mistyped word come at once

    parser, given = ArgumentParser(Seq2SeqTrainingArguments), ["--config", str(path), *words]
    try:
        args = parser.parse_args_into_dataclasses(given, look_for_args_file=False)[0]
    except ArgumentsError as error:
        problems = list(argument_problems(error))
        if any(problem.code == "T001" for problem in problems):
            problems.append(Problem("T010", "options of a script's own are known to the script only: check that"))
        return Report(str(path), problems)
    return check_arguments(args, str(path))


class OwnLoopError(SystemExit):
    """Raised at an optimizer step outside of a Trainer."""


def check_script(script: Path, words: Sequence[str]) -> Report:
    """Run `script` as a program until it would train, evaluate or predict, and return the report of that point.

    The script ends there. It also ends at an optimizer step without a Trainer, as in its own loop.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook  # late: help and a mistyped word need no torch

    handle = register_optimizer_step_pre_hook(_refuse_step)
    try:
        answer, error = run_script(script, words, VARIABLE, str)
    finally:
        handle.remove()
    if answer is not None:
        report = Report.from_dict(json.loads(answer))
        report.target = str(script)
        return report
    if isinstance(error, PreflightDone):  # another rank has the report
        return Report(str(script))
    return Report(str(script), _instead(script, error))


def run_script(
    script: Path, words: Sequence[str], variable: str, request: Callable[[Path], str]
) -> tuple[str | None, BaseException | None]:
    """Run `script` as a program, and return what its Trainer answered, None without an answer, and what it raised.

    Args:
        script: a file.
        words: its arguments.
        variable: of the environment, by which the Trainer knows what it is asked for.
        request: returns the variable's value for the file of the answer.
    """
    from tr_core.changes import assigned

    error: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        answer = Path(folder) / "answer"
        os.environ[variable] = request(answer)
        try:
            with assigned(sys, argv=[str(script), *words], path=[str(script.absolute().parent), *sys.path]):
                runpy.run_path(str(script.absolute()), run_name="__main__")
        except KeyboardInterrupt:
            raise
        except BaseException as caught:  # whatever a script raises, SystemExit included
            error = caught
        finally:
            del os.environ[variable]
        return (answer.read_text(encoding="utf-8") if answer.exists() else None), error


def _refuse_step(optimizer: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    """End the script, unless this is the preflight's own step, which measures the size of an optimizer's state."""
    if any(parameter.device.type != "meta" for group in optimizer.param_groups for parameter in group["params"]):
        raise OwnLoopError(1)


def _instead(script: Path, error: BaseException | None) -> list[Problem]:
    """Return the reason for a missing report of a Trainer."""
    needed = "needed is a script that calls train, evaluate or predict of a tr_core Trainer"
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return [Problem("T006", f"{script.name} ended, and no Trainer began to train, evaluate or predict; {needed}")]
    where = raised_at(error)
    if isinstance(error, OwnLoopError):
        return [Problem("T011", f"an optimizer made a step without a Trainer; {needed}", where)]
    for each in (error, error.__context__):
        if isinstance(each, ArgumentsError):
            return list(argument_problems(each, where))
    is_exit = isinstance(error, SystemExit)
    ended = f"it ended itself with the exit code {error.code!r}" if is_exit else last_line(error)
    return [Problem("T005", f"{script.name} failed before it began to train: {ended}", where)]
