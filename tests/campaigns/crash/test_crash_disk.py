"""The model of a disk loses what a disk may lose, and nothing else."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from crash_disk import Disk
from crash_operations import Event, Recorder
from disk import every_operation

from tr_ckpt.testing import operation

ROOT = Path("/disk")


def disk(*events):
    made = Disk(ROOT)
    for event in events:
        made.do(event)
    return made


def write_file(path, *blocks):
    descriptor = operation("create")(path)
    for block in blocks:
        operation("write")(descriptor, memoryview(block))
    operation("sync")(descriptor, path)
    os.close(descriptor)


def trees(made):
    return {frozenset(tree.items()) for tree in made.possible(0)}


def contents(made, name):
    return {dict(tree).get(name, "absent") for tree in trees(made)}


CREATE = Event("create", "/disk/a", inode=1)
WRITE = Event("write", inode=1, data=b"ab")
SYNC = Event("sync", inode=1)
SYNC_ROOT = Event("sync_folder", "/disk")


def test_what_was_written_and_not_synced_may_be_there_or_zeros_or_missing():
    assert contents(disk(CREATE, WRITE, SYNC_ROOT), "a") == {b"ab", b"\0\0", b""}


def test_what_was_synced_is_there():
    assert contents(disk(CREATE, WRITE, SYNC, SYNC_ROOT), "a") == {b"ab"}


def test_a_later_write_may_be_kept_and_an_earlier_one_lost():
    later = Event("write", inode=1, data=b"cd")
    found = contents(disk(CREATE, WRITE, later, SYNC_ROOT), "a")
    assert found == {b"abcd", b"\0\0cd", b"ab\0\0", b"\0\0\0\0", b"ab", b""}


def test_a_synced_file_whose_name_was_not_synced_may_be_missing_but_is_whole_if_it_is_there():
    assert contents(disk(CREATE, WRITE, SYNC), "a") == {"absent", b"ab"}


def test_a_rename_is_one_change():
    made = disk(CREATE, WRITE, SYNC, SYNC_ROOT, Event("rename", "/disk/a", "/disk/b"))
    assert trees(made) == {frozenset({("a", b"ab")}), frozenset({("b", b"ab")})}


def test_of_two_renames_the_first_may_be_lost():
    renames = Event("rename", "/disk/a", "/disk/b"), Event("rename", "/disk/b", "/disk/c")
    made = disk(CREATE, WRITE, SYNC, SYNC_ROOT, *renames)
    assert frozenset({("a", b"ab"), ("c", b"ab")}) in trees(made)


def test_a_removal_may_be_lost():
    assert contents(disk(CREATE, WRITE, SYNC, SYNC_ROOT, Event("remove_file", "/disk/a")), "a") == {"absent", b"ab"}


def test_a_link_is_a_second_name_of_the_same_content():
    made = disk(CREATE, WRITE, SYNC, SYNC_ROOT, Event("link", "/disk/a", "/disk/b"))
    assert contents(made, "b") == {"absent", b"ab"}
    assert contents(made, "a") == {b"ab"}


def test_what_is_in_a_folder_that_is_gone_for_good_does_not_count():
    inside = Event("create", "/disk/f/x", inode=2)
    made = disk(Event("make_folder", "/disk/f"), SYNC_ROOT, inside, Event("remove_folder", "/disk/f"), SYNC_ROOT)
    assert made.units() == []


def test_with_many_changes_the_extremes_are_tried():
    made = disk(*(Event("create", f"/disk/{n}", inode=n) for n in range(1, 11)))
    sizes = [len(tree) for tree in made.possible(0)]
    assert {0, 10, 1, 9} <= set(sizes)
    assert len(trees(made)) > 20


def test_a_disk_of_a_folder_holds_what_is_there_for_good(tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "x").write_bytes(b"1")
    assert Disk.of(tmp_path).units() == []
    assert trees(Disk.of(tmp_path)) == {frozenset({("f", None), ("f/x", b"1")})}


def test_recorded_operations_done_again_give_what_is_on_the_disk(tmp_path):
    recorder = Recorder(tmp_path)
    with every_operation(recorder):
        operation("make_folder")(tmp_path / "a")
        operation("make_folder")(tmp_path / "a" / "b")
        write_file(tmp_path / "a" / "b" / "x", b"12", b"3")
        operation("rename")(tmp_path / "a" / "b" / "x", tmp_path / "a" / "b" / "y")
        operation("link")(tmp_path / "a" / "b" / "y", tmp_path / "a" / "z")
        write_file(tmp_path / "gone", b"4")
        operation("remove_file")(tmp_path / "gone")
    made = Disk(tmp_path)
    for event in recorder.events:
        made.do(event)
    everything = made.tree(set(made.units()), zeros=True)
    assert everything == {"a": None, "a/b": None, "a/b/y": b"123", "a/z": b"123"}
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == set(everything)


def test_what_others_put_into_a_folder_being_written_is_recorded_as_not_synced(tmp_path):
    recorder = Recorder(tmp_path)
    folder = tmp_path / ".tmp-writing-x"
    with every_operation(recorder):
        operation("make_folder")(folder)
        (folder / "config.json").write_bytes(b"{}")
        with open(folder / "config.json", "rb") as file:
            operation("sync")(file.fileno(), folder / "config.json")
    assert [event.kind for event in recorder.events] == ["make_folder", "found_file", "sync"]
    assert all(event.site[0].endswith("test_crash_disk.py") for event in recorder.events[::2])
