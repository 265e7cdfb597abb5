"""Check names that come from outside before a file is looked for, or made, under them.

Every such name passes `wrong` or `wrong_among`: those of a manifest, of an index, in an archive, in a listing of the
Hub. What is written here passes them too, so that nothing is saved that would be refused. A name that one system takes
for a path elsewhere, or for a device, or for that of another file, is refused on all of them: a checkpoint is copied.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

# What file systems allow of one name between two slashes, and of a path below a folder that has a path of its own.
MOST_BYTES_OF_STEP = 255
MOST_BYTES = 1024

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?", re.IGNORECASE | re.DOTALL)
_DRIVE = re.compile(r"[A-Za-z]:")


def wrong(name: Any) -> str:
    """Return why a name cannot be the path of a file below a folder, on any system; empty if it can."""
    if not isinstance(name, str) or not name:
        return "is no name of a file"
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return "holds half a character, which no file's name can"
    if length > MOST_BYTES:
        return f"has {length:,} bytes, and a path may have {MOST_BYTES:,}"
    if _UNPRINTABLE.search(name):
        return "holds a control character"
    if "\\" in name or name.startswith("/"):
        return "leads elsewhere on some systems: it holds a backslash or begins with a slash"
    return next((problem for step in name.split("/") if (problem := _wrong_step(step))), "")


def _wrong_step(step: str) -> str:
    if step in ("", ".", ".."):
        return f"leads elsewhere: a step of it is {step!r}"
    if _DRIVE.match(step):
        return f"leads elsewhere on some systems: {step[:2]} is a drive there"
    if _DEVICE.fullmatch(step):
        return f"is that of a device on some systems: {step.split('.')[0].strip()}"
    if step[-1] in ". ":
        return "is that of another file on some systems: a step of it ends with a dot or a space"
    if len(step.encode()) > MOST_BYTES_OF_STEP:
        return f"has a step of {len(step.encode())} bytes, and the name of a file may have {MOST_BYTES_OF_STEP}"
    return ""


def wrong_among(names: Iterable[Any]) -> str:
    """Return what is wrong with names of files that lie in one folder, the name included; empty if nothing is.

    Two of which some file systems make one are refused too: they differ in case or in how a letter is composed, or one
    is a file where the other needs a folder.
    """
    seen: dict[str, str] = {}
    for name in names:
        if problem := wrong(name):
            return f"{name!r:.200}, which {problem}"
        if (other := seen.setdefault(_alike(name), name)) != name:
            return f"{name!r:.200} and {other!r:.200}, which are one file on some systems"
    for key, name in seen.items():
        steps = key.split("/")
        for depth in range(1, len(steps)):
            if (file := seen.get("/".join(steps[:depth]))) is not None:
                return f"{file!r:.200} both as a file and as the folder of {name!r:.200}"
    return ""


def _alike(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())
