import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from meetings import wait_for

from tr_dist import DDP
from tr_dist.hangs import notes, watch
from tr_dist.hangs.findings import Limits, Standing, Table, causes, describe, judge, line, waits_for
from tr_dist.hangs.notes import Board, Link, Note
from tr_dist.hangs.places import exchange_counts, machine, own_place, own_stacks, place_of, process_state
from tr_dist.hangs.watch import HangWatch
from tr_dist.process_group import here
from tr_dist.testing import RankError, run_ranks

LIMITS = Limits(hang_s=60, wait_s=90, lost_s=30, warn_s=20, ends_without_wait=False)


def standing(rank, *, silent_s=0.0, state="", **facts):
    note = Note(rank, "here", 100 + rank, **{"step": 3, "phase": "compute", "where": "main at a.py:1", **facts})
    return Standing(note, silent_s, silent_s > 5, state)


def waiting(rank, **facts):
    return standing(rank, **{"exchange": "all_reduce", "counts": {"0": 8}, **facts})


def late(rank, **facts):
    return standing(rank, **{"counts": {"0": 7}, "where": "read at b.py:2", **facts})


# Who waits for whom


def test_a_rank_in_an_exchange_waits_for_those_that_have_started_fewer():
    ranks = [waiting(0), late(1), waiting(2)]
    assert [waits_for(each, ranks) for each in ranks] == [[1], [], [1]]
    assert causes(ranks) == [1]


def test_a_rank_outside_of_exchanges_waits_for_nobody():
    assert waits_for(late(0, counts={"0": 8}), [late(0, counts={"0": 8}), late(1)]) == []


def test_a_backward_pass_waits_only_where_another_rank_is_behind():
    computing = waiting(0, exchange="backward")
    assert waits_for(computing, [computing, late(1, counts={"0": 8})]) == []
    assert waits_for(computing, [computing, late(1)]) == [1]


def test_a_rank_waits_for_those_that_are_gone_or_give_no_sign():
    ranks = [waiting(0), waiting(1, left="it left the group"), waiting(2, silent_s=9), waiting(3)]
    assert waits_for(ranks[0], ranks) == [1, 2]


def test_ranks_in_different_exchanges_of_the_same_number_wait_for_each_other():
    ranks = [waiting(0, idle_s=70), waiting(1, idle_s=70, exchange="barrier", phase="evaluation")]
    assert causes(ranks) == [0, 1]
    finding = judge(ranks, LIMITS)
    assert "rank 0 and 1 are in different exchanges, and each waits for the others" in describe(finding, ranks)


def test_the_report_names_the_coordinates_of_a_rank_in_a_mesh():
    assert line(waiting(5, place="dp_shard 1, tp 1"), []).startswith(
        "  rank 5 (dp_shard 1, tp 1; process 105 on here):"
    )


@pytest.mark.parametrize(
    ("number", "said"), [(2, "wait for rank 1 (tp 1), 2 (tp 2)"), (4, "wait for rank 1 (tp 1), 2"), (5, "rank 1 to 5")]
)
def test_the_first_line_names_the_coordinates_of_a_few_causes(number, said):
    ranks = [
        waiting(0, idle_s=61, place="tp 0"),
        *(late(at, idle_s=61, place=f"tp {at}") for at in range(1, number + 1)),
    ]
    assert said in describe(judge(ranks, LIMITS), ranks).splitlines()[0]


def test_the_report_names_the_cause_first_with_step_phase_and_place():
    ranks = [waiting(0, idle_s=61), late(1, idle_s=62, phase="data"), *(waiting(rank, idle_s=61) for rank in (2, 3))]
    assert describe(judge(ranks, LIMITS), ranks).splitlines() == [
        "no rank has made progress for 61 s; the others wait for rank 1",
        "  rank 1 (process 101 on here): step 3, data: no progress for 62 s, in read at b.py:2",
        "  rank 0 (process 100 on here): step 3, compute: has waited 61 s for rank 1, in all_reduce, in main at a.py:1",
        "  rank 2 (process 102 on here): step 3, compute: has waited 61 s for rank 1, in all_reduce, in main at a.py:1",
        "  rank 3 (process 103 on here): step 3, compute: has waited 61 s for rank 1, in all_reduce, in main at a.py:1",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"silent_s": 9, "state": "T"},
            "gives no sign for 9 s: its process is stopped (SIGSTOP); its last note is step 3",
        ),
        ({"silent_s": 9, "state": "R"}, "code of a library may hold Python's lock"),
        ({"silent_s": 9}, "it, its machine or the store is stopped or cut off"),
        ({"silent_s": 1, "state": "X"}, "its process ended without a word; 1 s ago it was at step 3, compute"),
        ({"left": "ValueError: no"}, "left after step 3, compute: ValueError: no"),
        ({"step": -1, "phase": ""}, "outside of training: no progress for 0 s"),
    ],
)
def test_a_line_says_what_is_known_about_a_rank(changes, said):
    ranks = [waiting(0, idle_s=70), late(1, **changes)]
    assert said in describe(judge([waiting(0, idle_s=70), late(1, idle_s=70)], LIMITS), ranks)


