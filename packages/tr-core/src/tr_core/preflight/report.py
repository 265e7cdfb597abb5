"""Hold what a preflight found: problems and figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tr_args.masking import mask_secrets
from tr_core.preflight.codes import CODES, Severity

_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or to be known.

    Attributes:
        code: its kind, one of `tr_core.preflight.codes.CODES`.
        message: what is wrong, with the values; what is needed; what to change.
        origin: where the cause was written: `run.yaml:12`, `command line --bf16`, `train.py:40`; empty if unknown.
    """

    code: str
    message: str
    origin: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", mask_secrets(self.message))

    @property
    def severity(self) -> Severity:
        """`error`, `warning` or `info`."""
        return CODES[self.code].severity


@dataclass
class Report:
    """What a preflight found.

    Attributes:
        target: what was checked: a file, or the Trainer's class.
        problems: the gravest first.
        figures: what was measured and reckoned, by name; sizes in bytes, times in seconds.
    """

    target: str
    problems: list[Problem] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.problems = sorted(self.problems, key=lambda problem: _ORDER[problem.severity])

    def count(self, severity: Severity) -> int:
        """Count the problems of a severity."""
        return sum(problem.severity == severity for problem in self.problems)

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 1 if there is an error, or with `strict` a warning; else 0."""
        return int(bool(self.count("error") or (strict and self.count("warning"))))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values of JSON."""
        problems = [
            {"code": p.code, "severity": p.severity, "message": p.message, "origin": p.origin} for p in self.problems
        ]
        return {"target": self.target, "problems": problems, "figures": self.figures}

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Report:
        """Return the report that `to_dict` gave."""
        problems = [Problem(p["code"], p["message"], p["origin"]) for p in content["problems"]]
        return cls(content["target"], problems, dict(content["figures"]))

    def __str__(self) -> str:
        from tr_core.preflight.table import table  # imported here: reports travel without being shown

        return table(self)
