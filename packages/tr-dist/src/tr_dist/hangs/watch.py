"""Watch that the ranks of a job make progress, in a thread of each, and end the job if they do not.

The thread reads numbers that the training loop keeps anyway, and looks at the main thread's stack, once in a while. It
takes part in no exchange.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tr_dist.hangs import HANG_EXIT_CODE
from tr_dist.hangs.findings import ELSEWHERE, GONE, Finding, Limits, Standing, Table, describe, judge, line, waits_for
from tr_dist.hangs.notes import Board, Link, Note
from tr_dist.hangs.places import child_numbers, exchange_counts, machine, own_place, own_stacks, process_state
from tr_log import slow_work
from tr_log.line_file import create_unique
from tr_log.streams import flush_streams, write_text

Progress = Callable[[], tuple[int, str, int]]
"""Returns completed steps, phase and any number that changes as the phase goes on. It is called from another thread."""

# The backend's own wait begins with the exchange and ends at its limit, which must not come first.
_SHARE_OF_TIMEOUT = 0.9
_LOST_S = 30.0  # a backend mostly notices a peer that is gone, and then says why
_WARN_S = 30.0
_STACKS_S = 3.0  # for the others to write their stacks
_HANDLER_S = 1.0  # for the handler of a signal to write them
_END_S = 10.0  # for who reports to do so
_NO_STACKS = "it cannot give its stacks; where a signal still reaches it, they are in its own output"
_ENDED = "its process ended without a word"  # what the others of a machine say of it to other machines
_MOST_WARNINGS = 10
_SAY_AGAIN_S = 60.0
_MOST_GONE = 3  # the first of them is the cause
_DYING_S = 2.0  # that a process which gloo aborts takes to write its last words; its peers fail before it is gone


def limits_of(hang_s: float | None, timeout_s: float) -> Limits:
    """Return the limits for a setting of `hang_timeout`, None for the default, and the group's timeout."""
    limit_s = _SHARE_OF_TIMEOUT * timeout_s if hang_s is None else hang_s
    return Limits(
        hang_s=limit_s,
        wait_s=min(limit_s, _SHARE_OF_TIMEOUT * timeout_s) if hang_s is None else _SHARE_OF_TIMEOUT * timeout_s,
        lost_s=min(_LOST_S, limit_s),
        warn_s=min(_WARN_S, limit_s / 3),
        ends_without_wait=hang_s is not None,
    )


