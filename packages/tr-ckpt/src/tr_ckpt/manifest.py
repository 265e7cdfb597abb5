"""Describe a checkpoint: what its files must hold, and what it was made with."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from tr_ckpt import files, strict_json
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError
from tr_ckpt.files import FileRecord
from tr_ckpt.names import MANIFEST

FORMAT = 1

_BLANK = "0" * 64


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        step: completed optimizer steps.
        world_size: number of processes that saved.
        parts: file names of each part, by part; files that belong to none were added by the caller.
        files: what each file holds, by its path inside the folder, with forward slashes.
        versions: of Python and the packages that matter, as of the save.
        saved_at: when, in UTC, as ISO 8601; for people only, nothing is decided by it.
    """

    step: int
    world_size: int
    parts: dict[str, list[str]]
    files: dict[str, FileRecord]
    versions: dict[str, str] = field(default_factory=dict)
    saved_at: str = ""

    @property
    def total_bytes(self) -> int:
        """Size of all files together, this one not counted."""
        return sum(record.bytes for record in self.files.values())

    def extra_files(self) -> list[str]:
        """Return the files that belong to no part: a model's configuration, a tokenizer."""
        owned = {name for names in self.parts.values() for name in names}
        return sorted(set(self.files) - owned)


def describe(step: int, world_size: int, records: Iterable[Mapping[str, Mapping[str, FileRecord]]]) -> Manifest:
    """Put together what all ranks wrote: for each rank its files by part; the part `""` holds added files."""
    parts: dict[str, list[str]] = {}
    held: dict[str, FileRecord] = {}
    for written in records:
        for part, of_part in written.items():
            held.update(of_part)
            if part:
                parts[part] = sorted({*parts.get(part, ()), *of_part})
    return Manifest(step, world_size, parts, held, versions(), datetime.now(UTC).isoformat(timespec="seconds"))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a state depends on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "safetensors", "tr-ckpt"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # numpy is optional; tr-ckpt may be run from a source tree
    return found


def write(folder: Path, manifest: Manifest) -> FileRecord:
    """Write `manifest.json` into `folder`, with its own digest in it, so that no byte changes unnoticed."""
    content = {
        "files": {name: {"bytes": record.bytes, "sha256": record.sha256} for name, record in manifest.files.items()},
        "format": FORMAT,
        "manifest_sha256": _BLANK,
        "parts": manifest.parts,
        "saved_at": manifest.saved_at,
        "step": manifest.step,
        "versions": manifest.versions,
        "world_size": manifest.world_size,
    }
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    own = hashlib.sha256(text.encode()).hexdigest()
    return files.write_file(folder / MANIFEST, [text.replace(_own_entry(_BLANK), _own_entry(own), 1).encode()])


def read(folder: Path) -> Manifest:
    """Read `manifest.json` of `folder` and check it against its own digest.

    Raises:
        DamagedCheckpointError: it is absent or was changed.
        CheckpointError: it is of a format that this version does not know.
    """
    try:
        raw = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{MANIFEST} is missing, so it is incomplete or was written by another program"
        ) from None
    except OSError as error:
        raise DamagedCheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    content = _parse(raw)
    if content.get("format") != FORMAT:
        raise CheckpointError(  # not damage: falling back to an older one would hide that progress is lost
            f"its format is {content.get('format')!r}; this version reads {FORMAT} — install a newer tr-ckpt"
        )
    try:
        manifest = Manifest(
            int(content["step"]),
            int(content["world_size"]),
            {str(part): [str(name) for name in names] for part, names in content["parts"].items()},
            {name: FileRecord(int(held["bytes"]), str(held["sha256"])) for name, held in content["files"].items()},
            dict(content["versions"]),
            str(content["saved_at"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(f"{MANIFEST} lacks what it must hold: {error!r}") from error
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DamagedCheckpointError(f"{MANIFEST} names the file {name!r}, which lies outside the checkpoint")
    return manifest


def _own_entry(digest: str) -> str:
    return f'"manifest_sha256": "{digest}"'


def _parse(raw: bytes) -> dict[str, Any]:
    changed = f"{MANIFEST} was changed after it was written: its content does not match its digest"
    try:
        content = strict_json.loads(raw.decode())
    except (CheckpointError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{MANIFEST} is no valid JSON: {error}") from error
    own = content.get("manifest_sha256") if isinstance(content, dict) else None
    if not isinstance(own, str):
        raise DamagedCheckpointError(changed)
    blank = raw.replace(_own_entry(own).encode(), _own_entry(_BLANK).encode(), 1)
    if hashlib.sha256(blank).hexdigest() != own:
        raise DamagedCheckpointError(changed)
    return content
