"""What rank 0 learns from the files that other ranks leave, without other processes."""

import json

import pytest

from tr_ckpt import SaveError, names, rank_records
from tr_ckpt.files import FileRecord
from tr_ckpt.rank_records import RankRecords


def records(folder, elsewhere=2):
    made = RankRecords("checkpoint-3", folder, 0)
    made.processes = [names.Process("elsewhere", 1)] * (1 + elsewhere)
    return made


def leave(folder, rank, content):
    (folder / f"rank-{rank}.json").write_text(json.dumps(content))


def test_what_all_wrote_comes_in_the_order_of_ranks(tmp_path):
    for rank in (2, 1):
        leave(tmp_path, rank, {"parts": {"model": {f"file-{rank}": [rank, "0" * 64, {}]}}})
    own = {"model": {"file-0": FileRecord(0, "0" * 64)}}
    found = records(tmp_path).exchange(lambda: own)
    assert found == [own, *({"model": {f"file-{rank}": FileRecord(rank, "0" * 64)}} for rank in (1, 2))]


def test_what_went_wrong_on_other_ranks_is_said_for_each(tmp_path):
    leave(tmp_path, 1, {"error": "OSError: no space"})
    (tmp_path / "rank-2.failed").write_text("")
    with pytest.raises(SaveError, match=r"checkpoint-3 was not saved: rank 1: OSError: no space; rank 2: could not "):
        records(tmp_path).exchange(dict)


def test_a_rank_that_is_silent_for_too_long_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_records, "LIMIT_S", 0.05)
    leave(tmp_path, 2, {"parts": {}})
    with pytest.raises(SaveError, match="not saved: rank 1: did not write its share within 0 s of rank 0's$"):
        records(tmp_path).exchange(dict)


def test_what_rank_0_could_not_write_is_said_after_all_others_are_done(tmp_path):
    for rank in (1, 2):
        leave(tmp_path, rank, {"error": "theirs"})

    def fails():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        records(tmp_path).exchange(fails)
