"""One commit of a repository of the Hub: what its listing says, and the files of it that are asked for.

The listing is the Hub's word, or that of whoever answers in its place. Each name in it is checked before it is asked
for, each file is asked for by its name alone, and what came is looked at before it is read.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tr_ckpt import path_names, plain_file
from tr_ckpt.errors import CheckpointError
from tr_ckpt.hub.hub_repository import HubRepository

# Of a listing: more names than this are not kept in memory.
MOST_ENTRIES = 1_000_000

_AT_ONCE = 200  # the client compares each of these patterns with each file of the repository
COMMIT = re.compile("[0-9a-f]{7,64}")


@dataclass(frozen=True)
class Commit:
    """One commit of a repository.

    Attributes:
        repository: which.
        sha: of the commit.
        sizes: of every file, in bytes, by path.
    """

    repository: HubRepository
    sha: str
    sizes: dict[str, int]

    def __str__(self) -> str:
        return f"{self.repository.url}, commit {self.sha[:8]}"

    def folders(self, marks: Iterable[str]) -> list[str]:
        """Return the folders that hold one of the files `marks`."""
        wanted = set(marks)
        placed = ((path.partition("/")[0], path.partition("/")[2]) for path in self.sizes)
        return sorted({folder for folder, name in placed if name in wanted})

    def below(self, folder: str) -> list[str]:
        """Return the paths of a folder's files.

        Raises:
            CheckpointError: one leads elsewhere, or is that of another file on some systems.
        """
        names = [path for path in self.sizes if path.startswith(f"{folder}/")]
        if problem := path_names.wrong_among(names):
            raise CheckpointError(f"nothing of it is downloaded: its listing names {problem}")
        return names

    def download(self, what: str, names: Iterable[str], into: Path) -> None:
        """Download files, keeping those that are there already.

        Args:
            what: they are, for messages.
            names: their paths, each of which has been checked.
            into: where they go.

        Raises:
            CheckpointError: something else came.
            PushError: the Hub did not give them.
        """
        names = list(names)
        for start in range(0, len(names), _AT_ONCE):
            # By name: a pattern such as "folder/*" would take whatever the listing holds when the client reads it.
            exactly = [glob.escape(name) for name in names[start : start + _AT_ONCE]]

            def ask(api: Any, exactly: list[str] = exactly) -> None:
                api.snapshot_download(
                    self.repository.repo_id, revision=self.sha, allow_patterns=exactly, local_dir=into
                )

            self.repository.ask(f"{what} of {self} was not downloaded", ask)
        for name in names:
            _require(into, name)
        for folder in {name.partition("/")[0] for name in names}:
            if surplus := set(_below(into, folder)) - set(self.sizes):
                raise CheckpointError(f"{min(surplus)!r} came with {what} of {self}, and was not asked for")


def commit_of(repository: HubRepository) -> Commit:
    """Look up the commit that a repository's revision names now, and what it lists.

    Raises:
        PushError: the Hub did not say.
        CheckpointError: what it said is no commit, or no listing.
    """
    if "/" not in repository.repo_id:
        owner = repository.ask(
            f"whose repository {repository.repo_id!r} is could not be found out, give hub:OWNER/NAME",
            lambda api: api.whoami()["name"],
        )
        try:
            repository = repository.but(repo_id="/".join((owner, repository.repo_id)))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"the Hub names an owner who cannot be one: {error}") from None
    what = f"{repository.url} at {repository.revision or 'main'} could not be read"
    sha = repository.ask(what, lambda api: api.repo_info(repository.repo_id, revision=repository.revision).sha)
    if not isinstance(sha, str) or not COMMIT.fullmatch(sha):  # a folder is named by it
        raise CheckpointError(f"{what}: the Hub calls its commit {sha!r:.80}, which is none")
    sizes = repository.ask(what, lambda api: dict(_listed(api, repository.repo_id, sha)))
    if len(sizes) > MOST_ENTRIES:
        raise CheckpointError(f"{what}: it lists more than {MOST_ENTRIES:,} files")
    return Commit(repository, sha, sizes)


def _listed(api: Any, repo_id: str, sha: str) -> Iterator[tuple[str, int]]:
    listed = api.list_repo_tree(repo_id, revision=sha, recursive=True)
    for entry in itertools.islice(listed, MOST_ENTRIES + 1):  # it comes in pages, of which there may be no end
        size = getattr(entry, "size", None)
        if isinstance(entry.path, str) and type(size) is int:  # else a folder
            yield entry.path, size


def _require(into: Path, name: str) -> None:
    try:
        problem = plain_file.wrong_kind(into, name)
    except OSError as error:
        problem = f"is not where it was to be put: {error.strerror}"
    if problem:
        raise CheckpointError(f"{name} {problem}")


def _below(into: Path, folder: str) -> Iterator[str]:
    for path in (into / folder).rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(into).as_posix()