# What is a hang


@pytest.mark.parametrize("seconds", [61, 1000])
def test_a_hang_is_no_progress_of_all_ranks_while_one_waits(seconds):
    finding = judge([waiting(0, idle_s=seconds), late(1, idle_s=seconds)], LIMITS)
    assert (finding.key, finding.ends) == ("hang", True)


def test_progress_of_one_rank_is_no_hang_until_the_backend_would_end_the_wait():
    evaluating = late(0, phase="evaluation", idle_s=1)
    assert not judge([evaluating, waiting(1, idle_s=89)], LIMITS).ends
    assert judge([evaluating, waiting(1, idle_s=91)], LIMITS).ends


def test_ranks_that_all_compute_are_ended_only_if_a_limit_was_set():
    ranks = [late(rank, counts={"0": 8}, idle_s=100) for rank in range(2)]
    assert not judge(ranks, LIMITS).ends
    assert judge(ranks, Limits(60, 90, 30, 20, ends_without_wait=True)).ends


def test_time_outside_of_training_and_of_exchanges_is_no_hang():
    assert judge([standing(rank, phase="", idle_s=9999) for rank in range(2)], LIMITS) is None


def test_a_wait_is_said_before_it_is_a_hang_and_once():
    first = judge([late(0, phase="evaluation", idle_s=21), waiting(1, idle_s=21)], LIMITS)
    second = judge([late(0, phase="evaluation", idle_s=41), waiting(1, idle_s=41)], LIMITS)
    assert not first.ends
    assert first.key == second.key
    assert judge([late(0, idle_s=19), waiting(1, idle_s=19)], LIMITS) is None


@pytest.mark.parametrize("changes", [{"left": "it left the group"}, {"state": "X"}, {"state": "Z"}])
def test_a_rank_that_waits_for_one_that_is_gone_is_ended_sooner(changes):
    finding = judge([waiting(0, idle_s=31), late(1, **changes)], LIMITS)
    assert (finding.text, finding.ends) == ("rank 0 waits for rank 1, which is gone", True)
    assert judge([late(0, counts={"0": 8}, idle_s=31), late(1, **changes)], LIMITS) is None


@pytest.mark.parametrize("changes", [{"is_debugged": True}, {"state": "t"}])
def test_a_rank_in_a_debugger_is_no_hang(changes):
    assert judge([waiting(0, idle_s=9999), late(1, idle_s=9999, **changes)], LIMITS) is None


def test_a_rank_of_another_machine_that_never_gave_a_sign_is_waited_for():
    made = HangWatch(1, 2, LIMITS)
    made._expect([0])
    ranks = [*made._table.standings(time.monotonic() + 40, {}), waiting(1, idle_s=40)]
    finding = judge(ranks, LIMITS)
    assert finding.text == "rank 1 has waited for 40 s"
    said = describe(finding, ranks)
    assert "; the others wait for rank 0\n  rank 0 (on another machine): gave no sign for 4" in said
    made._table.take([Note(0, "elsewhere", 5)], time.monotonic())  # its first note
    assert made._table.standings(time.monotonic(), {})[0].note.pid == 5


def test_a_watch_that_itself_stood_still_counts_from_when_it_runs_again():
    table = Table(silence_s=5)
    table.take([Note(0, "here", 1), Note(1, "here", 2)], 100.0)
    assert [each.is_silent for each in table.standings(106.0, {})] == [True, True]
    table.restart(106.0)
    table.take([Note(1, "here", 2)], 107.0)  # the same note is not a sign
    assert [each.silent_s for each in table.standings(108.0, {})] == [2.0, 2.0]
    table.take([Note(1, "here", 2, beat=1)], 108.0)
    assert [each.silent_s for each in table.standings(109.0, {})] == [3.0, 1.0]


