"""Describe a checkpoint: its files with size and digest, and the versions that wrote it."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tr_ckpt import codec, files, reads, untrusted
from tr_ckpt.errors import CheckpointError, Damage, DamagedCheckpointError
from tr_ckpt.files import FileRecord, Section, Unsynced
from tr_ckpt.names import MANIFEST, index_name, is_shard, stem

FORMAT = 1

_BLANK = "0" * 64


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        step: completed optimizer steps.
        world_size: number of processes that saved.
        parts: file names of each part, by part; files of no part were added by the caller.
        files: size and digest of each file, by its path inside the folder, with forward slashes.
        versions: of Python and the relevant packages at the time of the save.
        saved_at: when, in UTC, as ISO 8601; only for people, no decision uses it.
        sequence: one higher than that of any checkpoint in the folder at the time of the save. Of two checkpoints the
            one with the higher sequence is the newer, whatever their steps: a run that resumes from step 10 and saves
            step 12 leaves an older step 30 in the folder.
    """

    step: int
    world_size: int
    parts: dict[str, list[str]]
    files: dict[str, FileRecord]
    versions: dict[str, str] = field(default_factory=dict)
    saved_at: str = ""
    sequence: int = 0

    @property
    def total_bytes(self) -> int:
        """Size of all files together, without this one."""
        return sum(record.bytes for record in self.files.values())

    @property
    def age(self) -> tuple[int, int]:
        """Sequence and step: of two checkpoints the one with the higher age is the newer."""
        return self.sequence, self.step

    def extra_files(self) -> list[str]:
        """Return the files that belong to no part: a model's configuration, a tokenizer."""
        owned = {name for names in self.parts.values() for name in names}
        return sorted(set(self.files) - owned)

    def in_shards(self) -> set[str]:
        """Return the parts that were saved in shards."""
        return {part for part, owned in self.parts.items() if index_name(part) in owned}

    def files_to_verify(self, targets: Iterable[str], rank: int, world_size: int) -> list[str]:
        """Return the files that a rank verifies before the parts `targets` are loaded.

        One rank verifies each file of shards, because reading all of them takes long. Rank 0 verifies all other files,
        and each rank those of them that it will load.
        """
        shards = [name for part in sorted(self.parts) for name in self.parts[part] if is_shard(name)]
        mine = set(shards[rank::world_size])
        stems = tuple(f"{stem(part, rank)}." for part in targets)
        return [
            name
            for name in self.files
            if name in mine or (name not in shards and (rank == 0 or name.startswith(stems)))
        ]


def describe(
    step: int, world_size: int, records: Iterable[Mapping[str, Mapping[str, FileRecord]]], *, sequence: int = 0
) -> Manifest:
    """Combine what all ranks wrote: for each rank its files by part; the part `""` holds added files."""
    parts: dict[str, list[str]] = {}
    held: dict[str, FileRecord] = {}
    for written in records:
        for part, of_part in written.items():
            held.update(of_part)
            if part:
                parts[part] = sorted({*parts.get(part, ()), *of_part})
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Manifest(step, world_size, parts, held, dict(versions()), now, sequence)


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that a state depends on. Cached, as it takes milliseconds."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "safetensors", "tr-ckpt"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # numpy is optional; tr-ckpt may be run from a source tree
    return MappingProxyType(found)


def write(folder: Path, manifest: Manifest, unsynced: Unsynced | None = None) -> FileRecord:
    """Write `manifest.json` into `folder` with its own digest, so that every change of a byte is noticed.

    It is on the disk on return, unless `unsynced` syncs it.
    """
    content = {
        "files": {name: {"bytes": record.bytes, "sha256": record.sha256} for name, record in manifest.files.items()},
        "format": FORMAT,
        "manifest_sha256": _BLANK,
        "parts": manifest.parts,
        "saved_at": manifest.saved_at,
        "sections": {
            name: describe_sections(record.sections) for name, record in manifest.files.items() if record.sections
        },
        "sequence": manifest.sequence,
        "step": manifest.step,
        "versions": manifest.versions,
        "world_size": manifest.world_size,
    }
    is_long = sum(len(record.sections) for record in manifest.files.values()) > codec.LONG
    text = codec.to_text(content, sort_keys=True, is_long=is_long) + "\n"
    own = hashlib.sha256(text.encode()).hexdigest()
    whole = text.replace(_own_entry(_BLANK), _own_entry(own), 1).encode()
    return files.write_file(folder / MANIFEST, [whole], unsynced=unsynced)


