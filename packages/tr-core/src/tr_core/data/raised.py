"""Say at which samples a data set or a collator raised, in the error itself."""

from __future__ import annotations

from typing import Any

RAISED = (Exception, GeneratorExit)
"""What a data set or a collator may raise that is to be explained."""


def explain(error: BaseException, what: str, owner: Any, where: str) -> None:
    """Note in an error where it was raised; to be called where it is handled, and followed by `raise`.

    Type and traceback stay. Notes are part of a formatted traceback, so they come back from a worker process too.

    Args:
        error: what was raised.
        what: `the data set` or `the data collator`.
        owner: which one.
        where: the samples.

    Raises:
        RuntimeError: it was StopIteration or GeneratorExit, which would end the data in silence.
    """
    name = getattr(owner, "__qualname__", None) or type(owner).__name__
    if isinstance(error, StopIteration | GeneratorExit):
        raise RuntimeError(
            f"{what} {name} raised {type(error).__name__} for {where}, which ends a loop over the data and would leave "
            "samples out; raise another error, such as IndexError, or return the sample"
        ) from error
    error.add_note(f"raised by {what} {name} for {where}")
