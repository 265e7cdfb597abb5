"""Check a script or a configuration from the command line, before it trains."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tr_args import ArgumentParser, ArgumentsError, Seq2SeqTrainingArguments, TrainingArguments
from tr_args.files import read_mapping
from tr_args.flags import FlagTable
from tr_args.schema import schema
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
from tr_core.preflight.requested import VARIABLE, PreflightDone, is_first_process

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
    """Return the report on a YAML, TOML or JSON file of training arguments."""
    from tr_core.preflight.checks import check_arguments  # late, so that help and a mistyped word come at once

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


class OwnLoopError(SystemExit):
    """Raised at an optimizer step outside of a Trainer."""


def check_script(script: Path, words: Sequence[str]) -> Report:
    """Run `script` as a program until it would train, evaluate or predict, and return the report of that point.

    The script ends there. It also ends at an optimizer step without a Trainer, as in its own loop.
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

    from torch.optim.optimizer import register_optimizer_step_pre_hook

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
