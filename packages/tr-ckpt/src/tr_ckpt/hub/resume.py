"""Resume from a checkpoint on the Hub: all of it from one commit, checked before any part is loaded.

The listing of a commit comes from the Hub, or from a server in its place. Each name in it is checked before the file
is requested. Each file is requested by its exact name. The downloaded files are checked before they are read.
"""

from __future__ import annotations

import glob
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tr_ckpt import discovery, files, manifest, names, processes, reader, staging, untrusted
from tr_ckpt.discovery import Found
from tr_ckpt.errors import CheckpointError, Damage, DamagedCheckpointError, PushError
from tr_ckpt.hub.hub_callback import LAST
from tr_ckpt.hub.hub_repository import HubRepository
from tr_ckpt.manifest import Manifest
from tr_ckpt.ranks import Ranks
from tr_log import slow_work

# The limit for a listing, which is kept in memory.
MOST_ENTRIES = 1_000_000

_AT_ONCE = 200  # the client compares each of these patterns with each file of the repository
COMMIT = re.compile("[0-9a-f]{7,64}")


@dataclass(frozen=True)
class Commit:
    """One commit of a repository.

    Attributes:
        repository: its repository.
        sha: its hash.
        sizes: the size of every file in bytes, by path.
    """

    repository: HubRepository
    sha: str
    sizes: dict[str, int]

    def __str__(self) -> str:
        return f"{self.repository.url}, commit {self.sha[:8]}"

    def folders(self, marks: Iterable[str]) -> list[str]:
        """Return the folders that contain one of the files `marks`."""
        wanted = set(marks)
        placed = ((path.partition("/")[0], path.partition("/")[2]) for path in self.sizes)
        return sorted({folder for folder, name in placed if name in wanted})

    def below(self, folder: str) -> list[str]:
        """Return the paths of a folder's files.

        Raises:
            CheckpointError: a path leads outside the folder, or two paths are one file on some systems.
        """
        names = [path for path in self.sizes if path.startswith(f"{folder}/")]
        if problem := untrusted.paths_problem(names):
            raise CheckpointError(f"nothing of it is downloaded: its listing names {problem}")
        return names

    def download(self, what: str, names: Iterable[str], into: Path) -> None:
        """Download files; files that exist already are kept.

        Args:
            what: their description for messages.
            names: their paths, which must have been checked.
            into: the target folder.

        Raises:
            CheckpointError: other files arrived.
            PushError: the download failed.
        """
        names = list(names)
        for start in range(0, len(names), _AT_ONCE):
            # Exact names: a pattern such as "folder/*" would match whatever the listing holds at download time.
            exactly = [glob.escape(name) for name in names[start : start + _AT_ONCE]]

            def ask(api: Any, exactly: list[str] = exactly) -> None:
                try:
                    api.snapshot_download(
                        self.repository.repo_id,
                        revision=self.sha,
                        allow_patterns=exactly,
                        local_dir=into,
                        tqdm_class=_counting_bar(),
                    )
                except FileNotFoundError as error:
                    if os.name == "nt" or not str(error.filename).startswith("\\\\?\\"):
                        raise
                    raise CheckpointError(
                        "huggingface_hub 0.34 to 1.0.0 cannot write to a path of more than 255 characters; install "
                        "another version of it, or give a shorter output_dir"
                    ) from None

            self.repository.ask(f"{what} of {self} was not downloaded", ask)
            slow_work.advance()
        for name in names:
            _require_downloaded(into, name)
        for folder in {name.partition("/")[0] for name in names}:
            if surplus := set(_paths_below(into, folder)) - set(self.sizes):
                raise CheckpointError(f"{min(surplus)!r} came with {what} of {self}, and was not asked for")


def _counting_bar() -> type[Any]:
    """Return the client's bar, whose every move is progress for a watch of hangs; before 1.0 it moves with files."""
    from huggingface_hub.utils import tqdm  # an import of 0.3 s

    class CountingBar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            slow_work.advance()
            return super().update(n)

    return CountingBar