def test_the_default_limit_comes_before_the_backends_own():
    default, chosen = watch.limits_of(None, 1800), watch.limits_of(60, 1800)
    assert (default.hang_s, default.wait_s, default.ends_without_wait) == (1620, 1620, False)
    assert (chosen.hang_s, chosen.wait_s, chosen.ends_without_wait) == (60, 1620, True)
    assert watch.limits_of(None, 5).lost_s <= 4.5


# Where a process is


def test_a_place_is_the_innermost_code_outside_torch_and_the_standard_library():
    found = []

    class Module(torch.nn.Module):
        def forward(self, x):
            sorted([1], key=lambda item: found.append(place_of(sys._getframe())))
            return x

    Module()(torch.ones(1))
    assert found[0].where.startswith("test_a_place_is_the_innermost_code_outside_torch_and_the_standard_library.Module")
    assert found[0].where.partition(" at ")[2].startswith(os.path.join("tests", "test_hangs.py") + ":")
    assert (found[0].exchange, found[0].is_loading) == ("", False)


def test_loading_data_is_seen():
    found = []

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            found.append(place_of(sys._getframe()))
            return index

    next(iter(torch.utils.data.DataLoader(Rows())))
    assert found[0].is_loading
    assert "__getitem__" in found[0].where


def test_a_debugger_is_seen():
    found = []
    exec(compile("found.append(place_of(sys._getframe()))", "/usr/lib/python3.11/pdb.py", "exec"))
    assert found[0].is_debugged
    assert not own_place().is_debugged


def look_until_in_exchange(seen, done):
    deadline = time.monotonic() + 60
    while not own_place().exchange and time.monotonic() < deadline:
        time.sleep(0.01)
    seen.append(own_place())
    done.touch()


def in_barrier(done):
    strategy = DDP(use_cpu=True)
    seen, before = [], exchange_counts()
    if strategy.rank == 0:
        thread = threading.Thread(target=look_until_in_exchange, args=(seen, done))
        thread.start()
        dist.all_gather_object([None, None], 1)
        thread.join()
    else:
        wait_for(done)
        dist.all_gather_object([None, None], 1)
    after = exchange_counts()
    strategy.close()
    return seen, {name: after[name] - before[name] for name in before}


def test_the_exchange_a_rank_is_in_is_seen_from_another_thread_and_exchanges_are_counted(tmp_path):
    (seen, counts), _ = run_ranks(in_barrier, 2, tmp_path / "seen")
    assert seen[0].exchange == "all_gather_object"
    assert seen[0].where.startswith("in_barrier at ")
    assert max(counts.values()) >= 1


def test_stacks_begin_with_the_main_thread():
    stacks = []
    thread = threading.Thread(target=lambda: stacks.append(own_stacks()))
    thread.start()
    thread.join()
    assert stacks[0].startswith("thread MainThread:\n  File ")
    assert "test_stacks_begin_with_the_main_thread" in stacks[0]


def test_the_state_of_a_process_is_read():
    state, born = process_state(os.getpid())
    assert state == "R"
    assert int(born) > 0
    assert process_state(2**22 + 1) == ("X", "")
    assert machine() == machine()


# Notes


def test_notes_are_replaced(tmp_path):
    board = Board(tmp_path / "board", 2)
    board.put(Note(1, "here", 7, beat=1))
    board.put(Note(1, "here", 7, beat=2))
    board.put(Note(0, "here", 8))
    assert [(note.rank, note.beat) for note in board.notes()] == [(0, 0), (1, 2)]


def test_all_that_opened_a_board_go_on_with_it_when_its_name_is_gone(tmp_path):
    boards = [Board(tmp_path / "board", 2) for _ in range(2)]
    for board in boards:
        board.hide()
    assert not list(tmp_path.iterdir())
    boards[0].put(Note(0, "here", 5, left="it left the group"))
    boards[0].close()
    assert [note.left for note in boards[1].notes()] == ["it left the group"]
    boards[1].close()


def test_after_the_start_only_the_notes_of_this_machine_are_read(tmp_path, monkeypatch):
    read, board = [], Board(tmp_path / "board", 1024)
    monkeypatch.setattr(Board, "_read", lambda self, place: read.append(place))
    board.notes()
    board.close_to([8, 9])
    board.notes()
    assert read == [*range(1024), 8, 9]


