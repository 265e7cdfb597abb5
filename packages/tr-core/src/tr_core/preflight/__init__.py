"""Find out before a run what would stop or spoil it, without training a step.

`trainer check SCRIPT|CONFIG` does so from a command line; `check(trainer)` in a notebook.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tr_core.preflight.checks import check
    from tr_core.preflight.report import CODES, Problem, Report

__all__ = ["CODES", "Problem", "Report", "check"]

# Imported when they are used: a run asks only whether there is to be a preflight.
_ORIGINS = {"CODES": "report", "Problem": "report", "Report": "report", "check": "checks"}


def __getattr__(name: str) -> Any:
    if name not in _ORIGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_ORIGINS[name]}"), name)
