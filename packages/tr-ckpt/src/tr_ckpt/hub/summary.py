"""Say at the end of a run what is at the Hub, and what is not and how to bring it there."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tr_ckpt.hub.hub_repository import HubRepository

logger = logging.getLogger(__name__)


def log(
    failures: Sequence[tuple[str, str]],
    repository: HubRepository,
    output_dir: Path,
    prefix: str,
    owed: Mapping[str, Path],
    is_complete: bool,
) -> None:
    """Log how the pushes of a run ended.

    Args:
        failures: of each push that failed, what it was and why.
        repository: where they went.
        output_dir: the run's folder.
        prefix: what the names of checkpoints begin with.
        owed: checkpoints that are not at the Hub and should be, by their place there.
        is_complete: whether a later push brought everything.
    """
    url = repository.url
    if not failures and is_complete:
        logger.info("the run is pushed to %s", url)
        return
    names = ", ".join(repr(label) for label, _ in failures) or ", ".join(owed)
    why = failures[-1][1] if failures else "it failed before"
    if is_complete:
        logger.warning("the run is pushed to %s, but not when it was due: %s; last: %s", url, names, why)
        return
    logger.error(
        "not all of the run is at %s; not pushed: %s; last: %s. Everything is in %s: push it later with "
        "trainer.push_to_hub(), or with: %s",
        url,
        names,
        why,
        output_dir,
        " && ".join(_commands(repository, output_dir, prefix, owed)),
    )


def _commands(repository: HubRepository, output_dir: Path, prefix: str, owed: Mapping[str, Path]) -> list[str]:
    options = [] if repository.revision is None else ["--revision", repository.revision]
    exclude = ["--exclude", ".*", "_*", f"{prefix}-*"]
    commands = [["hf", "upload", repository.repo_id, str(output_dir), ".", *options, *exclude]]
    commands += [["hf", "upload", repository.repo_id, str(folder), place, *options] for place, folder in owed.items()]
    return [shlex.join(command) for command in commands]
