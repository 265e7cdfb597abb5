"""Check a configuration file: its options first, then their values, without a model."""

from __future__ import annotations

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
