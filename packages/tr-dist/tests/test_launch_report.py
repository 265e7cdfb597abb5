"""What is said about a job that failed, and with which exit code it ends."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tr_dist.launching.agent import OtherLaunchers
from tr_dist.launching.report import Ending, describe, exit_code, first_cause, read_ending

LOST = "RuntimeError: [../pair.cc:534] Connection closed by peer [127.0.0.1]"


GONE = "RuntimeError: rank 1 has ended, and rank 0 waits for it; see its own output for the reason"


def raised(rank, message, time_s):
    return Ending(rank, 1, message, f"Traceback\n{message}\n", time_s)


def test_a_lost_connection_is_not_the_cause_even_if_it_came_first():
    own, lost = raised(1, "ValueError: bad", 2.0), raised(0, LOST, 1.0)
    assert first_cause([lost, own]) is own


def test_the_earliest_of_two_exceptions_is_the_cause():
    assert first_cause([raised(0, "ValueError: b", 2.0), raised(1, "ValueError: a", 1.5)]).rank == 1


def test_a_killed_rank_is_the_cause_of_lost_connections():
    assert first_cause([raised(0, LOST, 1.0), Ending(1, -9)]) == Ending(1, -9)


@pytest.mark.parametrize("lost", [LOST, GONE])
def test_a_rank_with_an_exit_code_of_its_own_is_the_cause_of_what_others_miss(lost):
    assert first_cause([raised(0, lost, 1.0), Ending(1, 5)]) == Ending(1, 5)


def test_a_rank_that_ended_with_0_is_the_cause_of_lost_connections():
    endings = [raised(0, LOST, 1.0), Ending(1, 0)]
    assert first_cause(endings) == Ending(1, 0)
    first, *others = describe(endings, world_size=2, nodes=1, logs={}).splitlines()
    assert first.startswith("rank 1 of 2 ended first, with exit code 0, and then rank 0 ended with exit code 1: ")
    assert "sys.exit ends one" in first
    assert LOST in "".join(others)


def test_a_rank_that_is_done_is_not_the_cause_of_an_error():
    done, own = Ending(0, 0), raised(1, "ValueError: mine", 2.0)
    assert first_cause([done, own]) is own
    assert first_cause([done, Ending(1, -9)]) == Ending(1, -9)
    assert "rank 0" not in describe([done, own], world_size=2, nodes=1, logs={})


def test_only_lost_connections_leave_the_earliest():
    endings = [raised(0, LOST, 2.0), raised(1, LOST, 1.0)]
    assert first_cause(endings).rank == 1
    text = describe(endings, world_size=4, nodes=2, logs={})
    assert "it lost its connection to a rank on another machine; that machine's output says why" in text


@pytest.mark.parametrize(("code", "shown"), [(0, 0), (7, 7), (-9, 137), (-15, 143), (None, 1)])
def test_a_signal_becomes_the_exit_code_that_a_shell_has(code, shown):
    assert exit_code(code) == shown


def test_the_report_begins_with_the_cause_and_its_traceback():
    text = describe([raised(0, LOST, 2.0), raised(1, "ValueError: bad", 1.0)], world_size=2, nodes=1, logs={})
    assert text.splitlines() == [
        "rank 1 of 2 failed first: it ended with exit code 1",
        "Traceback",
        "ValueError: bad",
        f"then rank 0 ended with exit code 1: {LOST}",
    ]


def test_what_all_ranks_raise_alike_is_said_once_from_the_first():
    wrong = [raised(rank, "ValueError: bad", 3.0 - rank) for rank in range(3)]
    text = describe([*wrong, raised(3, LOST, 5.0)], world_size=4, nodes=1, logs={})
    assert text.splitlines() == [
        "rank 0 of 4 failed first: it ended with exit code 1",
        "Traceback",
        "ValueError: bad",
        "the same on rank 1, 2",
        f"then rank 3 ended with exit code 1: {LOST}",
    ]


@pytest.mark.parametrize(
    ("number", "advice"),
    [(signal.SIGKILL, "out of memory"), (signal.SIGSEGV, "PYTHONFAULTHANDLER=1"), (signal.SIGHUP, "a request to stop")],
)
def test_a_signal_is_explained(number, advice):
    text = describe([Ending(0, -number)], world_size=2, nodes=1, logs={})
    assert f"was ended by {number.name}" in text
    assert advice in text


def test_without_a_traceback_the_end_of_the_log_is_shown(tmp_path):
    log = tmp_path / "rank_0.log"
    log.write_text("\n".join(f"line {number}" for number in range(50)))
    text = describe([Ending(0, 3)], world_size=2, nodes=1, logs={0: log})
    assert "line 49" in text
    assert "line 19" not in text


def test_a_note_that_was_cut_short_is_no_note(tmp_path):
    path = Path(tmp_path, "0.json")
    path.write_text(json.dumps({"message": "E: x", "traceback": "T", "time_s": 1.0}))
    assert read_ending(0, 1, path) == Ending(0, 1, "E: x", "T", 1.0)
    path.write_text('{"message": "E')
    assert read_ending(0, 1, path) == Ending(0, 1)


def test_a_hang_is_the_cause_though_the_watch_has_killed_a_rank():
    endings = [Ending(1, -9), Ending(0, 97), Ending(2, 97)]
    assert first_cause(endings) == Ending(0, 97)
    assert describe(endings, world_size=3, nodes=1, logs={}).startswith(
        "rank 0 of 3 failed first: it ended with exit code 97 because ranks hung, as the hang watch says above\n"
    )


# Launchers of several machines


def test_launchers_learn_how_another_has_failed():
    store = dist.HashStore()
    failed, other = (OtherLaunchers(lambda: store, "failed") for _ in range(2))
    failed.tell("machine 1: rank 3 of 4 failed first")
    deadline = time.monotonic() + 60
    while not other.failed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert other.failed == "machine 1: rank 3 of 4 failed first"
    for launchers in (failed, other):
        launchers.close()
        assert not launchers._thread.is_alive()


def test_a_launcher_goes_on_when_the_store_of_the_others_is_gone():
    def connect():
        raise dist.DistNetworkError("Connection reset by peer")

    launchers = OtherLaunchers(connect, "failed")
    launchers._thread.join(60)
    launchers.close()
    assert launchers.failed == ""