def test_a_note_that_is_being_replaced_is_left_out_and_one_too_long_is_shortened(tmp_path):
    board = Board(tmp_path / "board", 2)
    board.put(Note(0, "here", 5))
    board.put(Note(1, "here", 6, left="x" * notes._PLACE_BYTES))
    with open(tmp_path / "board", "r+b") as file:
        file.seek(60)
        file.write(b"?")
    assert [(note.rank, len(note.left)) for note in board.notes()] == [(1, 200)]
    board.put(Note(1, "here", 6, stacks='"\u20ac' * notes._PLACE_BYTES))
    assert [len(note.stacks) for note in board.notes()] == [notes._LEAST_TEXT]


def test_machines_exchange_their_notes_through_a_store():
    store = dist.HashStore()
    links = [Link(lambda: store, "a", ["b"], 0.01), Link(lambda: store, "b", ["a"], 0.01)]
    own = [Note(rank, f"machine {rank}", 5, verdict="a hang") for rank in range(2)]
    found = [[], []]
    deadline = time.monotonic() + 60
    while not all(found) and time.monotonic() < deadline:
        found = [link.exchange([note]) for link, note in zip(links, own, strict=True)]
        time.sleep(0.01)
    for link in links:
        link.stop()
    assert found == [[own[1]], [own[0]]]


# What is said while ranks wait


@pytest.mark.parametrize(
    ("limits", "ends", "silent"),
    [
        (LIMITS, "in 20 s, with exit code 97 (hang_timeout=60; it is 0.9 x ddp_timeout, as nothing else was set)", {}),
        (dataclasses.replace(LIMITS, ends_without_wait=True), "in 20 s, with exit code 97 (hang_timeout=60)", {}),
        (
            LIMITS,
            "in 20 s, with exit code 97, or when the kernel gives up a connection that is cut, after some 15 minutes "
            "(hang_timeout=60; it is 0.9 x ddp_timeout, as nothing else was set)",
            {"silent_s": 9},
        ),
    ],
)
def test_a_wait_is_said_again_each_minute_with_what_will_end_it_and_when(capsys, limits, ends, silent):
    made = HangWatch(0, 2, limits)
    idle_s = 40 - silent.get("silent_s", 0)
    ranks = [waiting(0, idle_s=40), late(1, idle_s=idle_s, **silent)]
    finding = judge(ranks, limits)
    made._act(None, finding, ranks)
    whole = capsys.readouterr().err
    assert whole.startswith("hang watch: rank 0 has waited for 40 s; the others wait for rank 1\n  rank 1 ")
    assert whole.endswith(f"\nif this stays so, the job ends {ends}\n")
    made._act(None, finding, ranks)
    assert capsys.readouterr().err == ""
    made._said_s -= 61
    made._act(None, finding, ranks)
    gist = (
        f"hang watch: rank 0 has waited for 40 s; the others wait for rank 1\nif this stays so, the job ends {ends}\n"
    )
    assert capsys.readouterr().err == gist


def test_of_many_situations_the_later_ones_are_said_each_minute_only(capsys):
    made, ranks = HangWatch(0, 2, LIMITS), [waiting(0, idle_s=40), late(1, idle_s=40)]
    for number in range(30):
        made._act(None, dataclasses.replace(judge(ranks, LIMITS), key=f"late {number}"), ranks)
    assert capsys.readouterr().err.count("hang watch: ") == 10


def test_a_thread_that_waits_for_a_store_is_known_until_it_ends(monkeypatch):
    monkeypatch.setattr(notes, "_LINK_END_S", 0.01)
    answers, made = threading.Event(), HangWatch(0, 1, LIMITS)
    made._link = Link(lambda: answers.wait(60) and dist.HashStore(), "a", [], 0.01)
    made._link.exchange([])
    assert not made.is_stuck  # it is still a member
    made.leave("it left the group")
    assert made.is_stuck
    answers.set()
    made._link._thread.join(60)
    assert not made.is_stuck


ENDS_BESIDE_A_THREAD = """
import atexit, sys
from types import SimpleNamespace
from tr_dist import process_group
atexit.register(print, "finalized")
process_group.here.leave_at_exit()
process_group.here.former_watch = SimpleNamespace(is_stuck=True)
"""


