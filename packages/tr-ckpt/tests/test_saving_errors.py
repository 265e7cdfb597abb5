"""Errors of the disk where a save only looks: in words too, and none hides what failed first."""

import errno
import os
from pathlib import Path

import pytest
from ckpt_parts import parts

from tr_ckpt import Checkpointer, CheckpointError, files, processes, rank_records, reads, staging
from tr_ckpt.rank_records import RankRecords


@pytest.fixture
def failing(monkeypatch):
    """Have a method of `Path` fail for paths whose name begins with `begins`, as often as is said."""

    def fail(method, begins, times=10**9):
        really, left = getattr(Path, method), [times]

        def failing(path, *arguments, **options):
            if path.name.startswith(begins) and left[0]:
                left[0] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return really(path, *arguments, **options)

        monkeypatch.setattr(Path, method, failing)

    return fail


def test_what_failed_first_is_raised_though_its_folder_cannot_be_looked_at(tmp_path, failing, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write", full)
    failing("exists", ".tmp-writing-")
    with pytest.raises(OSError, match="No space left on device"):
        Checkpointer(tmp_path).save(1, parts(1))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_that_is_damaged_while_it_is_saved_is_named_with_its_checkpoint(tmp_path, monkeypatch, asynchronous):
    really = files.write_file

    def damaged(path, *arguments):
        record = really(path, *arguments)
        if path.name == "model.safetensors":
            path.write_bytes(b"")
        return record

    monkeypatch.setattr(files, "write_file", damaged)
    checkpointer = Checkpointer(tmp_path, asynchronous=asynchronous)
    said = rf"checkpoint-1 was not saved in {tmp_path}: model.safetensors is not a valid safetensors file: "
    with pytest.raises(CheckpointError, match=said):  # noqa: PT012 - either may raise it
        checkpointer.save(1, parts(1))
        checkpointer.wait()


def test_a_folder_that_is_gone_is_discarded_in_silence(tmp_path, caplog):
    staging.discard(processes.temporary(tmp_path, "writing", "checkpoint-1"))
    assert caplog.records == []


def test_a_disk_that_does_not_answer_for_a_moment_does_not_end_the_wait_for_rank_0(tmp_path, failing):
    records = RankRecords("checkpoint-1", tmp_path / "records", 1)
    records.processes = [processes.this_process()]
    failing("exists", "records", times=3)
    records.wait_for_rank_0()  # the folder is gone: rank 0 is done


def test_records_that_cannot_be_listed_are_in_words_and_hide_nothing(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(reads, "DELAYS_S", (0.001,))
    monkeypatch.setattr(rank_records.os, "listdir", refuse)
    records = RankRecords("checkpoint-1", tmp_path, 0)
    records.processes = [processes.this_process()] * 2
    with pytest.raises(OSError, match="checkpoint-1 was not saved in .*Input/output error"):
        records.exchange(dict)

    def write():
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        records.exchange(write)
