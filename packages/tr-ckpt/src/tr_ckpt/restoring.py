"""Choose a checkpoint, read all of it, and only then load it: the same checkpoint on every rank."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tr_ckpt import discovery, manifest, names, reads
from tr_ckpt import ranks as nodes
from tr_ckpt.discovery import Age, Found
from tr_ckpt.errors import CheckpointError, Damage, DamagedCheckpointError, UnreadableError
from tr_ckpt.hf_import import conversion
from tr_ckpt.hf_import.fitting import fit
from tr_ckpt.layout import Layout, layout_of
from tr_ckpt.manifest import Manifest
from tr_ckpt.names import MANIFEST
from tr_ckpt.ranks import Ranks
from tr_ckpt.reader import CheckpointReader
from tr_ckpt.tensor_file import may_have_layout
from tr_log.formatting import printable

logger = logging.getLogger(__name__)

_GONE = Damage("", "gone", "it was removed while it was being read")

# Larger checkpoints take long to read, so the start is logged.
LONG_READ_BYTES = 500_000_000


@dataclass(frozen=True)
class Answer:
    """A rank's result of reading: the step, the age of a checkpoint of ours, and what is wrong."""

    step: int = -1
    age: Age | None = None
    damages: tuple[Damage, ...] = ()


@dataclass(frozen=True)
class Restored:
    """The result of a restore.

    Attributes:
        step: the checkpoint's step; None if there was no valid checkpoint.
        source: the checkpoint's folder; None if there was none. For one from the Hub it is the temporary download
            folder, which is gone when the restore returns.
        skipped: checkpoints that were skipped although they may be newer, each with the reason, such as
            `checkpoint-30: model.safetensors is 12 bytes short`.
        loaded: names of the parts that were given a state on this rank.
        states: the states of the `only_read` parts, by name.
    """

    step: int | None
    source: Path | None
    skipped: tuple[str, ...] = ()
    loaded: frozenset[str] = frozenset()
    states: Mapping[str, Any] = field(default_factory=dict)


