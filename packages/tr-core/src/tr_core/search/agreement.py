"""Have one rank decide, and all follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tr_core.protocols import Collectives

Outcome = TypeVar("Outcome")


def agree(collectives: Collectives, decide: Callable[[], Outcome]) -> Outcome:
    """Return on every rank what `decide` returns on rank 0, where alone it is called; every rank calls this.

    Raises:
        Exception: what `decide` raised; on the other ranks a RuntimeError that quotes it.
    """
    error: Exception | None = None
    outcome, text = None, None
    if collectives.rank == 0:
        try:
            outcome = decide()
        except Exception as caught:  # whatever it is, the other ranks must hear of it or wait for ever
            error, text = caught, f"{type(caught).__name__}: {caught}"
    outcome, text = collectives.gather_objects((outcome, text))[0]
    if error is not None:
        raise error
    if text is not None:
        raise RuntimeError(f"rank 0 could not go on: {text}")
    return outcome  # type: ignore[return-value]
