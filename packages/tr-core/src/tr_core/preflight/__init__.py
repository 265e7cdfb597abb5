"""Check before a run what would stop or spoil it, without training a step.

Use `trainer check SCRIPT|CONFIG` on a command line, and `check(trainer)` in a notebook.
"""

from typing import TYPE_CHECKING

from tr_core.start import on_first_use

if TYPE_CHECKING:
    from tr_core.preflight.checks import check
    from tr_core.preflight.report import CODES, Problem, Report

__all__ = ["CODES", "Problem", "Report", "check"]

# A run only checks whether a preflight is requested.
_ORIGINS: dict[str, str] = dict.fromkeys(("CODES", "Problem", "Report"), "tr_core.preflight.report")
_ORIGINS["check"] = "tr_core.preflight.checks"

__getattr__, __dir__ = on_first_use(__name__, _ORIGINS)
