"""Switches for the script around the Trainer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class ScriptFields:
    """Switches for the script around the Trainer."""

    _title = "What a script does"

    do_train: bool = False
    """Train. The Trainer does not read it; scripts do."""

    do_eval: bool = False
    """Evaluate. Always true when eval_strategy is not no."""

    do_predict: bool = False
    """Predict on the test data. The Trainer does not read it; scripts do."""