@pytest.mark.parametrize(
    ("last", "code", "said"), [("raise ArithmeticError('first')", 1, ""), ("sys.exit(3)", 3, "finalized\n")]
)
def test_a_failed_rank_does_not_finalize_beside_a_thread_in_the_code_of_torch(last, code, said):
    command = [sys.executable, "-c", ENDS_BESIDE_A_THREAD + last]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (code, said)
    assert ("ArithmeticError: first" in ended.stderr) == (code == 1)


# What a save in the background asks


NOBODY = 2**22 + 1  # no process has this number


def watch_of(*found, silent_s=0.0):
    """Return the watch of rank 0, which has had these notes."""
    made = HangWatch(0, 1 + len(found), LIMITS)
    made._table.take([made._note, *found], time.monotonic() - silent_s)
    return made


@pytest.mark.parametrize(
    ("note", "silent_s", "said"),
    [
        (Note(1, "elsewhere", 5), 10, None),
        (Note(1, "elsewhere", 5), 3600, "the hang watch has had no note of it for 36"),
        (Note(1, "elsewhere", 5, left="it left the group"), 3600, None),  # it may be writing
        (Note(1, "elsewhere", 5, left=watch._ENDED), 0, "its process has ended"),
        (Note(1, machine(), NOBODY), 0, "its process has ended"),
    ],
)
def test_a_rank_is_lost_that_is_silent_or_whose_process_has_ended(note, silent_s, said):
    lost = watch_of(note, silent_s=silent_s).lost()
    assert list(lost) == ([] if said is None else [1])
    assert lost.get(1, "").startswith(said or "")


