"""Show the versions of the packages, of Python, and of related libraries."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version

# Shown if installed: most bug reports depend on the version of one of these.
_COMPANIONS = ("torch", "accelerate", "transformers", "datasets", "safetensors", "huggingface_hub", "deepspeed", "peft")


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line for each package; returns 0. Reads metadata only: nothing is imported."""
    parser = argparse.ArgumentParser(prog="trainer version", description=__doc__, allow_abbrev=False)
    parser.parse_args(argv)
    rows = [(name, version_of(name) or "not installed") for name in packages()]
    rows.append(("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"))
    rows += [(name, found) for name in _COMPANIONS if (found := version_of(name))]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {number}" for name, number in rows))
    return 0


def packages() -> list[str]:
    """Return the names of the packages that make up tr-all, itself last."""
    names = [
        re.split(r"[^\w-]", requirement, maxsplit=1)[0]
        for requirement in requires("tr-all") or ()
        if "extra ==" not in requirement
    ]
    return [*names, "tr-all"]


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