def commit_of(repository: HubRepository) -> Commit:
    """Look up the present commit of a repository's revision, and its listing.

    Raises:
        PushError: the request failed.
        CheckpointError: the answer is not a valid commit or listing.
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
    if not isinstance(sha, str) or not COMMIT.fullmatch(sha):  # it becomes the name of a folder
        raise CheckpointError(f"{what}: the Hub calls its commit {sha!r:.80}, which is none")
    sizes = repository.ask(what, lambda api: dict(_listed(api, repository.repo_id, sha)))
    if len(sizes) > MOST_ENTRIES:
        raise CheckpointError(f"{what}: it lists more than {MOST_ENTRIES:,} files")
    return Commit(repository, sha, sizes)


def _listed(api: Any, repo_id: str, sha: str) -> Iterator[tuple[str, int]]:
    listed = api.list_repo_tree(repo_id, revision=sha, recursive=True)
    for entry in itertools.islice(listed, MOST_ENTRIES + 1):  # the listing comes in pages, perhaps without end
        size = getattr(entry, "size", None)
        if isinstance(entry.path, str) and type(size) is int:  # otherwise a folder
            yield entry.path, size


def _require_downloaded(into: Path, name: str) -> None:
    try:
        problem = untrusted.file_kind_problem(into, name)
    except OSError as error:
        problem = f"is not where it was to be put: {error.strerror}"
    if problem:
        raise CheckpointError(f"{name} {problem}")


def _paths_below(into: Path, folder: str) -> Iterator[str]:
    for path in (into / folder).rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(into).as_posix()


logger = logging.getLogger(__name__)

SCHEME = "hub"

_FOREIGN = "trainer_state.json"  # another program's checkpoints have this file instead of a manifest
_COMMITS_NAMED = 5


def is_address(source: object) -> bool:
    """Whether `source` is `hub` or `hub:...`; write `./hub` for a folder of that name."""
    return isinstance(source, str) and (source == SCHEME or source.startswith(f"{SCHEME}:"))


@contextmanager
def fetched(
    source: str, directory: Path, prefix: str, ranks: Ranks, own: Callable[[], HubRepository] | None
) -> Iterator[Path]:
    """Yield a folder with the checkpoint at `source`, on all ranks, and remove it afterwards. Collective.

    Rank 0 downloads to a temporary folder in `directory`, which all ranks must see. The next attempt reuses what a
    failed one has downloaded, and the next save removes it.

    Args:
        source: `hub` for the repository of this run, or `hub:OWNER/NAME`, or `hub:OWNER/NAME@REVISION`.
        directory: the run's folder.
        prefix: the first part of the names of checkpoints.
        ranks: this process among the others.
        own: returns the repository of this run, whose token is used for others too; None if there is none.

    Raises:
        CheckpointError: there is no checkpoint, or the download failed; the message says why.
        DamagedCheckpointError: all checkpoints there are damaged.
    """

    def download() -> Path | None:
        if ranks.rank != 0:
            return None
        # In a thread: a traceback of Ctrl-C in this one then shows no request with a token.
        return slow_work.in_thread(lambda: fetch(_repository(source, own), directory, prefix)).result()

    folder = ranks.apart(f"{source} was not restored", download, failure=CheckpointError)[0]
    assert folder is not None  # rank 0's result
    try:
        yield folder
    except BaseException:
        processes.release(folder.parent)
        raise
    if ranks.rank == 0:
        staging.discard(folder.parent)


def fetch(repository: HubRepository, directory: Path, prefix: str) -> Path:
    """Download the newest valid checkpoint of one commit and return its folder, below a temporary one.

    The commit is looked up first, so that later pushes have no effect. Of several checkpoints the newest by
    sequence and step is taken. Damaged ones are skipped, each with a warning that names the damage.

    Args:
        repository: the source; its revision may be a branch, a tag or a commit, and None is `main`.
        directory: the parent of the temporary folder.
        prefix: the first part of the names of checkpoints.

    Raises:
        CheckpointError: there is none, or the download failed.
        DamagedCheckpointError: all of them are damaged.
    """
    try:
        commit = commit_of(repository)
        folders = commit.folders((names.MANIFEST, _FOREIGN))
        candidates = [name for name in folders if name == LAST or names.step_of(name, prefix) is not None]
        if not candidates:
            raise CheckpointError(
                f"no checkpoint at {commit}: it holds neither {LAST}/ nor {prefix}-<step>/, which are pushed with "
                "hub_strategy='checkpoint' and 'all_checkpoints'"
            )
        into = _folder_for(commit, directory)
        try:
            return _newest_valid(commit, candidates, into, prefix)
        except BaseException:
            processes.release(into)
            raise
    except PushError as error:
        failure = str(error)
    raise CheckpointError(failure)


def _repository(source: str, own: Callable[[], HubRepository] | None) -> HubRepository:
    name, _, revision = source.removeprefix(SCHEME).removeprefix(":").partition("@")
    if not name:
        if own is None or revision:
            raise CheckpointError(f"{source!r} names no repository: give hub:OWNER/NAME or hub:OWNER/NAME@REVISION")
        return own()
    try:
        return (own() if own is not None else HubRepository(name)).but(repo_id=name, revision=revision or "main")
    except ValueError as error:
        raise CheckpointError(f"{source!r}: {error}") from None


def _folder_for(commit: Commit, directory: Path) -> Path:
    """Make the temporary folder of a download, or reuse that of a dead process."""
    files.make_folders(directory)
    into = processes.temporary(directory, "fetched", commit.sha)
    for left in names.temporaries(directory):
        if left.kind == "fetched" and left.target == commit.sha and processes.is_abandoned(left):
            files.rename(left.path, into)
            return into
    files.make_folder(into)
    return into


def _newest_valid(commit: Commit, candidates: list[str], into: Path, prefix: str) -> Path:
    there = [f"{name}/{names.MANIFEST}" for name in candidates if f"{name}/{names.MANIFEST}" in commit.sizes]
    commit.download(f"*/{names.MANIFEST}", there, into)
    ages = {name: manifest.read_age(into / name) for name in candidates}

    def key(name: str) -> tuple[bool, bool, tuple[int, int], float]:
        age, step = ages[name], names.step_of(name, prefix)
        is_ours = f"{name}/{names.MANIFEST}" in commit.sizes
        # One that cannot be read may be the newest: it is tried first, and reported. Another program's is last.
        return is_ours, is_ours and age is None, age or (0, 0), math.inf if step is None else step

    damages = []
    for name in sorted(candidates, key=key, reverse=True):
        try:
            logger.info("downloading %s of %s", name, commit)
            return _download(commit, name, into)
        except DamagedCheckpointError as error:
            damages.append(f"{name}: {error}")
            if len(candidates) > 1:
                logger.warning("skipped %s of %s: %s", name, commit, error)
        except CheckpointError as error:
            raise CheckpointError(f"{name} of {commit}: {error}") from error
    raise DamagedCheckpointError(f"no valid checkpoint at {commit}: {'; '.join(damages)}{earlier_commits(commit)}")


def _download(commit: Commit, name: str, into: Path) -> Path:
    folder = into / name
    listed = commit.below(name)
    if f"{name}/{names.MANIFEST}" not in listed:
        commit.download(f"{name}/*", listed, into)
        return folder
    described = manifest.read(folder)
    check_sizes(commit, name, described)  # before the large files are downloaded
    commit.download(f"{name}/*", listed, into)
    reader.verify_loadable(folder, discovery.check_quickly(Found(None, name, folder)))
    return folder


def check_sizes(commit: Commit, name: str, described: Manifest) -> None:
    """Compare the listing of a checkpoint with its manifest.

    Raises:
        DamagedCheckpointError: a file is missing or of another size.
    """
    wrong = []
    for file, record in described.files.items():
        size = commit.sizes.get(f"{name}/{file}")
        if size is None:
            wrong.append(Damage(file, "content", f"{file} is missing"))
        elif size != record.bytes:
            wrong.append(Damage(file, "content", f"{file} has {size:,} bytes in place of {record.bytes:,}"))
    discovery.raise_if_damaged(wrong)


def earlier_commits(commit: Commit) -> str:
    """Return the end of a message that names earlier commits to resume from; empty if they cannot be listed."""
    repository = commit.repository

    def list_them(api: Any) -> list[str]:
        commits = api.list_repo_commits(repository.repo_id, revision=commit.sha)[1 : 1 + _COMMITS_NAMED]
        return [
            f"hub:{repository.repo_id}@{each.commit_id} ({each.title!s:.80})"
            for each in commits
            if COMMIT.fullmatch(str(each.commit_id))
        ]

    try:
        named = repository.ask("earlier commits are unknown", list_them)
    except PushError:
        return ""
    return f" — resume from an earlier commit: {', '.join(named)}" if named else ""
