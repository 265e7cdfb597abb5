"""Check the arguments once more: they may have been changed since they were built."""

from __future__ import annotations

from collections.abc import Iterator

from tr_args import ArgumentsError
from tr_core.checks import refuse_unsupported
from tr_core.preflight.argument_problems import of_arguments, of_unsupported
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject


def check_options(subject: Subject) -> Iterator[Problem]:
    """Find options that contradict each other, and those that this version does not act on."""
    try:
        subject.args.check()
    except ArgumentsError as error:
        yield from of_arguments(error, subject.origin, type(subject.args))
    try:
        refuse_unsupported(subject.args)
    except ValueError as error:
        yield from of_unsupported(error, subject.origin)