class Restoring:
    """One collective restore into `targets`.

    Args:
        targets: parts to load, by name.
        ranks: this process among the others.
        prefix: the first part of the names of checkpoints.
        optional: names of parts that stay unchanged if a checkpoint does not hold them.
        only_read: names of parts whose state is kept and not loaded.
    """

    def __init__(
        self,
        targets: Mapping[str, Any],
        ranks: Ranks,
        prefix: str,
        *,
        optional: Collection[str] = (),
        only_read: Collection[str] = (),
    ) -> None:
        self._targets = {**dict.fromkeys(only_read), **targets}
        self._optional = optional
        self._only_read = only_read
        self._ranks = ranks
        self._prefix = prefix
        self._skipped: list[str] = []
        self._handed_out: set[str] = set()
        self._states: dict[str, Any] = {}
        self._loaded: tuple[Found, Answer] | None = None
        self._layouts: dict[str, Layout] = {}

    def age_in(self, directory: Path) -> Age | None:
        """Return the age of the loaded checkpoint; None if none was loaded, or it is foreign or not in `directory`."""
        if self._loaded is None:
            return None
        found, answer = self._loaded
        return answer.age if os.path.realpath(found.path.parent) == os.path.realpath(directory) else None

    def result(self) -> Restored:
        """Return the result so far."""
        skipped, loaded = tuple(dict.fromkeys(self._skipped)), frozenset(self._handed_out)
        if self._loaded is None:
            return Restored(None, None, skipped)
        found, answer = self._loaded
        return Restored(answer.step, found.path, skipped, loaded, self._states)

    def newest(self, directory: Path) -> int | None:
        """Load the newest valid checkpoint in `directory`; None if there is none.

        Raises:
            CheckpointError: it lacks a part, or a part rejects its state.
            UnreadableError: the folder, or a checkpoint that may be the newest, cannot be read.
        """
        tried: set[str] = set()
        # Listed again in each round: a run that saves there may remove what was listed, but never its newest.
        while fresh := [found for found in self._candidates(directory) if found.name not in tried]:
            for found in reversed(fresh):
                try:
                    step = self._load(found)
                    self._name_later(found, fresh)
                    return step
                except DamagedCheckpointError as error:
                    self._skipped.append(f"{found.path.name}: {_said(error.damages)}")
                    if self._ranks.rank == 0:
                        logger.warning("skipped %s", self._skipped[-1])
            tried.update(found.name for found in fresh)
        return None

    def _candidates(self, directory: Path) -> list[Found]:
        # Rank 0 lists the folder: other ranks may see changes of a shared folder a moment later.
        [candidates, *_] = self._ranks.apart(
            "nothing was restored", lambda: discovery.by_age(directory, self._prefix), failure=CheckpointError
        )
        kept, skipped = nodes.found_on_all(self._ranks, candidates)
        self._skipped += skipped
        return kept

    def explicit(self, source: Path) -> int:
        """Load the checkpoint `source`, or the newest valid one inside it.

        Raises:
            CheckpointError: there is none, it is damaged, it lacks a part, or a part rejects its state.
            UnreadableError: it cannot be read.
        """
        [(is_folder, is_checkpoint, inside, beside), *_] = self._ranks.apart(
            "nothing was restored",
            lambda: (
                reads.is_folder(source),
                _is_checkpoint(source, self._prefix),
                len(discovery.find(source, self._prefix)),
                []
                if reads.is_folder(source)
                else [found.name for found in discovery.find(source.parent, self._prefix)],
            ),
            failure=CheckpointError,
        )
        nodes.check_same_kind(self._ranks, source, (is_folder, is_checkpoint, bool(inside)))
        if is_checkpoint:
            named = Found(None, source.name, source)
            nodes.check_same_checkpoint(self._ranks, named)
            try:
                return self._load(named)
            except DamagedCheckpointError as error:
                # Only for files that people edit; for others the hint would advise to accept damage.
                is_text = any(damage.file.endswith(".json") for damage in error.damages)
                hint = f"; a change on purpose is accepted by `trainer ckpt seal {source}`" if is_text else ""
                raise DamagedCheckpointError(
                    f"{error} — give another checkpoint, or {source.parent} for the newest valid one in it{hint}"
                ) from error
        if not is_folder:
            there = f"{source.parent} has {', '.join(beside[-10:])}" if beside else f"{source.parent} has none"
            raise CheckpointError(f"no checkpoint at {source}: there is no such folder; {there}")
        if not inside:
            _refuse_pickled(source)
            raise CheckpointError(
                f"no checkpoint at {source}: it holds neither a {MANIFEST} nor folders named "
                f"{self._prefix}-<step>; give a checkpoint or the folder that the checkpoints are in"
            )
        step = self.newest(source)
        if step is None:
            raise CheckpointError(f"no valid checkpoint in {source}: all {inside} are damaged, as logged above")
        return step

    def _load(self, found: Found) -> int:
        what = f"{found.path} was not restored"
        states: dict[str, Any] = {}
        answers = self._read_alike(found, states)
        found_here = [damage for answer in answers for damage in answer.damages]
        everywhere = [damage for machine in self._ranks.across(found_here) for damage in machine]
        if damages := tuple(dict.fromkeys(everywhere)):  # most ranks report the same
            raise DamagedCheckpointError(f"{found.path}: {_said(damages)}", damages)
        self._ranks.together(what, lambda: self._hand_out(found.path, states), failure=CheckpointError)
        self._loaded = found, answers[0]
        return answers[0].step

    def _read_alike(self, found: Found, states: dict[str, Any]) -> list[Answer]:
        """Read a checkpoint into `states` on all ranks; read again if a rank sees other files than the first.

        Returns:
            The result of each rank of this machine.
        """
        what = f"{found.path} was not restored"
        # Files that one machine wrote may appear on another with a delay.
        problems: list[str] = []
        for delay_s in (*reads.DELAYS_S[-2:], None):
            states.clear()
            self._take_layouts(found, what)
            answers = self._ranks.apart(what, lambda: self._read(found, states), failure=CheckpointError)
            problems = [problem for machine in self._ranks.across(_contradictions(answers)) for problem in machine]
            if not problems:
                return answers
            if delay_s is not None:
                time.sleep(delay_s)
        raise UnreadableError(
            f"{what}: the ranks do not see the same files: {'; '.join(problems)}. Nothing else was taken in its place: "
            "check the shared file system and start again"
        )

    def _take_layouts(self, found: Found, what: str) -> None:
        """Take the layouts of the targets before any rank reads, as a `state_dict` may be collective. Collective."""
        wanted = {part for part, target in self._targets.items() if may_have_layout(target)}
        # Rank 0 decides: a rank that sees damage must not keep the others waiting in a `state_dict`.
        given = self._ranks.apart(what, lambda: self._saved_in_shards(found), failure=CheckpointError)[0]
        wanted = wanted.union(*self._ranks.across(given))
        wanted -= {*self._layouts, *names.PER_RANK}
        if not wanted:
            return

        def take() -> None:
            failure: Exception | None = None
            for part in (part for part in self._targets if part in wanted):
                try:
                    self._layouts[part] = layout_of(self._targets[part])
                except Exception as error:  # other ranks take the remaining ones, and may wait for this one
                    failure = failure or error
            if failure is not None:
                raise failure

        self._ranks.together(what, take, failure=CheckpointError)

    def _saved_in_shards(self, found: Found) -> set[str]:
        if self._ranks.rank != 0:
            return set()
        try:
            return manifest.read(found.path, with_sections=False).in_shards() & set(self._targets)
        except UnreadableError:
            raise
        except CheckpointError:  # the read that follows says so
            return set()

    def _read(self, found: Found, states: dict[str, Any]) -> Answer:
        try:
            if not discovery.is_foreign(found.path):
                return self._read_own(found, states)
            with contextlib.suppress(DamagedCheckpointError):  # counts only if the second read finds it too
                return self._take_over(found, states)
            return self._take_over(found, states)
        except UnreadableError:
            raise
        except CheckpointError as error:
            if not reads.is_folder(found.path):
                return Answer(damages=(_GONE,))
            if isinstance(error, DamagedCheckpointError):
                return Answer(damages=error.damages)
            raise CheckpointError(f"{found.path}: {error}") from error

    def _take_over(self, found: Found, states: dict[str, Any]) -> Answer:
        rank = self._ranks.number
        return Answer(conversion.read_into(states, found.path, found.step, self._targets, rank, self._optional))

    def _read_own(self, found: Found, states: dict[str, Any]) -> Answer:
        described = self._check(found)
        for part, target in self._targets.items():
            if self._is_saved(part, described):
                if part in described.in_shards() and part not in self._layouts:
                    text = f"{MANIFEST} was not the same when it was read again"
                    raise DamagedCheckpointError(damages=[Damage(MANIFEST, "content", text)])
                with CheckpointReader(found.path, described.parts) as reader:
                    state = reader.state(part, self._ranks.number, self._layouts.get(part))
                states[part] = fit(part, state, target) if conversion.NOTE in described.files else state
        return Answer(described.step, described.age)

    def _name_later(self, chosen: Found, candidates: list[Found]) -> None:
        """Log which newer-looking step of another program is not resumed from."""
        later = [found for found in candidates if (found.step or 0) > (chosen.step or 0)]
        if self._ranks.rank != 0 or not later:
            return
        # The restore has succeeded: a read error about another program's checkpoint must not end it.
        with contextlib.suppress(UnreadableError), reads.at_once():
            if discovery.is_foreign(chosen.path):
                return
            for found in later:
                if discovery.is_foreign(found.path):
                    reason = "is of another program and counts as older than"
                    said = f"{found.name} {reason} {chosen.name}; name its folder to resume from it"
                    self._skipped.append(said)
                    logger.warning("%s", said)

    def _check(self, found: Found) -> Manifest:
        described = discovery.check_quickly(found)
        self._require_parts(described)
        ranks = self._ranks
        wanted = described.files_to_verify(self._targets, ranks.rank, ranks.world_size)
        size_bytes = sum(described.files[name].bytes for name in wanted if name in described.files)
        if ranks.rank == 0 and size_bytes >= LONG_READ_BYTES:
            logger.info("reading and verifying %s, %.1f GB", found.path, size_bytes / 1e9)
        discovery.raise_if_damaged(discovery.damages(found.path, described, wanted))
        return described

    def _hand_out(self, path: Path, states: dict[str, Any]) -> None:
        # Random states last: loading another part may use random numbers.
        for part in sorted(states, key=lambda name: name in names.PER_RANK):
            if part in self._only_read:
                self._states[part] = states.pop(part)
                continue
            try:
                self._targets[part].load_state_dict(states.pop(part))
                self._handed_out.add(part)
            except Exception as error:
                # Any exception of a part means that this checkpoint does not fit it.
                raise CheckpointError(f"{path} does not fit: part {part!r} refused its state: {error}") from error

    def _require_parts(self, described: Manifest) -> None:
        missing = [part for part in self._targets if part not in described.parts and part not in self._optional]
        if not missing:
            return
        if "optimizer" in missing and "model" in described.parts:
            hint = "it was saved with the model only, and a run cannot resume from that; restore only the model"
        else:
            hint = "use the options of the run that saved it, or restore only parts that are there"
        raise CheckpointError(
            f"there is no {' and no '.join(map(repr, missing))} in it, only "
            f"{', '.join(sorted(described.parts))} — {hint}"
        )

    def _is_saved(self, part: str, described: Manifest) -> bool:
        if f"{names.stem(part, self._ranks.number)}.json" in described.files:
            return True
        if part not in described.parts:
            return False
        logger.warning(
            "%s of rank %d was not saved (%d processes saved, %d restore); it stays unchanged",
            part, self._ranks.number, described.world_size, self._ranks.total,
        )  # fmt: skip
        return False


