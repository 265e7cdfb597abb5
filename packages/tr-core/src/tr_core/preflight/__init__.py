"""Check before a run what would stop or spoil it, without training a step.

Use `trainer check SCRIPT|CONFIG` on a command line, and `check(trainer)` in a notebook.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tr_core.preflight.checks import check
    from tr_core.preflight.report import CODES, Problem, Report

__all__ = ["CODES", "Problem", "Report", "check"]

# Imported on first use: a run only checks whether a preflight is requested.
_ORIGINS = {"CODES": "report", "Problem": "report", "Report": "report", "check": "checks"}


def __getattr__(name: str) -> Any:
    if name not in _ORIGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_ORIGINS[name]}"), name)
