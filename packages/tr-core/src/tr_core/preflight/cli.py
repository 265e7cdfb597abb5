"""Check a script or a configuration before it trains (`trainer check`), or a step of a run (`trainer blame`)."""

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
from tr_core.preflight.requested import BLAME, VARIABLE, PreflightDone, is_first_process

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
_BLAMED = """\
Replay a step of a run, and name the samples whose loss or gradient is not finite, or whose loss is a spike.

The script of the run is started, with the arguments of the run. Where its Trainer would train, the step is replayed
from the nearest checkpoint before it in output_dir, or from the first step, and the script ends. Nothing is written
there: no checkpoint, log or push, and no tracker is called. Callbacks of your own are called, as they are of the run.
"""
_BLAME_EPILOG = """\
examples:
  trainer blame train.py --config run.yaml             says at which step the log first has NaN
  trainer blame --step 655 train.py --config run.yaml
  trainer blame --step 655 --leave-out guilty.json train.py     then: train.py --leave_out_samples guilty.json
  torchrun --nproc-per-node 2 --no-python trainer blame --step 655 train.py
  trainer launch --nproc 2 $(command -v trainer) blame --step 655 train.py

exit codes: 0 the step was replayed; 1 it cannot be, and the message says why; 2 this command line is wrong.
More: docs/blame.md of tr-core.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `trainer check`; end the program with code 2 if a word is unknown or missing.

    Returns:
        0; 1 if there is an error, or with --strict a warning.
    """
    parser = _parser("trainer check", _DESCRIPTION, _EPILOG)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--strict", action="store_true", help="let warnings count as problems in the exit code")
    arguments = _parsed(parser, argv, "SCRIPT|CONFIG", "a .py, .yaml, .yml, .toml or .json file")
    # The output of a script is not part of the report.
    with contextlib.redirect_stdout(sys.stderr):
        is_script = arguments.file.suffix.lower() == ".py"
        report = (check_script if is_script else check_config)(arguments.file, arguments.words)
    if is_first_process():
        print(report.to_json() if arguments.json else str(report), flush=True)
    return report.exit_code(strict=arguments.strict)


def blame(argv: Sequence[str] | None = None) -> int:
    """Run `trainer blame`; end the program with code 2 if a word is unknown or missing.

    Returns:
        0; 1 if the step cannot be replayed.
    """
    parser = _parser("trainer blame", _BLAMED, _BLAME_EPILOG)
    parser.add_argument("--step", type=int, metavar="S", help="the step, as in the log; without: the log is searched")
    text = "JSON file to which the guilty samples are added, for leave_out_samples"
    parser.add_argument("--leave-out", "--leave_out", type=Path, metavar="FILE", help=text)
    given = _parsed(parser, argv, "SCRIPT", "the script of the run")
    asked = {"step": given.step, "leave_out": given.leave_out and str(given.leave_out.absolute())}
    with contextlib.redirect_stdout(sys.stderr):
        answer, error = run_script(
            given.file, given.words, BLAME, lambda path: json.dumps({**asked, "answer": str(path)})
        )
    if answer is None and not isinstance(error, PreflightDone):
        why = "it ended, and no Trainer began to train" if error is None else last_line(error)
        print(f"trainer blame: {given.file.name}: {why}", file=sys.stderr)
        return 1
    if answer is not None:  # else another rank has it
        print(answer, flush=True)
    return 0


def _parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=name, description=description, epilog=epilog, formatter_class=kind, allow_abbrev=False
    )


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None, name: str, text: str) -> argparse.Namespace:
    """Return what is given, with the file and its arguments last."""
    parser.add_argument("file", metavar=name, type=Path, help=text)
    words = parser.add_argument("words", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of the script")
    words.required = False  # else the message about a missing file requires these too
    return parser.parse_args(argv)


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
