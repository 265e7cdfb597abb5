"""Choose a checkpoint, read all of it, and only then load it: the same one on every rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tr_ckpt import catalogue, parts
from tr_ckpt.catalogue import Found
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError
from tr_ckpt.manifest import Manifest
from tr_ckpt.names import MANIFEST
from tr_ckpt.ranks import Ranks

logger = logging.getLogger(__name__)


class Restoring:
    """One restore into `targets`, which all ranks do together.

    Args:
        targets: parts to load, by name.
        ranks: this process among the others.
        prefix: what the names of checkpoints begin with.
    """

    def __init__(self, targets: Mapping[str, Any], ranks: Ranks, prefix: str) -> None:
        self._targets = targets
        self._ranks = ranks
        self._prefix = prefix

    def newest(self, directory: Path) -> int | None:
        """Load the newest valid checkpoint in `directory`; None if there is none.

        Raises:
            CheckpointError: it lacks a part, or a part does not take its state.
        """
        # Rank 0 decides what there is: others may see a shared folder a moment later.
        [candidates, *_] = self._ranks.together(
            "nothing was restored", lambda: catalogue.find(directory, self._prefix), failure=CheckpointError
        )
        for found in reversed(candidates):
            try:
                return self._load(found)
            except DamagedCheckpointError as error:
                if self._ranks.rank == 0:
                    logger.warning("passed over %s", error)
        return None

    def explicit(self, source: Path) -> int:
        """Load the checkpoint `source`, or the newest valid one inside it.

        Raises:
            CheckpointError: there is none, it is damaged, it lacks a part, or a part does not take its state.
        """
        [(is_folder, is_checkpoint, inside), *_] = self._ranks.together(
            "nothing was restored",
            lambda: (source.is_dir(), (source / MANIFEST).exists(), len(catalogue.find(source, self._prefix))),
            failure=CheckpointError,
        )
        if is_checkpoint:
            try:
                return self._load(Found(None, source.name, source))
            except DamagedCheckpointError as error:
                raise DamagedCheckpointError(
                    f"{error} — give another checkpoint, or {source.parent} for the newest valid one in it"
                ) from error
        if not is_folder:
            raise CheckpointError(f"no checkpoint at {source}: there is no such folder")
        if not inside:
            raise CheckpointError(
                f"no checkpoint at {source}: it holds neither a {MANIFEST} nor folders named "
                f"{self._prefix}-<step>; give a checkpoint or the folder that the checkpoints are in"
            )
        step = self.newest(source)
        if step is None:
            raise CheckpointError(f"no valid checkpoint in {source}: all {inside} are damaged, as logged above")
        return step

    def _load(self, found: Found) -> int:
        what = f"{found.name} was not restored"
        states: dict[str, Any] = {}

        def read() -> tuple[int, str | None]:
            try:
                described = self._check(found)
                for part in self._targets:
                    if self._is_saved(part, described):
                        states[part] = parts.read(found.path, part, self._ranks.rank)
            except DamagedCheckpointError as error:
                return -1, str(error)
            except CheckpointError as error:
                raise CheckpointError(f"{found.name}: {error}") from error
            return described.step, None

        answers = self._ranks.together(what, read, failure=CheckpointError)
        if damages := dict.fromkeys(damage for _, damage in answers if damage):  # ranks mostly see the same
            raise DamagedCheckpointError(f"{found.name}: {'; '.join(damages)}")
        self._ranks.together(what, lambda: self._hand_out(found.name, states), failure=CheckpointError)
        return answers[0][0]

    def _check(self, found: Found) -> Manifest:
        described = catalogue.check_quickly(found)
        self._require_parts(described)
        if self._ranks.rank == 0:
            catalogue.verify(found.path, described)
        else:  # what this rank is about to load; rank 0 reads the rest
            stems = tuple(f"{parts.stem(part, self._ranks.rank)}." for part in self._targets)
            wanted = [file for file in described.files if file.startswith(stems)]
            catalogue.raise_if_any(catalogue.damages(found.path, described, wanted))
        return described

    def _hand_out(self, name: str, states: dict[str, Any]) -> None:
        # Random states last: loading another part may draw.
        for part in sorted(states, key=lambda name: name in parts.PER_RANK):
            try:
                self._targets[part].load_state_dict(states.pop(part))
            except Exception as error:
                # Whatever a part objects to, it is this checkpoint that does not fit it.
                raise CheckpointError(f"{name} does not fit: part {part!r} refused its state: {error}") from error

    def _require_parts(self, described: Manifest) -> None:
        missing = [part for part in self._targets if part not in described.parts]
        if not missing:
            return
        if "optimizer" in missing and "model" in described.parts:
            hint = "it was saved with the model only, which no run can go on from; restore only the model"
        else:
            hint = "go on with the options of the run that saved it, or restore only what is there"
        raise CheckpointError(
            f"there is no {' and no '.join(map(repr, missing))} in it, only "
            f"{', '.join(sorted(described.parts))} — {hint}"
        )

    def _is_saved(self, part: str, described: Manifest) -> bool:
        if f"{parts.stem(part, self._ranks.rank)}.json" in described.files:
            return True
        logger.warning(
            "%s of rank %d was not saved (%d processes saved, %d restore); it stays as it is",
            part, self._ranks.rank, described.world_size, self._ranks.world_size,
        )  # fmt: skip
        return False
