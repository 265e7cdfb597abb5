"""Read the argument that says which input tokens are counted."""

from __future__ import annotations

from typing import Any

from tr_args.constraints import Constraint
from tr_args.conversion import FALSE_WORDS, TRUE_WORDS


class TokenCounting(Constraint):
    """A choice that may also be given as a truth value: true counts all tokens, false none."""

    bare = "all"

    def before(self, value: Any) -> Any:
        """Return the choice that a truth value stands for."""
        word = str(value).lower()
        if word in TRUE_WORDS:
            return "all"
        return "no" if word in FALSE_WORDS else value
