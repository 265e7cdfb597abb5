"""Several processes that save and restore together."""

import logging
import signal
import threading
import time
from pathlib import Path

import ckpt_workers
import pytest
import torch
from ckpt_parts import listed, number_of, parts, restored
from ckpt_workers import exit_codes, run

from tr_ckpt import Checkpointer, CheckpointError, RNGState, SaveError, discovery, files, ranks
from tr_ckpt.errors import Damage
from tr_ckpt.ranks import Failure, Ranks
from tr_ckpt.restoring import Answer


def test_two_ranks_save_restore_and_fail_together(tmp_path):
    run(2, ckpt_workers.save_and_restore, str(tmp_path / "run"))
    kept = {path.name for path in (tmp_path / "run" / "checkpoint-3").iterdir()}
    assert {"rng-0.json", "rng-0.safetensors", "rng-1.json", "rng-1.safetensors", "model.json"} <= kept

    # One process goes on from what two saved: its own random state and everything else.
    into = parts()
    assert Checkpointer(tmp_path / "run").restore({**into, "rng": RNGState()}) == 2
    assert number_of(into) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_failure_leaves_no_rank_waiting_in_a_state_that_all_make_together(tmp_path):
    run(2, ckpt_workers.fail_before_a_state_that_all_make, str(tmp_path / "run"))  # or they wait for each other


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_disk_that_is_slower_than_an_exchange_may_be_ends_no_save_and_no_restore(asynchronous, tmp_path):
    run(2, ckpt_workers.save_to_a_slow_disk, str(tmp_path / "run"), asynchronous)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_while_it_writes_is_noticed_and_nothing_is_lost(killed, tmp_path):
    codes = exit_codes(ckpt_workers.one_is_killed_while_it_writes, str(tmp_path / "run"), killed)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 0
    assert restored(tmp_path / "run") == (1, 10)


def test_a_save_that_is_given_up_writes_nothing_more(tmp_path):
    given_up = files.Unsynced()
    given_up.give_up()
    with pytest.raises(OSError, match="the save was given up"):
        files.write_file(tmp_path / "file", [b"content"], unsynced=given_up)
    assert (tmp_path / "file").read_bytes() == b""


def as_rank(rank, world_size, others):
    """Stand in for the others: `others` are what they answer, exchange by exchange."""
    answers = iter(others)

    def gather_objects(value):
        return next(answers)(value)

    return {"rank": rank, "world_size": world_size, "gather_objects": gather_objects}


def test_a_rank_without_saved_random_state_keeps_its_own_and_says_so(tmp_path, caplog):
    Checkpointer(tmp_path).save(1, {**parts(10), "rng": RNGState()})
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    # Rank 1 of 2 restores what one process saved; rank 0 answers what it would.
    candidates = discovery.find(tmp_path, "checkpoint")
    exchanges = [
        lambda _: [(candidates, None), (None, None)],
        lambda mine: [mine, mine],  # what was saved in shards
        lambda mine: [mine, mine],
        lambda mine: [mine, mine],
    ]
    into = parts()
    with caplog.at_level(logging.WARNING):
        step = Checkpointer(tmp_path, **as_rank(1, 2, exchanges)).restore({**into, "rng": RNGState()})
    assert step == 1
    assert number_of(into) == 10
    assert "rng of rank 1 was not saved (1 processes saved, 2 restore); it stays unchanged" in caplog.text
    assert torch.equal(torch.rand(3), expected)


def test_a_rank_that_does_not_see_the_folder_names_the_remedy(tmp_path):
    elsewhere = tmp_path / "not-shared"
    exchanges = [lambda mine: [((elsewhere, None), None), mine], lambda mine: [(None, None), mine]]
    with pytest.raises(OSError, match=r"rank 1 does not see .*not-shared.*one shared file system"):
        Checkpointer(tmp_path, **as_rank(1, 2, exchanges)).save(1, parts(1))


def test_a_failure_elsewhere_is_an_error_here(tmp_path):
    exchanges = [lambda mine: [mine, (None, None)], lambda mine: [mine, (None, Failure("OSError: disk full"))]]
    with pytest.raises(SaveError, match="checkpoint-1 was not saved: rank 1: OSError: disk full"):
        Checkpointer(tmp_path, **as_rank(0, 2, exchanges)).save(1, parts(1))
    assert listed(tmp_path) == []


