"""Read a report that another process, or another part of this one, wrote."""

from __future__ import annotations

import json
from pathlib import Path

from tr_core.preflight.report import Report


def read_report(path: Path) -> Report | None:
    """Return the report in a file; None if there is none."""
    if not path.exists():
        return None
    return Report.from_dict(json.loads(path.read_text(encoding="utf-8")))
