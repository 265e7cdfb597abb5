"""Numbers that the ranks of one machine exchange through shared memory, and what happens where they cannot."""

import errno
import io
import os
import random
import signal
import time

import pytest
import torch.distributed as dist
from meetings import wait_for

from tr_dist import DDP, shared_page
from tr_dist.launching.report import Ending
from tr_dist.shared_page import SharedPage
from tr_dist.testing import run_ranks

LEAST, MOST = -(2**63), 2**63 - 1


def _values(rank, number):
    return [random.Random(f"{rank} {number} {index}").randint(LEAST, MOST) for index in range(7)]


def _many(steps):
    with DDP(use_cpu=True) as strategy:
        pauses, reads, results = random.Random(strategy.rank), [], []
        for number in range(steps):
            if pauses.random() < 0.02:
                time.sleep(0.002)
            reads.append(strategy.all_reduce_max(_values(strategy.rank, number)))
            while reads and (len(reads) > 6 or pauses.random() < 0.7):  # sometimes more are open than there is room for
                results.append(reads.pop(0)())
        results += [read() for read in reads]
        return results, isinstance(strategy._agreeing, SharedPage)


def test_every_exchange_gives_all_ranks_the_largest_values_however_late_each_comes():
    steps = 2000
    expected = [
        [max(of_ranks) for of_ranks in zip(*(_values(r, n) for r in range(3)), strict=True)] for n in range(steps)
    ]
    for results, has_page in run_ranks(_many, 3, steps):
        assert results == expected
        assert has_page


def _more_than_fit():
    with DDP(use_cpu=True) as strategy:
        return strategy.all_reduce_max([number * (-1) ** strategy.rank for number in range(40)])()


def test_more_numbers_than_a_slot_holds_are_exchanged():
    assert run_ranks(_more_than_fit, 2) == [list(range(40))] * 2


def _without(rank_without):
    if int(os.environ["RANK"]) == rank_without:
        shared_page._opened = shared_page._make = lambda *args: None
    with DDP(use_cpu=True) as strategy:
        return strategy._agreeing.__class__.__name__, strategy.all_reduce_max([strategy.rank])()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_share_no_memory_exchange_by_gloo(rank):
    assert run_ranks(_without, 2, rank) == [("ProcessGroup", [1])] * 2


def test_a_page_for_which_there_is_no_room_is_not_made(monkeypatch, tmp_path):
    class Full(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(shared_page, "_SHARED_FOLDER", tmp_path)
    monkeypatch.setattr(shared_page.os, "fdopen", lambda handle, *args, **options: Full(handle, "r+b"))
    assert shared_page._make(2) is None
    assert not list(tmp_path.iterdir())


def _ends(way, seen):
    strategy = DDP(use_cpu=True)
    strategy.all_reduce_max([1])()
    if strategy.rank == 1:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.close(failed=True)
        wait_for(seen)
        return
    try:
        strategy.all_reduce_max([1])()
    except RuntimeError as error:
        seen.write_text(str(error))
        strategy.close(failed=True)


def test_a_rank_that_left_is_not_waited_for(tmp_path):
    run_ranks(_ends, 2, "left", tmp_path / "seen")
    said = (tmp_path / "seen").read_text()
    assert said.startswith("rank 1 has ended, and rank 0 waits for it")
    assert Ending(0, 1, said, said).is_consequence


def test_a_rank_that_was_killed_is_not_waited_for(tmp_path):
    with pytest.raises(Exception, match="1"):
        run_ranks(_ends, 2, "killed", tmp_path / "seen")
    assert (tmp_path / "seen").read_text().startswith("rank 1 has ended")


def _late(timeout_s, seen):
    strategy = DDP(use_cpu=True)
    if strategy.rank == 1:
        wait_for(seen)
        strategy.close(failed=True)
        return
    strategy._agreeing._timeout_s = timeout_s  # the meeting before may take longer
    try:
        strategy.all_reduce_max([1])()
    except RuntimeError as error:
        seen.write_text(str(error))
        strategy.close(failed=True)


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_for_any_exchange(tmp_path):
    run_ranks(_late, 2, 2.0, tmp_path / "seen")
    assert (tmp_path / "seen").read_text().startswith("rank 0 waited 2 s for rank 1, which runs but did not come")


def _twice():
    pages = []
    for _ in range(2):
        with DDP(use_cpu=True) as strategy:
            pages.append(strategy.all_reduce_max([strategy.rank])())
    return pages, dist.is_initialized()


def test_a_later_group_of_the_same_processes_has_a_page_of_its_own():
    assert run_ranks(_twice, 2) == [([[1], [1]], False)] * 2


def _in(folder):
    shared_page._SHARED_FOLDER = folder
    with DDP(use_cpu=True) as strategy:
        strategy.gather_objects(None)
        return isinstance(strategy._agreeing, SharedPage), list(folder.iterdir())


def test_no_file_is_left(tmp_path):
    assert run_ranks(_in, 2, tmp_path) == [(True, [])] * 2
