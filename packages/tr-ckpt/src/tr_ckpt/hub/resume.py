"""Go on from a checkpoint on the Hub: all of it from one commit, checked before anything is loaded."""

from __future__ import annotations

import errno
import logging
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tr_ckpt import catalogue, files, manifest, names, reading_back, staging
from tr_ckpt.catalogue import Found
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError, PushError
from tr_ckpt.hub.commit import COMMIT, Commit, commit_of
from tr_ckpt.hub.hub_callback import LAST
from tr_ckpt.hub.hub_repository import HubRepository
from tr_ckpt.manifest import Manifest
from tr_ckpt.ranks import Ranks

logger = logging.getLogger(__name__)

SCHEME = "hub"

# How often ranks that wait for a download hear of each other: no collective may last as long as a download.
_HEAR_EVERY_S = 30.0

_FOREIGN = "trainer_state.json"  # what a checkpoint of another program has in the place of a manifest
_COMMITS_NAMED = 5


def is_address(source: object) -> bool:
    """Whether `source` is `hub` or `hub:...`; a folder of such a name is given as `./hub`."""
    return isinstance(source, str) and (source == SCHEME or source.startswith(f"{SCHEME}:"))


@contextmanager
def fetched(
    source: str, directory: Path, prefix: str, ranks: Ranks, own: Callable[[], HubRepository] | None
) -> Iterator[Path]:
    """Give a folder with the checkpoint at `source`, on all ranks; it is removed afterwards.

    Rank 0 downloads to a temporary folder in `directory`, which all ranks must see. What an attempt that failed has
    left there is used by the next one, and cleared away at the next save.

    Args:
        source: `hub` for the repository of this run, or `hub:OWNER/NAME`, or `hub:OWNER/NAME@REVISION`.
        directory: the run's folder.
        prefix: what the names of checkpoints begin with.
        ranks: this process among the others.
        own: returns the repository of this run, whose token reads others too; None where there is none.

    Raises:
        CheckpointError: there is no checkpoint, or the Hub did not give it; the message says why.
        DamagedCheckpointError: all that are there are damaged.
    """
    download = _apart(lambda: fetch(_repository(source, own), directory, prefix)) if ranks.rank == 0 else None
    while not ranks.gather(download is None or _is_done(download, _HEAR_EVERY_S))[0]:
        pass

    def result() -> Path | None:
        return None if download is None else download.result()

    folder = ranks.together(f"{source} was not restored", result, failure=CheckpointError)[0]
    assert folder is not None  # rank 0's
    try:
        yield folder
    except BaseException:
        names.release(folder.parent)
        raise
    if ranks.rank == 0:
        staging.discard(folder.parent)


def fetch(repository: HubRepository, directory: Path, prefix: str) -> Path:
    """Download the newest valid checkpoint of one commit and return its folder, below a temporary one.

    The commit is looked up first; what is pushed meanwhile changes nothing. Of several checkpoints the newest by
    sequence and step is taken, and damaged ones are skipped, each with a warning that names the damage.

    Args:
        repository: where it is; its revision may be a branch, a tag or a commit, and None is `main`.
        directory: where to make the temporary folder.
        prefix: what the names of checkpoints begin with.

    Raises:
        CheckpointError: there is none, or the Hub did not give it.
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
            names.release(into)
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
    """Make the temporary folder of a download, or take over what a process that is gone has left of it."""
    files.make_folders(directory)
    into = names.temporary(directory, "fetched", commit.sha)
    for left in names.temporaries(directory):
        if left.kind == "fetched" and left.target == commit.sha and left.is_abandoned():
            try:
                files.rename(left.path, into)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                break  # of a lower layer of overlayfs, which the next save removes
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
        # One that cannot be read may be the newest: it is tried first, so that it is noticed. Another program's last.
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
    raise DamagedCheckpointError(f"no valid checkpoint at {commit}: {'; '.join(damages)}{_earlier(commit)}")


def _download(commit: Commit, name: str, into: Path) -> Path:
    folder = into / name
    listed = commit.below(name)
    if f"{name}/{names.MANIFEST}" not in listed:
        commit.download(f"{name}/*", listed, into)
        return folder
    described = manifest.read(folder)
    _check_sizes(commit, name, described)  # before much is downloaded
    commit.download(f"{name}/*", listed, into)
    reading_back.verify(folder, catalogue.check_quickly(Found(None, name, folder)))
    return folder


def _check_sizes(commit: Commit, name: str, described: Manifest) -> None:
    wrong = []
    for file, record in described.files.items():
        size = commit.sizes.get(f"{name}/{file}")
        if size is None:
            wrong.append(f"{file} is missing")
        elif size != record.bytes:
            wrong.append(f"{file} has {size:,} bytes in place of {record.bytes:,}")
    catalogue.raise_if_any(wrong)


def _earlier(commit: Commit) -> str:
    """Return how to go on from an earlier commit, as the end of a message; nothing where they cannot be listed."""
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
    return f" — go on from an earlier commit: {', '.join(named)}" if named else ""


def _apart(work: Callable[[], Path]) -> Future[Path]:
    """Do `work` in a thread: what Ctrl-C shows of this one then is no request, with a token in it."""
    future: Future[Path] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="hub-fetch", daemon=True).start()
    return future


def _is_done(future: Future[Path], within_s: float) -> bool:
    try:
        future.exception(within_s)
    except NotYet:
        return False
    return True
