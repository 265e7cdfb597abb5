"""What a page of results says of where they come from: the day, the machine, the versions."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from typing import Any


def about(libraries: Iterable[str]) -> dict[str, Any]:
    """Return date, machine, version of Python, and the versions of those libraries that are installed."""
    return {
        "date": today(),
        "machine": hardware(),
        "python": platform.python_version(),
        "versions": {name: version for name in libraries if (version := _version(name))},
    }


def today() -> str:
    """Return the day in UTC, as YYYY-MM-DD."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def hardware() -> str:
    """Return system, architecture, cores, memory and accelerators in words."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {_accelerators()}"


def _accelerators() -> str:
    """Return the GPUs, as the driver's own program names them: this must work where torch is not installed."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return "a Mac's GPU"
    try:
        asked = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
        found = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        found = ""
    return ", ".join(found.splitlines()) or "no GPU"


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