class Meeting:
    """Two ranks that are threads of this process, and how often they have exchanged values."""

    def __init__(self):
        self.count = 0
        self._barrier = threading.Barrier(2)
        self._values = [None, None]

    def gather(self, rank):
        def gather_objects(value):
            self._values[rank] = value
            self._barrier.wait(60)
            values = list(self._values)
            self.count += rank
            self._barrier.wait(60)
            return values

        return gather_objects

    def run(self, work):
        """Return what `work` returned or raised on each rank, given its `Ranks`."""
        found = [None, None]

        def one(rank):
            try:
                found[rank] = work(rank, {"rank": rank, "world_size": 2, "gather_objects": self.gather(rank)})
            except Exception as error:
                found[rank] = error
                self._barrier.abort() if isinstance(error, threading.BrokenBarrierError) else None

        threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return found

    def go_on(self, times=3):
        """Wait, in the work of a rank, until the ranks have exchanged values a few times more."""
        end, deadline_s = self.count + times, time.monotonic() + 30
        while self.count < end:
            assert time.monotonic() < deadline_s, "the other rank waits in one exchange for the end of this work"
            time.sleep(0.001)


@pytest.fixture
def meeting(monkeypatch):
    monkeypatch.setattr(ranks.slow_work, "HEAR_EVERY_S", 0.01)
    return Meeting()


def test_ranks_hear_of_each_other_while_one_works_for_long(meeting):
    def work(rank, given):
        return Ranks(**given).apart("nothing was done", lambda: (meeting.go_on() if rank == 0 else None, rank))

    assert meeting.run(work) == [[(None, 0), (None, 1)]] * 2


def test_what_fails_apart_is_told_to_all(meeting):
    def fail(rank):
        if rank == 1:
            meeting.go_on()
            raise OSError("disk full")

    first, second = meeting.run(lambda rank, given: Ranks(**given).apart("nothing was done", lambda: fail(rank)))
    assert (type(first), str(first)) == (SaveError, "nothing was done: rank 1: OSError: disk full")
    assert (type(second), str(second)) == (OSError, "disk full")


@pytest.fixture
def slow_reads(meeting, monkeypatch):
    """Reading a checkpoint back takes longer than any exchange."""
    damages = discovery.damages

    def slow(folder, described, wanted):
        if wanted:
            meeting.go_on()
        return damages(folder, described, wanted)

    return lambda: monkeypatch.setattr(discovery, "damages", slow)


def test_no_exchange_lasts_as_long_as_the_reading_of_a_restore(tmp_path, meeting, slow_reads):
    Checkpointer(tmp_path).save(1, parts(10))
    slow_reads()
    assert meeting.run(lambda rank, given: Checkpointer(tmp_path, **given).restore(parts())) == [1, 1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_exchange_lasts_as_long_as_reading_back_what_was_saved(tmp_path, meeting, slow_reads, asynchronous):
    def save(rank, given):
        keeper = Checkpointer(tmp_path, keep_last=1, asynchronous=asynchronous, **given)
        keeper.save(1, parts(10))
        keeper.save(2, parts(20))
        keeper.save(3, parts(30))
        keeper.close()
        return keeper.steps()

    slow_reads()
    assert meeting.run(save) == [[3], [3]]


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError("no text")


def test_an_error_without_a_text_is_heard_of_by_the_other_ranks():
    def fail():
        raise UnprintableError

    heard = []
    ranks = Ranks(0, 2, lambda value: heard.append(value) or [value, (None, None)])
    with pytest.raises(UnprintableError):
        ranks.together("nothing was done", fail)
    assert heard == [(None, Failure("UnprintableError, whose text cannot be shown"))]


def test_several_ranks_need_a_way_to_exchange_values(tmp_path):
    with pytest.raises(ValueError, match="2 processes save together, but gather_objects is None; give a function"):
        Checkpointer(tmp_path, rank=0, world_size=2)


def test_a_rank_outside_the_world_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rank 2 of 2 processes does not exist; ranks count from 0"):
        Checkpointer(tmp_path, rank=2, world_size=2, gather_objects=lambda value: [value, value])


MISSING = Damage("model-shard-1.safetensors", "content", "model-shard-1.safetensors is missing")


def test_what_only_another_rank_finds_damaged_is_refused_here(tmp_path):
    Checkpointer(tmp_path).save(1, parts(10))
    exchanges = [
        lambda mine: [mine, mine],
        lambda mine: [mine, mine],  # what was saved in shards
        lambda mine: [mine, (Answer(damages=(MISSING,)), None)],
    ]
    into = parts()
    with pytest.raises(CheckpointError, match=r"checkpoint-1: model-shard-1.safetensors is missing"):
        Checkpointer(tmp_path, **as_rank(0, 2, exchanges)).restore(into, tmp_path / "checkpoint-1")
    assert number_of(into) == 0
