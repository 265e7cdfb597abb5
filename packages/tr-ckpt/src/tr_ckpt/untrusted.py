"""Check what comes from outside before it is used: file names, kinds of files, JSON and keys of dicts.

A checkpoint may be anybody's: downloaded, unpacked, taken from a shared disk.

- Names. Every name passes `path_problem` or `paths_problem`: those in a manifest, an index, an archive or a listing of
  the Hub. Names that are written here pass them too, so that nothing is saved that would be refused. One system may
  take a name for a path elsewhere, for a device or for another file. Such a name is refused on all systems, because
  checkpoints are copied.
- Kinds of files. Only regular files are read. A link, which an archive can hold too, is not followed.
- JSON. It is read as the standard defines it: no NaN, no Infinity, no name twice in an object.
- Keys. Many keys with one hash make a dict slow. Python gives strings and bytes other hashes in each process; the
  hashes of numbers and tuples are known, so keys can be made to collide.
"""

from __future__ import annotations

import json
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from tr_ckpt import reads
from tr_ckpt.errors import CheckpointError

# What file systems allow of one name between two slashes, and of a path below a folder that has a path of its own.
MOST_BYTES_OF_STEP = 255
MOST_PATH_BYTES = 1024

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?", re.IGNORECASE | re.DOTALL)
_DRIVE = re.compile(r"[A-Za-z]:")


def path_problem(name: Any) -> str:
    """Return why a name cannot be the path of a file below a folder, on any system; empty if it can."""
    if not isinstance(name, str) or not name:
        return "is no name of a file"
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return "holds half a character, which no file's name can"
    if length > MOST_PATH_BYTES:
        return f"has {length:,} bytes, and a path may have {MOST_PATH_BYTES:,}"
    if _UNPRINTABLE.search(name):
        return "holds a control character"
    if "\\" in name or name.startswith("/"):
        return "leads elsewhere on some systems: it holds a backslash or begins with a slash"
    return next((problem for step in name.split("/") if (problem := _step_problem(step))), "")


def _step_problem(step: str) -> str:
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


def paths_problem(names: Iterable[Any]) -> str:
    """Return what is wrong with names of files that lie in one folder, the name included; empty if nothing is.

    Two of which some file systems make one are refused too: they differ in case or in how a letter is composed, or one
    is a file where the other needs a folder.
    """
    seen: dict[str, str] = {}
    for name in names:
        if problem := path_problem(name):
            return f"{name!r:.200}, which {problem}"
        if (other := seen.setdefault(_normalized(name), name)) != name:
            return f"{name!r:.200} and {other!r:.200}, which are one file on some systems"
    for key, name in seen.items():
        steps = key.split("/")
        for depth in range(1, len(steps)):
            if (file := seen.get("/".join(steps[:depth]))) is not None:
                return f"{file!r:.200} both as a file and as the folder of {name!r:.200}"
    return ""


def _normalized(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def file_kind_problem(folder: Path, name: str) -> str:
    """Return what is wrong with a file's kind in words; empty if it is a plain file in plain folders.

    Raises:
        OSError: there is none.
        UnreadableError: it cannot be looked at.
    """
    path, mode = folder, 0
    for step in PurePosixPath(name).parts:
        path = path / step
        mode = reads.status(path, follow=False).st_mode
        if stat.S_ISLNK(mode) and _is_in_hub_cache(path):
            mode = reads.status(path).st_mode
        if stat.S_ISLNK(mode):
            return "is a link, which may lead anywhere; copy the checkpoint with its links followed"
    return "" if stat.S_ISREG(mode) else "is no plain file"


def require_regular_file(path: Path) -> None:
    """Refuse to read what is there but is no plain file.

    Raises:
        CheckpointError: the message names it.
        UnreadableError: it cannot be looked at.
    """
    try:
        problem = file_kind_problem(path.parent, path.name)
    except OSError:
        return  # whoever reads it says why it cannot
    if problem:
        raise CheckpointError(f"{path.name} {problem}")


def _is_in_hub_cache(link: Path) -> bool:
    """Whether a link leads from a snapshot that huggingface_hub downloaded to a file of the same repository's."""
    try:
        blobs = reads.resolved(link).parent
        return blobs.name == "blobs" and reads.resolved(link.parent).is_relative_to(blobs.parent / "snapshots")
    except OSError:  # it leads nowhere, or to itself
        return False


# Of a file. What it becomes in memory is up to 30 times as large.
MOST_JSON_BYTES = 2**30


def read_json(path: Path, *, is_lax: bool = False) -> Any:
    """Return the value that a file holds.

    Args:
        path: of the file.
        is_lax: whether it may hold what JSON does not have and Python writes: NaN, infinities, a name twice.

    Raises:
        OSError: there is no such file.
        UnreadableError: it cannot be read.
        CheckpointError: it is no JSON, or larger than anything that is read.
    """
    raw = reads.content(path, MOST_JSON_BYTES + 1)
    if len(raw) > MOST_JSON_BYTES:
        raise CheckpointError(f"it has more than {MOST_JSON_BYTES:,} bytes, and that much JSON is not read")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(str(error)) from error
    return parse_json(text, is_lax=is_lax)


def parse_json(text: str, *, is_lax: bool = False) -> Any:
    """Return the value that `text` holds.

    Raises:
        CheckpointError: it is not strict JSON; with `is_lax`, nor such as Python writes.
    """
    try:
        if is_lax:
            return json.loads(text)
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object_without_duplicates)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # a number of more than 4300 digits is a plain ValueError
        raise CheckpointError(str(error)) from error


def _refuse_constant(constant: str) -> None:
    raise CheckpointError(f"{constant} is no JSON value")


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # add returns None
        raise CheckpointError(f"the name {twice!r:.80} occurs twice in one object")
    return found


# Keys of one dict that have one hash: each is compared with all others.
MOST_COLLISIONS = 64

# An integer of less is its own hash.
_OWN_HASH_BELOW = 2**61 - 1


def may_collide(key: Any) -> bool:
    """Whether others with its hash can be made of it at will."""
    if type(key) is int:
        return abs(key) >= _OWN_HASH_BELOW
    return type(key) in (float, tuple)


def check_keys(keys: Iterable[Any]) -> None:
    """Refuse the keys of one dict if many have one hash.

    Raises:
        CheckpointError: they do.
        TypeError: one cannot be a key.
    """
    counted = Counter(hash(key) for key in keys if may_collide(key))
    if counted and max(counted.values()) > MOST_COLLISIONS:
        raise CheckpointError(f"{max(counted.values()):,} of its keys have one hash: they are made to be slow")
