"""Report through files what the background threads of the other ranks wrote, for rank 0.

A background save must not use the communication of training: its messages would mix with those of the steps. So
each rank leaves a small file in a folder that rank 0 made for this save, and rank 0 waits for all of them:

| file | rank 1 |
|---|---|
| `rank-1.writing` | is waited for; its time changes while it saves |
| `rank-1.json` | is done: what it wrote, or why it could not |
| `rank-1.failed` | could not write even that |

Rank 0 removes the folder when it is done, also after a failure; the other ranks wait for that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tr_ckpt import files, manifest, processes, reads, staging
from tr_ckpt.errors import SaveError, UnreadableError
from tr_ckpt.files import FileRecord

# What one rank wrote: its files by part.
Written = dict[str, dict[str, FileRecord]]

logger = logging.getLogger(__name__)

# How long a rank is waited for that gives no sign: one that saves does, however slow its disk is. A rank of this
# machine that ended is noticed at once.
LIMIT_S = 30 * 60
# How long a rank that the job has lost may give none: as long as the lock of a run's folder.
LOST_S = processes.STILL_S
# When a wait is logged, and how often again; and how many ranks it names.
SAY_S, SAY_AGAIN_S = 30.0, 60.0
_MOST_NAMED = 8

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.005, 0.5


class RankRecords:
    """The records of one save.

    Args:
        name: of the checkpoint, for messages.
        folder: the folder of the records; rank 0 made it.
        rank: number of this process.

    Attributes:
        processes: the processes of the ranks, in rank order; set before the exchange.
        lost: returns the ranks that the job has lost, and how that is known.
    """

    def __init__(self, name: str, folder: Path, rank: int) -> None:
        self.name = name
        self.folder = folder
        self.rank = rank
        self.processes: list[processes.Process] = []
        self.lost: Callable[[], Mapping[int, str]] = dict

    @classmethod
    def make(cls, directory: Path, name: str, world_size: int) -> RankRecords:
        """Make the folder beside the checkpoint to be, with the first file of each rank; on rank 0."""
        records = cls(name, processes.temporary(directory, "records", name), 0)
        try:
            files.make_folder(records.folder)
            for rank in range(world_size):
                os.close(files.create(records._sign_of(rank)))
        except OSError:
            staging.discard(records.folder)
            raise
        return records

    @contextmanager
    def giving_signs(self) -> Iterator[None]:
        """Show the other ranks in a block that this one saves: its file changes as its temporary folders do."""
        processes.begin_beating()
        with processes.showing_life(self._sign_of(self.rank)):
            yield

    def seen_of(self, rank: int) -> int:
        """Return what changes while a rank saves."""
        with contextlib.suppress(OSError), open(self._sign_of(rank), "rb") as sign:  # NFS asks the server at an opening
            return os.fstat(sign.fileno()).st_mtime_ns
        return 0

    def _sign_of(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.writing"

    def exchange(self, write: Callable[[], Written]) -> list[Written]:
        """Write this rank's share and leave a record of it.

        Returns:
            On rank 0 what all ranks wrote, in rank order; an empty list on others.

        Raises:
            Exception: what `write` raised.
            SaveError: another rank failed, ended, or did not finish in time; on rank 0 only.
        """
        if self.rank != 0:
            self._tell(write)
            return []
        error: Exception | None = None
        mine: Written = {}
        try:
            mine = write()
        except Exception as caught:
            error = caught
        # Also after a failure, so that no folder is removed while another rank still writes to it.
        try:
            with files.explain_save_errors(self.name, self.folder.parent):
                others, failed = self._collect()
        except OSError as unread:
            raise (error or unread) from unread
        if error is not None:
            raise error
        if failed:
            raise SaveError(f"{self.name} was not saved: {'; '.join(failed)}")
        return [mine, *others]

    def close(self) -> None:
        """Remove the folder, on rank 0."""
        if self.rank == 0:
            staging.discard(self.folder)

    def wait_for_rank_0(self) -> None:
        """Wait until rank 0 is done.

        Raises:
            SaveError: rank 0 ended earlier, or gives no sign for too long.
        """
        for given_up in self._waits({0}):
            # A disk that does not answer is not evidence; the process shows whether rank 0 is alive.
            with contextlib.suppress(UnreadableError), reads.at_once():
                if not reads.is_there(self.folder):
                    return
            if processes.is_gone(self.processes[0]):
                raise SaveError(f"{self.name} was not saved: rank 0 ended before it had put it in its place")
            if given_up:
                raise SaveError(f"{self.name} was not saved: rank 0 did not finish: {given_up[0]}")

    def _tell(self, write: Callable[[], Written]) -> None:
        try:
            written = write()
        except Exception as error:
            with contextlib.suppress(OSError):  # report the first failure, not this one
                self._leave({"error": f"{type(error).__name__}: {error}"})
            raise
        with files.explain_save_errors(self.name, self.folder.parent):
            self._leave({"parts": {part: _as_json(held) for part, held in written.items()}})

    def _leave(self, content: dict[str, Any]) -> None:
        final = self.folder / f"rank-{self.rank}.json"
        part = final.with_suffix(".part")
        try:
            files.write_file(part, [json.dumps(content).encode()])
            files.rename(part, final)
        except OSError:
            # A full disk takes no new file, but a rename works.
            with contextlib.suppress(OSError):
                files.rename(final.with_suffix(".writing"), final.with_suffix(".failed"))
            raise

    def _collect(self) -> tuple[list[Written], list[str]]:
        """Return what the other ranks wrote, in rank order, and what went wrong, one sentence a rank."""
        found: dict[int, Written] = {}
        failed: dict[int, str] = {}
        missing = set(range(1, len(self.processes)))
        for given_up in self._waits(missing):
            gone = {rank for rank in missing if processes.is_gone(self.processes[rank])}
            present = reads.names_in(self.folder)  # listed after asking who is gone, so it holds all their files
            if not present:  # the folder is gone: a file of each rank was there
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder))
            for rank in sorted(missing):
                if f"rank-{rank}.json" in present:
                    content = json.loads(reads.content(self.folder / f"rank-{rank}.json"))
                    found[rank] = {part: _from_json(held) for part, held in content.get("parts", {}).items()}
                    if "error" in content:
                        failed[rank] = content["error"]
                elif f"rank-{rank}.failed" in present:
                    failed[rank] = "could not write its share, nor why: see what it logged"
                elif rank in gone:
                    failed[rank] = "its process ended before it had written its share"
                elif rank in given_up:
                    failed[rank] = f"did not write its share: {given_up[rank]}"
            missing -= {*found, *failed}
            if not missing:
                break
        return [found[rank] for rank in sorted(found)], [f"rank {rank}: {failed[rank]}" for rank in sorted(failed)]

    def _waits(self, missing: Collection[int]) -> Iterator[dict[int, str]]:
        """Wait longer and longer between the turns of a loop, and log it.

        Args:
            missing: the ranks that are waited for; the loop may remove some.

        Yields:
            Who of them is waited for no longer, and why.
        """
        begun, since, delay_s = time.monotonic(), time.strftime("%H:%M:%S"), _FIRST_DELAY_S
        looks_at, says_at = begun, begun + SAY_S
        seen: dict[int, tuple[int, float]] = {rank: (0, begun) for rank in missing}  # the last sign, and when it came
        while True:
            now = time.monotonic()
            if now >= looks_at:
                looks_at = now + processes.BEAT_S
                for rank in missing:
                    if (sign := self.seen_of(rank)) != seen[rank][0]:
                        seen[rank] = sign, now
            still = {rank: now - seen[rank][1] for rank in missing}
            if now >= says_at:
                says_at = now + SAY_AGAIN_S
                self._say(still, now - begun, since)
            lost = self.lost() if max(still.values(), default=0.0) > LOST_S else {}
            yield {
                rank: f"{lost[rank] + ', and ' if rank in lost else ''}it gave no sign for {seconds:.0f} s"
                for rank, seconds in still.items()
                if seconds > (LOST_S if rank in lost else LIMIT_S)
            }
            time.sleep(delay_s)
            delay_s = min(delay_s * 1.5, _LONGEST_DELAY_S)

    def _say(self, still: Mapping[int, float], waited_s: float, since: str) -> None:
        others = [
            f"rank {rank} (process {self.processes[rank].pid} on {self.processes[rank].host}; its last sign came "
            f"{seconds:.0f} s ago)"
            for rank, seconds in sorted(still.items())[:_MOST_NAMED]
        ] + ([f"{len(still) - _MOST_NAMED} more"] if len(still) > _MOST_NAMED else [])
        logger.warning(
            "%s: rank %d has waited %.0f s (since %s) for %s; the save fails %.0f s after the last sign, or %.0f s "
            "after it if the job has lost that rank",
            *(self.name, self.rank, waited_s, since, ", ".join(others), LIMIT_S, LOST_S),
        )


def _as_json(held: dict[str, FileRecord]) -> dict[str, Any]:
    return {
        name: [record.bytes, record.sha256, manifest.describe_sections(record.sections)]
        for name, record in held.items()
    }


def _from_json(held: dict[str, Any]) -> dict[str, FileRecord]:
    return {
        name: FileRecord(size, sha256, manifest.parse_sections(sections))
        for name, (size, sha256, sections) in held.items()
    }