def _refuse_pickled(source: Path) -> None:
    """Refuse a checkpoint of torch.distributed.checkpoint itself.

    Raises:
        CheckpointError: `source` is one.
    """
    if (source / ".metadata").exists() and any(source.glob("*.distcp")):
        raise CheckpointError(
            f"{source} was written by torch.distributed.checkpoint; its .metadata is a pickle, which can run anything "
            "and is not read — if you trust it, load it with torch.distributed.checkpoint.load, then save with this"
        )


def _is_checkpoint(source: Path, prefix: str) -> bool:
    """Whether a folder is a checkpoint itself; a folder of checkpoints may hold a trainer's state too."""
    is_foreign = discovery.is_foreign(source) and not discovery.find(source, prefix)
    return is_foreign or reads.is_there(source / MANIFEST)


def _said(damages: Iterable[Damage]) -> str:
    return printable("; ".join(damage.text for damage in damages), lines=True)


def _contradictions(answers: list[Answer]) -> list[str]:
    """Return where ranks disagree with the first rank of their machine about a file that both read."""
    first, *others = [answer.damages for answer in answers]
    if not first:  # it read all files but the shards, each of which one rank reads
        return [
            f"{_said(damages)} on rank {rank} alone"
            for rank, damages in enumerate(others, start=1)
            if any(not names.is_shard(damage.file) for damage in damages)
        ]
    of_all = any(damage.kind == "gone" or damage.file == MANIFEST for damage in first)
    return [f"{_said(first)} on rank 0, and not on rank {others.index(()) + 1}"] if of_all and () in others else []
