"""Validate outside input before it is used: file names, kinds of files, JSON and keys of dicts.

A checkpoint may come from anybody: downloaded, unpacked, taken from a shared disk.

- Names. Every name passes `path_problem` or `paths_problem`: those in a manifest, an index, an archive or a listing of
  the Hub. Names that a save writes pass them too, so that every save can be restored. Some systems read a
  name as a path to another folder, as a device or as another file. Such a name is refused on all systems, because
  checkpoints are copied.
- Kinds of files. Only regular files are read. Links, which archives can hold too, are not followed.
- JSON. It is read as the standard defines it: no NaN, no Infinity, no duplicate name in an object.
- Keys. Many keys with one hash make a dict slow. Python randomises the hashes of strings and bytes in each process.
  The hashes of numbers and tuples are predictable, so keys can be made to collide.
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

# The limits of file systems for one name between two slashes, and for a path below a folder with a path of its own.
MOST_BYTES_OF_STEP = 255
MOST_PATH_BYTES = 1024

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?", re.IGNORECASE | re.DOTALL)
_DRIVE = re.compile(r"[A-Za-z]:")


def path_problem(name: Any) -> str:
    """Return why a name is not a valid path of a file below a folder on every system; empty if it is."""
    if not isinstance(name, str) or not name:
        return "is not a name of a file"
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
    """Return what is wrong with names of files in one folder, including the name; empty if nothing is.

    Two names that some file systems treat as one are refused too: they differ in case or in how a letter is composed,
    or one is a file where the other needs a folder.
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
    """Return what is wrong with a file's kind; empty if it is a regular file in regular folders.

    Raises:
        OSError: the file does not exist.
        UnreadableError: it cannot be read.
    """
    path, mode = folder, 0
    for step in PurePosixPath(name).parts:
        path = path / step
        mode = reads.status(path, follow=False).st_mode
        if stat.S_ISLNK(mode) and _is_in_hub_cache(path):
            mode = reads.status(path).st_mode
        if stat.S_ISLNK(mode):
            return "is a link, which may lead anywhere; copy the checkpoint with its links followed"
    return "" if stat.S_ISREG(mode) else "is not a plain file"


def require_regular_file(path: Path) -> None:
    """Refuse to read an existing path that is not a regular file.

    Raises:
        CheckpointError: the message names it.
        UnreadableError: it cannot be read.
    """
    try:
        problem = file_kind_problem(path.parent, path.name)
    except OSError:
        return  # the read that follows reports it
    if problem:
        raise CheckpointError(f"{path.name} {problem}")


def _is_in_hub_cache(link: Path) -> bool:
    """Whether a link leads from a snapshot that huggingface_hub downloaded to a file of the same repository."""
    try:
        blobs = reads.resolved(link).parent
        return blobs.name == "blobs" and reads.resolved(link.parent).is_relative_to(blobs.parent / "snapshots")
    except OSError:  # it leads nowhere, or to itself
        return False


# The limit for a file. Its value in memory is up to 30 times as large.
MOST_JSON_BYTES = 2**30


def read_json(path: Path, *, is_lax: bool = False) -> Any:
    """Return the value of a JSON file.

    Args:
        path: the file.
        is_lax: whether to accept what Python writes beyond the standard: NaN, infinities, duplicate names.

    Raises:
        OSError: the file does not exist.
        UnreadableError: it cannot be read.
        CheckpointError: it is not JSON, or larger than the limit.
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
    """Return the value of a JSON text.

    Raises:
        CheckpointError: it is not strict JSON; with `is_lax`, not even the JSON that Python writes.
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
    raise CheckpointError(f"{constant} is not a JSON value")


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # add returns None
        raise CheckpointError(f"the name {twice!r:.80} occurs twice in one object")
    return found


# The limit for keys of one dict that have the same hash: each is compared with all others.
MOST_COLLISIONS = 64

# The hash of a smaller integer is the integer itself.
_OWN_HASH_BELOW = 2**61 - 1


def may_collide(key: Any) -> bool:
    """Whether keys with the same hash as this one can be constructed at will."""
    if type(key) is int:
        return abs(key) >= _OWN_HASH_BELOW
    return type(key) in (float, tuple)


def check_keys(keys: Iterable[Any]) -> None:
    """Refuse the keys of one dict if many have the same hash.

    Raises:
        CheckpointError: too many have the same hash.
        TypeError: a value cannot be a key.
    """
    counted = Counter(hash(key) for key in keys if may_collide(key))
    if counted and max(counted.values()) > MOST_COLLISIONS:
        raise CheckpointError(f"{max(counted.values()):,} of its keys have one hash: they are made to be slow")
