"""What rank 0 learns from the files that other ranks leave, without other processes."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest

from tr_ckpt import Checkpointer, SaveError, processes, rank_records
from tr_ckpt.files import FileRecord
from tr_ckpt.rank_records import RankRecords


def records(folder, elsewhere=2):
    made = RankRecords("checkpoint-3", folder, 0)
    made.processes = [processes.Process("elsewhere", 1)] * (1 + elsewhere)
    return made


def leave(folder, rank, content):
    (folder / f"rank-{rank}.json").write_text(json.dumps(content))


def test_what_all_wrote_comes_in_the_order_of_ranks(tmp_path):
    for rank in (2, 1):
        leave(tmp_path, rank, {"parts": {"model": {f"file-{rank}": [rank, "0" * 64, {}]}}})
    own = {"model": {"file-0": FileRecord(0, "0" * 64)}}
    found = records(tmp_path).exchange(lambda: own)
    assert found == [own, *({"model": {f"file-{rank}": FileRecord(rank, "0" * 64)}} for rank in (1, 2))]


def test_a_machine_of_one_process_waits_for_none_of_its_own(tmp_path):
    """As with save_on_each_node, where other machines save too."""
    made = RankRecords.make(tmp_path, "checkpoint-3", 1)
    made.processes = [processes.this_process()]
    assert made.exchange(dict) == [{}]


def test_what_went_wrong_on_other_ranks_is_said_for_each(tmp_path):
    leave(tmp_path, 1, {"error": "OSError: no space"})
    (tmp_path / "rank-2.failed").write_text("")
    with pytest.raises(SaveError, match=r"checkpoint-3 was not saved: rank 1: OSError: no space; rank 2: could not "):
        records(tmp_path).exchange(dict)


def test_a_rank_that_is_silent_for_too_long_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_records, "LIMIT_S", 0.05)
    leave(tmp_path, 2, {"parts": {}})
    with pytest.raises(SaveError, match=r"not saved: rank 1: did not write its share: it gave no sign for \d+ s$"):
        records(tmp_path).exchange(dict)


def test_what_rank_0_could_not_write_is_said_after_all_others_are_done(tmp_path):
    for rank in (1, 2):
        leave(tmp_path, rank, {"error": "theirs"})

    def fails():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        records(tmp_path).exchange(fails)


class Clock:
    """Time that passes only in sleeps, in which other ranks do something."""

    def __init__(self, monkeypatch, meanwhile):
        self.now, self._meanwhile = 0.0, meanwhile
        monkeypatch.setattr(rank_records, "time", self)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self._meanwhile(self.now)

    def strftime(self, form):
        return "12:00:00"


def write_until(end_s, file, then):
    """Return what another rank does: it gives a sign every 15 seconds, and something else at the end."""

    def meanwhile(now_s):
        if now_s >= end_s:
            then()
        else:
            file.touch()
            os.utime(file, (now_s // 15, now_s // 15))

    return meanwhile


def test_a_rank_that_writes_for_longer_than_the_limit_is_waited_for_and_that_is_said_each_minute(
    tmp_path, monkeypatch, caplog
):
    leave(tmp_path, 2, {"parts": {}})
    over = write_until(4000, tmp_path / "rank-1.writing", lambda: leave(tmp_path, 1, {"parts": {}}))
    Clock(monkeypatch, over)
    assert records(tmp_path).exchange(dict) == [{}, {}, {}]
    said = [record.getMessage() for record in caplog.records]
    assert 60 <= len(said) <= 67
    assert said[0].startswith(
        "checkpoint-3: rank 0 has waited 30 s (since 12:00:00) for rank 1 (process 1 on elsewhere; "
    )
    assert "last sign came " in said[0]
    assert said[0].endswith("the save fails 1800 s after the last sign, or 75 s after it if the job has lost that rank")


def test_a_rank_that_the_job_has_lost_is_waited_for_while_it_writes(tmp_path, monkeypatch):
    leave(tmp_path, 2, {"parts": {}})
    clock = Clock(monkeypatch, write_until(400, tmp_path / "rank-1.writing", lambda: None))
    made = records(tmp_path)
    made.lost = lambda: {1: "an exchange with it failed"}
    with pytest.raises(SaveError, match="rank 1: did not write its share: an exchange with it failed, and it gave no "):
        made.exchange(dict)
    assert 450 < clock.now < 520


def test_a_rank_whose_share_is_written_waits_for_rank_0_as_long_as_that_saves(tmp_path, monkeypatch):
    folder = tmp_path / "records"
    folder.mkdir()
    made = records(folder)
    made.rank = 1
    clock = Clock(monkeypatch, write_until(4000, folder / "rank-0.writing", lambda: shutil.rmtree(folder)))
    made.wait_for_rank_0()
    assert clock.now >= 4000


def test_a_rank_0_that_gives_no_sign_is_given_up(tmp_path, monkeypatch):
    made = records(tmp_path)
    made.rank = 1
    Clock(monkeypatch, lambda now_s: None)
    with pytest.raises(SaveError, match=r"not saved: rank 0 did not finish: it gave no sign for 180\d s$"):
        made.wait_for_rank_0()


def test_a_rank_that_saves_gives_signs(tmp_path):
    made = RankRecords.make(tmp_path, "checkpoint-3", 1)

    def shows():
        os.utime(made.folder / "rank-0.writing", (1, 1))
        processes.show_life()  # as a thread does every 15 seconds
        return made.seen_of(0) != 10**9

    assert not shows()
    with made.giving_signs():
        assert shows()
        assert processes._beating.is_alive()
    assert not shows()
    assert made.seen_of(5) == 0


def test_a_save_in_the_background_asks_the_strategy_whom_the_job_has_lost(tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path), save_total_limit=None)
    strategy = SimpleNamespace(rank=0, world_size=2, local_rank=0, gather_objects=lambda value: [value, value])
    assert Checkpointer.from_arguments(args, strategy)._ranks.lost() == {}
    strategy.lost_ranks = lambda: {1: "its process has ended"}
    assert Checkpointer.from_arguments(args, strategy)._ranks.lost() == {1: "its process has ended"}
