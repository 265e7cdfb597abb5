"""Judge from the notes of all ranks who waits where and for whom, and whether that is a hang."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tr_dist.hangs.notes import Note
from tr_dist.hangs.places import BACKWARD

_STATES = {
    "T": "its process is stopped (SIGSTOP)",
    "t": "a debugger has stopped its process",
    "D": "its process waits in the kernel, for a disk or a device",
    "X": "its process is gone",
    "Z": "its process is gone",
    "R": "its process runs, but not the thread that writes notes: code of a library may hold Python's lock",
    "S": "its process sleeps, and so does the thread that writes notes: code of a library may hold Python's lock",
}
GONE = ("X", "Z")
ELSEWHERE = "another machine"  # of a rank of which no note has come


@dataclass(frozen=True)
class Standing:
    """What is known about a rank now.

    Attributes:
        note: its last note.
        silent_s: seconds since that note.
        is_silent: whether that is longer than a note takes.
        state: state of its process as Linux's one letter; empty if it is on another machine, or unknown.
    """

    note: Note
    silent_s: float = 0.0
    is_silent: bool = False
    state: str = ""

    @property
    def idle_s(self) -> float:
        """Seconds since it last made progress."""
        return self.note.idle_s + self.silent_s

    @property
    def is_gone(self) -> bool:
        """Whether it has left, or its process has ended."""
        return bool(self.note.left) or self.state in GONE


class Table:
    """What is known about all ranks.

    Args:
        silence_s: seconds without a note after which a rank is silent.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._seen: dict[int, tuple[Note, float]] = {}

    def take(self, notes: Iterable[Note], now_s: float) -> None:
        """Add notes; one that is known already counts from when it came."""
        for note in notes:
            known = self._seen.get(note.rank)
            if known is None or known[0].beat != note.beat or known[0].left != note.left:
                self._seen[note.rank] = (note, now_s)

    def restart(self, now_s: float) -> None:
        """Count all silences from now: this process itself stood still."""
        self._seen = {rank: (note, now_s) for rank, (note, _) in self._seen.items()}

    def standings(self, now_s: float, states: dict[int, str]) -> list[Standing]:
        """Return what is known about each rank, in rank order; `states` are those of processes on this machine."""
        found = []
        for rank, (note, since_s) in sorted(self._seen.items()):
            silent_s, state = now_s - since_s, states.get(rank, "")
            found.append(Standing(note, silent_s, silent_s > self._silence_s or state == "T", state))
        return found


@dataclass(frozen=True)
class Limits:
    """When what is a hang.

    Attributes:
        hang_s: seconds without progress of all ranks.
        wait_s: seconds in one exchange, after which the backend would end the wait.
        lost_s: seconds that a rank waits for one that is gone.
        warn_s: seconds that a rank waits before that is said.
        ends_without_wait: whether a job is ended in which no rank waits for another.
    """

    hang_s: float
    wait_s: float
    lost_s: float
    warn_s: float
    ends_without_wait: bool


@dataclass(frozen=True)
class Finding:
    """What was found.

    Attributes:
        key: equal for the same finding, so that it is said once.
        text: what is wrong, for the user.
        ends: whether the job is to be ended.
    """

    key: str
    text: str
    ends: bool


def judge(ranks: Sequence[Standing], limits: Limits) -> Finding | None:
    """Return what is wrong, None if nothing is. Nothing is while a debugger holds a rank."""
    here = [each for each in ranks if not each.is_gone]
    if not here or any(each.note.is_debugged or each.state == "t" for each in here):
        return None
    waits = {each.note.rank: waits_for(each, ranks) for each in here}
    waiting = [each for each in here if waits[each.note.rank]]
    gone = {each.note.rank for each in ranks if each.is_gone}
    for each in waiting:
        if gone.intersection(waits[each.note.rank]) and each.idle_s >= limits.lost_s:
            lost = " and ".join(f"rank {rank}" for rank in sorted(gone.intersection(waits[each.note.rank])))
            return Finding("lost", f"rank {each.note.rank} waits for {lost}, which is gone", ends=True)
    idle_s = min(each.idle_s for each in here)
    if idle_s >= limits.hang_s and (waiting or any(each.note.phase for each in here)):
        ends = bool(waiting) or limits.ends_without_wait
        return Finding("hang", f"no rank has made progress for {idle_s:.0f} s", ends)
    for each in waiting:
        if each.idle_s >= limits.wait_s:
            return Finding("wait", f"rank {each.note.rank} has waited for {each.idle_s:.0f} s", ends=True)
    late = [each for each in waiting if each.idle_s >= limits.warn_s]
    if late:
        where = sorted({(each.note.phase, each.note.exchange) for each in here if not each.is_silent})
        key = f"late {where} {sorted(each.note.rank for each in here if each.is_silent)}"
        return Finding(key, f"rank {late[0].note.rank} has waited for {late[0].idle_s:.0f} s", ends=False)
    return None


