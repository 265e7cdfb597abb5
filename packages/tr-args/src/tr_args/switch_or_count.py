"""Take a switch that may also say how much: off, on, or a number."""

from __future__ import annotations

from typing import Any

from tr_args.constraints import Constraint
from tr_args.errors import RefusedError


class SwitchOrCount(Constraint):
    """True, false, or a whole number from 1; 0 is false."""

    def after(self, value: Any) -> Any:
        """Return `value` if it is one of these."""
        if value < 0:
            raise RefusedError("needs true, false or a number from 1")
        return value if value else False