def read(folder: Path, *, with_sections: bool = True) -> Manifest:
    """Read `manifest.json` of `folder` and check it against its own digest.

    The sections of files, which say where damage is, can be left out: a model of many tensors has many.

    Raises:
        DamagedCheckpointError: it does not exist or was changed.
        UnreadableError: it cannot be read.
        CheckpointError: this version does not know its format.
    """
    content = _content(folder)
    if content.get("format") != FORMAT:
        raise CheckpointError(  # not damage: falling back to an older one would hide the loss of progress
            f"its format is {content.get('format')!r}; this version reads {FORMAT} — install a newer tr-ckpt"
        )
    try:
        manifest = Manifest(
            int(content["step"]),
            int(content["world_size"]),
            {str(part): [str(name) for name in names] for part, names in content["parts"].items()},
            _records(content, with_sections=with_sections),
            dict(content["versions"]),
            str(content["saved_at"]),
            int(content["sequence"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _damaged(f"lacks required content: {error!r}") from error
    if problem := untrusted.paths_problem(manifest.files) or untrusted.paths_problem(manifest.parts):
        raise _damaged(f"names {problem}")
    if unknown := {name for names in manifest.parts.values() for name in names} - set(manifest.files):
        raise _damaged(f"gives no size and digest of {min(unknown)!r}")
    return manifest


def read_age(folder: Path) -> tuple[int, int] | None:
    """Return sequence and step, which define the age, of a manifest of any format; None if it is not intact.

    Raises:
        UnreadableError: it cannot be read.
    """
    try:
        content = _content(folder)
    except DamagedCheckpointError:
        return None
    sequence, step = content.get("sequence"), content.get("step")
    return (sequence, step) if type(sequence) is int and type(step) is int else None


def _records(content: dict[str, Any], *, with_sections: bool) -> dict[str, FileRecord]:
    sections = content["sections"] if with_sections else {}
    return {
        name: FileRecord(int(held["bytes"]), str(held["sha256"]), parse_sections(sections.get(name, {})))
        for name, held in content["files"].items()
    }


def describe_sections(sections: Iterable[Section]) -> dict[str, str]:
    """Return sections in the form of a manifest: for each name, its end and the digest up to there."""
    return {section.name: f"{section.end} {section.digest}" for section in sections}


def parse_sections(described: Mapping[str, str]) -> tuple[Section, ...]:
    """Parse the result of `describe_sections`; return the sections in the order of the file.

    Raises:
        ValueError, AttributeError: it is malformed.
    """
    found = []
    for name, text in described.items():
        end, digest = text.split(" ")
        found.append(Section(name, int(end), digest))
    return tuple(sorted(found, key=lambda section: section.end))


def _own_entry(digest: str) -> str:
    return f'"manifest_sha256": "{digest}"'


def _damaged(what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(damages=[Damage(MANIFEST, "content", f"{MANIFEST} {what}")])


def _content(folder: Path) -> dict[str, Any]:
    try:
        if problem := untrusted.file_kind_problem(folder, MANIFEST):
            raise _damaged(problem)
        return _parsed(folder / MANIFEST)
    except FileNotFoundError:
        raise _damaged("is missing, so it is incomplete or was written by another program") from None
    except OSError as error:
        raise _damaged(f"cannot be read: {error.strerror}") from error


def _parsed(path: Path) -> dict[str, Any]:
    raw = reads.content(path)
    try:
        return _parse(raw)
    except DamagedCheckpointError:
        if (again := reads.content(path)) == raw:  # otherwise the read was wrong, not the file
            raise
    return _parse(again)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        content = untrusted.parse_json(raw.decode())
    except (CheckpointError, UnicodeDecodeError) as error:
        raise _damaged(f"is not valid JSON: {error}") from error
    own = content.get("manifest_sha256") if isinstance(content, dict) else None
    blank = raw.replace(_own_entry(str(own)).encode(), _own_entry(_BLANK).encode(), 1)
    if not isinstance(own, str) or hashlib.sha256(blank).hexdigest() != own:
        raise _damaged("was changed after it was written: its content does not match its digest")
    return content