class HangWatch:
    """One rank's watch. `start` is collective; nothing after it is.

    Args:
        rank: number of this process among all.
        world_size: number of processes.
        limits: when what is a hang.
    """

    def __init__(self, rank: int, world_size: int, limits: Limits) -> None:
        self.rank, self.world_size, self.limits = rank, world_size, limits
        self._interval_s = min(5.0, max(0.2, limits.hang_s / 15))
        self._table = Table(silence_s=max(3.0, 3 * self._interval_s))
        self._note = Note(rank, machine(), os.getpid(), born=process_state(os.getpid())[1])
        self._progress: Progress | None = None
        self._folder: str | None = None
        self._moved: tuple[Any, float] = (None, time.monotonic())
        self._failed_at: Note | None = None
        self._lost_a_peer = False
        self._ticked_s = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._said_s = 0.0
        self._board: Board | None = None
        self._link: Link | None = None
        self._enabled = self._takes_signal = False
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)

    @property
    def is_stuck(self) -> bool:
        """Whether this rank has left, and a thread in torch's code still waits for a store that does not answer."""
        return self._stop.is_set() and self._link is not None and self._link.is_running

    def start(self, gather: Callable[[Any], list[Any]], more: Callable[[], int] | None = None) -> None:
        """Meet the other watches, by three exchanges, and begin. Collective.

        Args:
            gather: returns the value of every rank, in rank order.
            more: returns how many exchanges this rank has started outside of torch's groups.
        """
        self._more, slow_work.measure = more, self._counts
        store = _store_itself()
        name = f"tr-hangs-{gather(secrets.token_hex(8))[0]}"
        file = getattr(store, "path", None)  # ranks that meet through a file can share another beside it
        # Each machine has its own: one that several open over a network would be read from their caches.
        path = f"{file or os.path.join(tempfile.gettempdir(), 'meet')}-{name}-{zlib.crc32(self._note.machine.encode())}"
        with contextlib.suppress(OSError):  # without a place for notes there is no watch
            self._board = Board(Path(path), self.world_size)
            self._write_stacks_on_signal()
            self._board.put(self._note)
        gather(None)  # all have written a note
        here = [note.rank for note in self._board.notes()] if self._board is not None else []
        keys = gather(min(here, default=self.rank))
        if self._board is None or not here:
            return
        self._board.close_to(here)  # a job of many machines has many ranks elsewhere
        self._board.hide()
        if len(here) < self.world_size and isinstance(store, dist.TCPStore):
            others = [f"{name}/{key}" for key in sorted(set(keys)) if key != min(here)]
            host, port = store.host, store.port
            self._link = Link(lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False),
                              f"{name}/{min(here)}", others, self._interval_s)  # fmt: skip
            self._expect(set(range(self.world_size)).difference(here))
        self._thread.start()

    def _expect(self, elsewhere: Iterable[int]) -> None:
        """Count the silence of ranks on other machines from now: the network may be cut before a note of them comes."""
        self._table.take([Note(rank, ELSEWHERE, 0, beat=-1) for rank in elsewhere], time.monotonic())

    @contextmanager
    def following(self, progress: Progress, folder: str, place: str = "") -> Iterator[None]:
        """Take steps and phases from a training loop in a block; reports are written to `folder`, and name `place`."""
        with self._lock:
            self._note = replace(self._note, place=place)
        outer = self._progress, self._folder
        self._progress, self._folder = progress, os.path.abspath(folder)
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._failed_at = self._own_note(time.monotonic())  # before the phase is forgotten
                self._lost_a_peer = _is_of_a_peer(error)
            raise
        finally:
            with self._lock:
                self._note = self._own_note(time.monotonic())  # its step is still true
            self._progress, self._folder = outer

    def lost(self) -> dict[int, str]:
        """Return the ranks of which the job has lost sight, and how that is known; once this one has left, fewer."""
        with self._lock:
            found = {}
            for each in self._standings(time.monotonic()):
                if each.state in GONE or each.note.left == _ENDED:
                    found[each.note.rank] = "its process has ended"
                elif each.note.rank == self.rank or each.note.left:
                    continue
                elif not self._stop.is_set() and each.silent_s > self.limits.lost_s:
                    found[each.note.rank] = f"the hang watch has had no note of it for {each.silent_s:.0f} s"
                elif self._lost_a_peer and each.note.machine != self._note.machine:
                    found[each.note.rank] = "an exchange with the ranks of other machines has failed"
            return found

    def leave(self, why: str, *, failed: bool = False, error: BaseException | None = None) -> None:
        """Let the others know that this rank leaves and why, and stop; a failed one says which others are gone."""
        self._lost_a_peer = self._lost_a_peer or _is_of_a_peer(error)
        if os.getpid() != self._note.pid:
            return  # a fork of this process ends, and the rank goes on
        self._stop.set()
        if self._link is not None:
            self._link.stop()
        if self._board is None:
            return
        with self._lock:
            if self._note.left:
                return
            note = self._own_note(time.monotonic())
            if failed and self._failed_at is not None:
                note = replace(self._failed_at, beat=note.beat)
            self._note = replace(note, left=why)
            self._board.put(self._note)
            if failed:
                self._say_who_is_gone(self._board)
            if self._enabled:
                faulthandler.disable()
            if self._takes_signal:
                faulthandler.unregister(_STACKS_SIGNAL)
            self._board.close()

    def _run(self) -> None:
        assert self._board is not None
        while not self._stop.wait(self._interval_s):
            with self._lock:
                if self._stop.is_set():
                    return
                self._tick(self._board)

    def _tick(self, board: Board) -> None:
        now_s = time.monotonic()
        if now_s - self._ticked_s > 5 * self._interval_s + 2:
            self._moved = (self._moved[0], now_s)  # this process was stopped: what it knows is old
            self._table.restart(now_s)
        self._ticked_s = now_s
        self._note = self._own_note(now_s)
        ranks = self._meet(board)
        if verdict := next((each.note.verdict for each in ranks if each.note.verdict), ""):
            self._wait_and_end(board, verdict)
        elif _is_first(self.rank, ranks):
            self._act(board, judge(ranks, self.limits), ranks)

    def _meet(self, board: Board) -> list[Standing]:
        """Show this rank's note, and return what is known of all. The first of a machine asks the other machines."""
        board.put(self._note)
        notes, now_s = board.notes(), time.monotonic()
        self._table.take(notes, now_s)
        ranks, beside = self._standings(now_s), {note.rank for note in notes}
        if self._link is not None and _is_first(self.rank, [each for each in ranks if each.note.rank in beside]):
            dead = [each.note.rank for each in ranks if each.state in GONE]
            sent = [replace(n, left=n.left or _ENDED) if n.rank in dead else n for n in notes]
            self._table.take(self._link.exchange(sent), now_s)
            ranks = self._standings(now_s)
        return ranks

    def _show(self, board: Board, **facts: Any) -> list[Standing]:
        """Change this rank's note, and meet the others."""
        self._note = replace(self._note, beat=self._note.beat + 1, **facts)
        return self._meet(board)

    def _standings(self, now_s: float) -> list[Standing]:
        known = self._table.standings(now_s, {})
        states = {each.note.rank: _state(each.note) for each in known if each.note.machine == self._note.machine}
        return self._table.standings(now_s, states)

    def _own_note(self, now_s: float) -> Note:
        """Return what this rank does now."""
        step, phase, position = self._note.step, "", 0
        if self._progress is not None:
            with contextlib.suppress(Exception):  # code of a loop that begins or ends
                step, phase, position = self._progress()
        waiting = slow_work.current
        place, counts = own_place(), self._counts() if waiting is None else waiting.before
        progress = (step, phase, position, counts, None if waiting is None else waiting.operations)
        if progress != self._moved[0]:
            self._moved = (progress, now_s)
        return replace(
            self._note,
            beat=self._note.beat + 1,
            idle_s=now_s - self._moved[1],
            step=step,
            phase="data" if phase == "compute" and place.is_loading else phase,
            exchange=place.exchange,
            where=place.where,
            counts=counts,
            is_debugged=place.is_debugged,
            children=child_numbers(),
        )

    def _counts(self) -> dict[str, int]:
        return exchange_counts() | ({} if self._more is None else {"of a machine": self._more()})

    def _act(self, board: Board, finding: Finding | None, ranks: list[Standing]) -> None:
        if finding is None:
            return
        if not finding.ends:
            self._warn(finding, ranks)
            return
        report = describe(finding, ranks)
        awaited = {each.note.rank for each in ranks if not each.is_silent and not each.is_gone}
        if self._signal_the_silent(ranks):
            time.sleep(_HANDLER_S)
        ranks = self._show(board, verdict=finding.text, stacks=own_stacks())
        deadline_s = time.monotonic() + _STACKS_S + 2 * self._interval_s * (1 if self._link is None else 3)
        while time.monotonic() < deadline_s and any(not r.note.stacks for r in ranks if r.note.rank in awaited):
            time.sleep(0.05)
            ranks = self._meet(board)
        stacks = "\n".join(f"--- rank {r.note.rank}\n{r.note.stacks or _NO_STACKS}\n" for r in ranks)
        self._report(f"{report}\nall processes end with exit code {HANG_EXIT_CODE}", stacks)
        self._show(board, is_reported=True)
        if self._link is not None:
            time.sleep(2 * self._interval_s)  # for the other machines to hear of it
        self._end(board, ranks)

    def _warn(self, finding: Finding, ranks: list[Standing]) -> None:
        """Say what does not end the job: a new situation with all ranks, and each minute that ranks wait its gist."""
        now_s = time.monotonic()
        is_new = finding.key not in self._said and len(self._said) < _MOST_WARNINGS
        if not is_new and (finding.key == "hang" or now_s - self._said_s < _SAY_AGAIN_S):
            return
        self._said_s = now_s
        report = describe(finding, ranks)
        if is_new:
            self._said.add(finding.key)
        else:
            report = report.partition("\n")[0]
        if finding.key == "hang":
            self._report(f"{report}\nthe job goes on: no rank waits for another", own_stacks())
        else:
            write_text(sys.stderr, f"hang watch: {report}\n{self._what_follows(ranks)}\n")

    def _what_follows(self, ranks: list[Standing]) -> str:
        limits, here = self.limits, [each for each in ranks if not each.is_gone]
        waited_s = max((each.idle_s for each in here if waits_for(each, ranks)), default=0.0)
        left_s = min(limits.hang_s - min(each.idle_s for each in here), limits.wait_s - waited_s)
        what = "" if limits.ends_without_wait else "; it is 0.9 x ddp_timeout, as nothing else was set"
        cut = (
            ", or when the kernel gives up a connection that is cut, after some 15 minutes"
            if any(each.is_silent and not each.state for each in here)
            else ""
        )
        return (
            f"if this stays so, the job ends in {max(0.0, left_s):.0f} s, with exit code {HANG_EXIT_CODE}{cut} "
            f"(hang_timeout={limits.hang_s:.0f}{what})"
        )

    def _wait_and_end(self, board: Board, verdict: str) -> None:
        """Give this rank's stacks to the rank that reports, and end when it has done so."""
        ranks = self._show(board, verdict=verdict, stacks=own_stacks())
        deadline_s = time.monotonic() + _END_S + 4 * self._interval_s
        while not any(each.note.is_reported for each in ranks) and time.monotonic() < deadline_s:
            time.sleep(0.05)
            ranks = self._meet(board)
        self._end(board, self._show(board, is_reported=True))

    def _end(self, board: Board, ranks: list[Standing]) -> None:
        """End this process and its children, and those on this machine that cannot end themselves."""
        for each in ranks:
            is_here = each.note.machine == self._note.machine and each.note.rank != self.rank
            if is_here and each.is_silent and not each.is_gone:
                _kill([each.note.pid, *each.note.children])
        self._note = replace(self._note, left="hang")
        board.put(self._note)
        board.close()
        _kill(child_numbers())
        flush_streams()
        os._exit(HANG_EXIT_CODE)

    def _report(self, report: str, stacks: str) -> None:
        """Print a report, and write it with the stacks to a file."""
        where = ""
        if self._folder is not None:
            try:
                path = _write_report(Path(self._folder), f"{report}\n\n{stacks}")
                where = f"\nthis and the stacks are in {path}"
            except OSError as error:
                where = f"\nthis could not be written to {self._folder}: {error}"
        write_text(sys.stderr, f"hang watch: {report}\n\n{stacks}\n{where}\n")

    def _say_who_is_gone(self, board: Board) -> None:
        """Say which neighbours had left or died before this rank failed."""
        deadline_s = time.monotonic() + (_DYING_S if self._lost_a_peer else 0)
        while True:
            now_s = time.monotonic()
            self._table.take(board.notes(), now_s)
            ranks = self._standings(now_s)
            gone = sorted((each for each in ranks if each.is_gone and each.note.rank != self.rank), key=_since)
            if gone or now_s >= deadline_s:
                break
            time.sleep(0.05)
        if gone:
            lines = "\n".join(line(each, ranks) for each in gone[:_MOST_GONE])
            write_text(sys.stderr, f"hang watch: when rank {self.rank} failed, others were gone\n{lines}\n")

    def _write_stacks_on_signal(self) -> None:
        """Let a signal write this process's stacks to its stderr, also while other code holds Python's lock."""
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
                faulthandler.enable()  # gloo aborts a process whose peer is in another exchange
                self._enabled = True
        if _STACKS_SIGNAL and signal.getsignal(_STACKS_SIGNAL) == signal.SIG_DFL:
            with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
                faulthandler.register(_STACKS_SIGNAL)
                self._takes_signal = True
        self._note = replace(self._note, takes_signal=self._takes_signal)

    def _signal_the_silent(self, ranks: list[Standing]) -> bool:
        """Have silent processes of this machine write their stacks. Returns whether there are such."""
        silent = [
            each.note for each in ranks if each.is_silent and not each.note.left and each.state in ("R", "S", "D")
        ]
        asked = [note for note in silent if note.takes_signal]
        for note in asked:
            with contextlib.suppress(OSError):
                os.kill(note.pid, _STACKS_SIGNAL)
        return bool(asked)


_STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 11 if hasattr(signal, "SIGRTMIN") else 0


def _write_report(folder: Path, text: str) -> Path:
    """Write a report to a file of its own: two machines may report at one time."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = time.strftime("hang-%Y%m%d-%H%M%S")
    path = create_unique(folder, lambda tries: f"{stem}-{tries + 1}.txt" if tries else f"{stem}.txt")
    path.write_text(text, "utf-8")
    return path


def _is_of_a_peer(error: BaseException | None) -> bool:
    """Whether an error is one of an exchange, in which a peer may be gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _is_first(rank: int, ranks: list[Standing]) -> bool:
    """Whether no rank with a lower number is there to report."""
    return not any(each.note.rank < rank and not each.is_silent and not each.is_gone for each in ranks)


def _since(rank: Standing) -> float:
    """Return a key that puts first who has been silent longest."""
    return -rank.silent_s


def _state(note: Note) -> str:
    """Return the state of a process on this machine; a number that another process has got by now is gone."""
    state, born = process_state(note.pid)
    return "X" if born and note.born and born != note.born else state


def _kill(numbers: list[int]) -> None:
    for number in numbers:
        with contextlib.suppress(OSError):
            os.kill(number, getattr(signal, "SIGKILL", signal.SIGTERM))


def _store_itself() -> Any:
    """Return the store of the default group, from inside its prefixes."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