def waits_for(rank: Standing, ranks: Sequence[Standing]) -> list[int]:
    """Return the ranks that a rank waits for in an exchange; none if it waits for no other.

    They are those that have started fewer exchanges of a group, that are gone or silent, or that are in another
    exchange of as many.
    """
    note = rank.note
    if rank.is_silent or rank.is_gone:
        return []
    others = [each for each in ranks if each.note.rank != note.rank]
    behind = {
        each.note.rank
        for each in others
        for group, count in note.counts.items()
        if each.note.counts.get(group, count) < count
    }
    if not note.exchange:
        return []
    behind |= {each.note.rank for each in others if each.is_gone or each.is_silent}
    if behind or note.exchange == BACKWARD:
        return sorted(behind)
    mine = (note.exchange, note.phase, note.where)
    elsewhere = {each.note.rank for each in others if (each.note.exchange, each.note.phase, each.note.where) != mine}
    return sorted(elsewhere)


def causes(ranks: Sequence[Standing]) -> list[int]:
    """Return the ranks that others wait for and that wait for nobody; if each waits for another, all of those."""
    waits = {each.note.rank: waits_for(each, ranks) for each in ranks}
    wanted = {rank for others in waits.values() for rank in others}
    return sorted(rank for rank in wanted if not waits.get(rank)) or sorted(wanted)


def describe(finding: Finding, ranks: Sequence[Standing]) -> str:
    """Return what is wrong: a line about the cause, and a line for each rank."""
    found = causes(ranks)
    by_rank = {each.note.rank: each for each in ranks}
    if not found:
        about = "; no rank waits for another in an exchange"
    elif all(waits_for(by_rank[rank], ranks) for rank in found):
        about = f"; rank {_placed(found, by_rank)} are in different exchanges, and each waits for the others"
    else:
        about = f"; the others wait for rank {_placed(found, by_rank)}"
    return "\n".join([finding.text + about, *(line(each, ranks) for each in _in_order(ranks, found))])


_MOST_LINES, _MOST_PLACES = 64, 4


def _placed(found: list[int], by_rank: Mapping[int, Standing]) -> str:
    """Return ranks with their coordinates in a mesh, if they are few."""
    if len(found) > _MOST_PLACES or not all(rank in by_rank and by_rank[rank].note.place for rank in found):
        return _listed(found)
    return ", ".join(f"{rank} ({by_rank[rank].note.place})" for rank in found)


def _in_order(ranks: Sequence[Standing], found: list[int]) -> list[Standing]:
    """Return the causes first, and of many ranks only some."""
    first = [each for each in ranks if each.note.rank in found]
    return [*first, *(each for each in ranks if each.note.rank not in found)][:_MOST_LINES]


def line(rank: Standing, ranks: Sequence[Standing]) -> str:
    """Return what is known about one rank."""
    note = rank.note
    step = "" if note.step < 0 else f"step {note.step}, "
    does = f"{step}{note.phase or 'outside of training'}"
    place = f"{note.place}; " if note.place else ""
    name = f"  rank {note.rank} ({place}process {note.pid} on {note.machine.partition('/')[0]})"
    if note.left:
        return f"{name}: left after {does}: {note.left}"
    if rank.state in GONE:
        return f"{name}: its process ended without a word; {rank.silent_s:.0f} s ago it was at {does}{_at(note)}"
    if rank.is_silent and note.machine == ELSEWHERE:
        return f"  rank {note.rank} (on {ELSEWHERE}): gave no sign for {rank.silent_s:.0f} s, since the watch began"
    if rank.is_silent:
        why = _STATES.get(rank.state, "it, its machine or the store is stopped or cut off")
        return f"{name}: gives no sign for {rank.silent_s:.0f} s: {why}; its last note is {does}{_at(note)}"
    others = waits_for(rank, ranks)
    if others:
        return f"{name}: {does}: has waited {rank.idle_s:.0f} s for rank {_listed(others)}{_at(note)}"
    return f"{name}: {does}: no progress for {rank.idle_s:.0f} s{_at(note)}"


def _at(note: Note) -> str:
    return "".join([f", in {note.exchange}" if note.exchange else "", f", in {note.where}" if note.where else ""])


def _listed(ranks: Sequence[int]) -> str:
    """Return numbers as `1, 3 to 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]} and {s[1]}" if len(s) == 2 else f"{s[0]} to {s[-1]}"
                     for s in spans)  # fmt: skip
