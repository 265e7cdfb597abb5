"""Find access tokens in files and on command lines, from where they get into repositories and process lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tr_args.schema import schema
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject

_BEGINNINGS = ("hf_", "sk-", "ghp_", "github_pat_", "glpat-", "xoxb-", "AKIA")
_LEAST_LENGTH = 20


def check_tokens(subject: Subject) -> Iterator[Problem]:
    """Find options that hold a token and were written in a file, a script or on a command line."""
    args = subject.args
    for name, spec in schema(type(args)).items():
        if (spec.secret and getattr(args, name)) or looks_secret(getattr(args, name)):
            origin = subject.origin(name)
            if not origin.startswith(("environment", "default", "call")):
                yield Problem(
                    "T008",
                    f"{name} holds an access token in plain text, which whoever reads the file or the list of "
                    f"processes can use; remove it there and revoke it, and log in once on this machine or set it in "
                    "the environment",
                    origin,
                )


def looks_secret(value: Any) -> bool:
    """Whether a text, or one inside lists and mappings, looks like an access token."""
    if isinstance(value, str):
        return value.startswith(_BEGINNINGS) and len(value) >= _LEAST_LENGTH and " " not in value
    if isinstance(value, dict):
        return any(map(looks_secret, value.values()))
    if isinstance(value, list | tuple):
        return any(map(looks_secret, value))
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and looks_secret(vars(value))