def test_after_a_failed_exchange_the_ranks_of_other_machines_are_lost():
    made = watch_of(Note(1, "elsewhere", 5), Note(2, machine(), os.getpid()), silent_s=3600)
    made.leave("it failed", failed=True, error=RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    assert made.lost() == {1: "an exchange with the ranks of other machines has failed"}
    other = watch_of(Note(1, "elsewhere", 5), silent_s=3600)
    other.leave("it failed", failed=True, error=ValueError("of its own"))
    assert other.lost() == {}


def test_other_machines_hear_of_a_process_that_ended_without_a_word(tmp_path):
    made, sent = watch_of(), []
    made._more, board = None, Board(tmp_path / "board", 2)
    board.put(Note(1, machine(), NOBODY))

    class Sending:
        def exchange(self, notes):
            sent.extend(notes)
            return []

    made._link = Sending()
    made._tick(board)
    made._tick(board)  # by now it knows the process
    assert [(note.rank, note.left) for note in sent[-2:]] == [(0, ""), (1, "its process ended without a word")]
    board.close()


def test_a_group_without_a_watch_has_lost_nobody():
    with DDP(use_cpu=True) as strategy:
        assert strategy.lost_ranks() == {}


# Ranks


def trains(limit_s, sleeps_s, folder):
    with DDP(use_cpu=True, hang_timeout_s=limit_s) as strategy, strategy.watching(lambda: (5, "compute", 0), folder):
        here.watch[1]._table._silence_s = 60  # on a busy machine a thread may get no turn for seconds
        if strategy.rank == 1:
            time.sleep(sleeps_s)
        return strategy.gather_objects(strategy.rank)


@pytest.fixture
def both_end(monkeypatch):
    """Let each rank end by itself, however long that takes on a busy machine."""
    monkeypatch.setattr("tr_dist.testing.ranks._GRACE_S", 60.0)


@pytest.mark.usefixtures("both_end")
def test_a_rank_that_hangs_ends_all_with_a_code_of_its_own_and_a_report(tmp_path):
    with pytest.raises(RankError, match="rank 0 died with exit code 97, rank 1 died with exit code 97"):
        run_ranks(trains, 2, 3, 600, str(tmp_path))
    [report] = tmp_path.glob("hang-*.txt")
    text = report.read_text()
    assert "the others wait for rank 1\n" in text
    assert re.search(r"step 5, compute: no progress for \d+ s, in trains at ", text)
    assert "--- rank 0\nthread MainThread:\n" in text
    assert "--- rank 1\nthread MainThread:\n" in text


def test_two_reports_of_one_second_are_two_files(tmp_path, monkeypatch):
    monkeypatch.setattr(watch.time, "strftime", lambda form: "hang-20260101-000000")
    paths = [watch._write_report(tmp_path, text) for text in "abc"]
    assert [(path.name, path.read_text()) for path in paths] == [
        ("hang-20260101-000000.txt", "a"), ("hang-20260101-000000-2.txt", "b"), ("hang-20260101-000000-3.txt", "c"),
    ]  # fmt: skip


def test_ranks_that_make_progress_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert run_ranks(trains, 2, 60, 0, str(tmp_path)) == [[0, 1], [0, 1]]
    assert not list(tmp_path.glob("*hang*"))


def dies(folder):
    strategy = DDP(use_cpu=True, hang_timeout_s=30)
    Path(folder, str(strategy.rank)).touch()
    for rank in range(2):
        wait_for(Path(folder, str(rank)))  # or it dies in the other's start
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("both_end")
def test_ranks_that_are_killed_at_once_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(RankError, match="rank 0 died .*rank 1 died"):
        run_ranks(dies, 2, str(tmp_path))
    assert not list(tmp_path.glob("*hang*"))


def fails_while_the_other_dies(text, folder):
    """Fail on rank 0; rank 1 dies meanwhile if that can be the cause, and after it otherwise."""
    fails, has_failed = Path(folder, "fails"), Path(folder, "has failed")
    watch._DYING_S = 60.0  # on a busy machine its end may take long
    with open(f"{folder}/said", "a") as said, contextlib.redirect_stderr(said):
        strategy = DDP(use_cpu=True, hang_timeout_s=30)
        if strategy.rank == 1:
            wait_for(fails if "gloo" in text else has_failed)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            with strategy, strategy.watching(lambda: (5, "compute", 0), folder):
                fails.touch()
                raise RuntimeError(text)
        finally:
            has_failed.touch()


@pytest.mark.parametrize(
    ("text", "said"), [("gloo: connection reset by peer", "others were gone\n  rank 1 "), ("of one's own", "")]
)
def test_a_rank_that_fails_before_its_peer_is_gone_waits_to_say_so(text, said, tmp_path):
    with pytest.raises((RankError, RuntimeError), match=rf"rank 1 died|{text}"):
        run_ranks(fails_while_the_other_dies, 2, text, str(tmp_path))
    found = (tmp_path / "said").read_text()
    assert said in found if said else not found


def watched(seconds):
    strategy = DDP(use_cpu=True, hang_timeout_s=seconds)
    names = [thread.name for thread in threading.enumerate()]
    strategy.close()
    return "hang watch" in names


def test_a_limit_of_0_starts_no_watch():
    assert run_ranks(watched, 2, 0) == [False, False]
    assert run_ranks(watched, 2, 60) == [True, True]
    assert not watched(60)  # one process waits for no other


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match=r"hang_timeout_s=-1 is negative; give seconds, or 0"):
        DDP(use_cpu=True, hang_timeout_s=-1)


def test_a_process_that_left_is_not_sent_the_signal_for_stacks_which_would_end_it():
    made = HangWatch(0, 2, LIMITS)
    silent = {"silent_s": 40, "state": "S", "takes_signal": True}
    with subprocess.Popen(["sleep", "60"]) as process:
        rank = standing(1, **silent)
        left = dataclasses.replace(rank, note=dataclasses.replace(rank.note, pid=process.pid, left="after train()"))
        assert not made._signal_the_silent([left])
        member = dataclasses.replace(rank, note=dataclasses.replace(left.note, left=""))
        assert process.poll() is None
        assert made._signal_the_silent([member])
        assert process.wait(30) == -watch._STACKS_SIGNAL


STARTS_A_THREAD = """
import gc, threading
from tr_dist.hangs.places import own_place

class Starts:
    def __init__(self):
        self.me = self

    def __del__(self):  # as the end of a loader's workers does
        threading.Thread(target=int).start()

own_place()
for number in range(1, 40):
    gc.disable()
    stop = threading.Event()
    others = [threading.Thread(target=stop.wait) for _ in range(30)]
    for other in others:
        other.start()
    gc.collect()
    Starts()
    gc.set_threshold(number)
    gc.enable()
    own_place()
    assert gc.isenabled()
    gc.set_threshold(700)
    stop.set()
gc.collect()
print("looked")
"""


def test_a_collection_of_garbage_that_starts_a_thread_does_not_hang_who_looks_where_threads_are():
    command = [sys.executable, "-c", STARTS_A_THREAD]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "looked\n", ended.stderr
