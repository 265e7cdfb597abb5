"""Run a script up to the start of its training.

If it never trains, report the reason.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from tr_args import ArgumentsError, Seq2SeqTrainingArguments
from tr_core.plugins import PluginError
from tr_core.preflight.origins import (
    Origins,
    argument_problems,
    chain,
    comes_from,
    last_line,
    passed_through,
    raised_at,
    shown,
    unsupported_problems,
)
from tr_core.preflight.report import Problem, Report, read_report
from tr_core.preflight.requested import VARIABLE, PreflightDone


class OwnLoopError(SystemExit):
    """Raised at an optimizer step outside of a Trainer."""


def check_script(script: Path, words: Sequence[str]) -> Report:
    """Run `script` as a program until it would train, evaluate or predict, and return the report of that point.

    The script ends there. It also ends at an optimizer step without a Trainer, as in its own loop.

    Args:
        script: a Python file.
        words: its arguments.
    """
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        answer = Path(folder) / "report.json"
        error = _run(script, words, answer)
        report = read_report(answer)
    if report is not None:
        report.target = str(script)
        return report
    if isinstance(error, PreflightDone):  # another rank has the report
        return Report(str(script))
    origin = Origins(None, script, words)
    return Report(str(script), list(_instead(script, origin, error)))


def _run(script: Path, words: Sequence[str], answer: Path) -> BaseException | None:
    """Run the script; return the exception that ended it, None without one."""
    with _as_program(script, words), _environment(answer), _no_step():
        try:
            runpy.run_path(str(script.absolute()), run_name="__main__")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # report whatever a script raises, SystemExit included
            return error
    return None


@contextlib.contextmanager
def _as_program(script: Path, words: Sequence[str]) -> Iterator[None]:
    arguments, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.absolute().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, path


@contextlib.contextmanager
def _environment(answer: Path) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(answer)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@contextlib.contextmanager
def _no_step() -> Iterator[None]:
    def refuse(optimizer: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if all(parameter.device.type == "meta" for group in optimizer.param_groups for parameter in group["params"]):
            return  # the preflight's own step, which measures the size of an optimizer's state
        raise OwnLoopError(1)

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _instead(script: Path, origin: Origins, error: BaseException | None) -> Iterator[Problem]:
    """Yield the reason for a missing report of a Trainer."""
    needed = "needed is a script that calls train, evaluate or predict of a tr_core Trainer"
    if isinstance(error, OwnLoopError):
        yield Problem("T011", f"an optimizer made a step without a Trainer; {needed}", _place_in(script, error))
        return
    if error is None or (isinstance(error, SystemExit) and not error.code):
        yield Problem("T006", f"{script.name} ended, and no Trainer began to train, evaluate or predict; {needed}")
        return
    for cause in chain(error):
        if isinstance(cause, ArgumentsError):
            yield from _of_arguments(cause, origin, error, script)
            return
    yield _of_error(error, origin, script)


def _of_arguments(cause: ArgumentsError, origin: Origins, error: BaseException, script: Path) -> Iterator[Problem]:
    classes = _dataclasses_of(error) or (Seq2SeqTrainingArguments,)
    for problem in argument_problems(cause, origin, *classes):
        yield problem if problem.origin else Problem(problem.code, problem.message, _place_in(script, cause))


def _dataclasses_of(error: BaseException) -> tuple[type, ...]:
    """Return the dataclasses of the parser that the exception went through."""
    for cause in chain(error):
        traceback = cause.__traceback__
        while traceback is not None:
            table = getattr(traceback.tb_frame.f_locals.get("self"), "_table", None)
            if table is not None and hasattr(table, "classes"):
                return table.classes
            traceback = traceback.tb_next
    return ()


def _of_error(error: BaseException, origin: Origins, script: Path) -> Problem:
    text, where = last_line(error), _place_in(script, error)
    plugin = next((cause for cause in chain(error) if isinstance(cause, PluginError)), None)
    if plugin is not None:
        return Problem("T301", str(error), where)
    if isinstance(error, Exception) and passed_through(error, "refuse_unsupported"):
        return next(unsupported_problems(error, origin))
    if isinstance(error, ImportError) and passed_through(error, "default_callbacks"):
        return Problem("T302", str(error), where)
    if passed_through(error, "choose_strategy"):
        return Problem("T303", str(error), where)
    if isinstance(error, ValueError | TypeError) and comes_from(error, "tr_core"):
        return Problem("T009", str(error), where)
    if isinstance(error, SystemExit):
        text = f"it ended itself with the exit code {error.code!r}"
    return Problem("T005", f"{script.name} failed before it began to train: {text}", where)


def _place_in(script: Path, error: BaseException) -> str:
    return raised_at(error) or shown(script)
