"""Turn what tr-args and the Trainer refuse into problems with codes."""

from __future__ import annotations

from collections.abc import Iterator

from tr_args import ArgumentsError
from tr_args import Problem as ArgumentProblem
from tr_args.errors import NOTHING
from tr_args.flags import FlagTable
from tr_core.preflight.origins import Origins
from tr_core.preflight.report import Problem


def of_arguments(error: ArgumentsError, origin: Origins, *classes: type) -> Iterator[Problem]:
    """Yield one problem for each that an `ArgumentsError` lists.

    Args:
        error: what was raised.
        origin: says where options were written.
        *classes: the dataclasses whose options are known.
    """
    table = FlagTable(classes)
    for problem in error.problems:
        yield Problem(_code(problem, table), str(problem), _origin(problem, origin))


def of_unsupported(error: Exception, origin: Origins) -> Iterator[Problem]:
    """Yield one problem for each option that `refuse_unsupported` lists in its message."""
    heading, *lines = str(error).splitlines()
    for line in lines or [heading]:
        text = line.strip()
        name = text.partition("=")[0]
        value, _, instead = text.partition(": ")
        what = f"{value} cannot be used with this version; {instead}"
        yield Problem("T007", what if lines else text, origin(name) if name.isidentifier() else "")


def _code(problem: ArgumentProblem, table: FlagTable) -> str:
    if not problem.field:
        return "T004" if problem.origin.startswith("file") else "T002"
    is_known = table.flag(problem.field) if problem.field.startswith("-") else table.named(problem.field)
    if not is_known:
        return "T001"
    is_pair = bool(problem.others) or (problem.value is NOTHING and not problem.field.startswith("-"))
    return "T003" if is_pair else "T002"


def _origin(problem: ArgumentProblem, origin: Origins) -> str:
    if not problem.field:
        return problem.origin.removeprefix("file ")
    named = [(problem.field, problem.origin), *((name, source) for name, _, source in problem.others)]
    places = [origin.locate(name, source) for name, source in named if source != "default"]
    return ", ".join(dict.fromkeys(places))
