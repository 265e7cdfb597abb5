"""A name from outside is that of a file inside, on every system, or is refused; what is saved passes the same check."""

import re
from pathlib import Path, PureWindowsPath

import pytest
from ckpt_parts import listed, parts

from tr_ckpt import Checkpointer, CheckpointError, names, untrusted
from tr_ckpt.manifest import MANIFEST

INSIDE = (
    "a",
    "a/b/c.json",
    ".hidden",
    "..a",
    "a..",
    "a b",
    "con-1.json",
    "console",
    "com10",
    "com",
    "\u65e5\u672c",
    "ab:c",
)
OUTSIDE = (
    "", ".", "..", "../a", "a/..", "a/../b", "/a", "//a", "a//b", "a/", "./a", "a\\b", "\\a", "C:", "c:a", "C:/a",
    "a/d:b", "sub/../../checkpoint-20/model.json", "\\\\server\\share", "sub/com1.json", "\u2028x",
    "a\0", "a\nb", "\x1b[2J", "\x7f", "\x9b", "con", "NUL", "a/Aux.txt", "lpt\u00b9", "com1 .x", "CONIN$", "a.", "a ",
    "a./b",
    "\ud800", "\udc80", "a" * 256, "\u65e5" * 86, "a/" * 600 + "a", 7, None, b"a",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in INSIDE if not name.endswith(".")])
def test_a_name_of_a_file_inside_is_taken(name):
    assert untrusted.path_problem(name) == ""
    assert PureWindowsPath("C:/run", name).is_relative_to("C:/run")


@pytest.mark.parametrize("name", OUTSIDE, ids=lambda name: f"{name!a:.30}")
def test_a_name_of_anything_else_is_refused(name):
    assert untrusted.path_problem(name)
    assert untrusted.paths_problem(["a", name]).startswith(repr(name)[:200])


def test_two_names_of_one_file_are_refused():
    assert untrusted.paths_problem(["a", "b/c", "b/d"]) == ""
    for one, other in (("a", "A"), ("caf\u00e9", "cafe\u0301"), ("x/A", "X/a")):
        assert "one file on some systems" in untrusted.paths_problem([one, other])
    for one, other in (("a", "a/b"), ("a/b/c", "a"), ("A", "a/b")):
        assert "both as a file and as the folder" in untrusted.paths_problem([one, other])


@pytest.mark.parametrize("name", ["con", "nul.x", "a.", "x" * 240])
def test_a_part_is_not_saved_under_a_name_that_would_be_refused(name, tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(f"the part name {name!r} ")):
        Checkpointer(tmp_path).save(1, {name: parts()["model"]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made", [["aux.txt"], ["a/x."], ["A", "a"], ["back\\slash"], ["tab\tx"], ["\udc80"]])
def test_a_file_is_not_added_under_a_name_that_would_be_refused(made, tmp_path):
    def write_extra(folder):
        for name in made:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("")

    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(1))
    with pytest.raises(CheckpointError, match="write_extra made .*give it another name"):
        checkpointer.save(2, parts(2), write_extra=write_extra)
    assert listed(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("digits", ["9" * 19, "9" * 5000, "\u0663"])
def test_a_step_beyond_all_is_that_of_no_checkpoint(digits):
    assert names.step_of(f"checkpoint-{digits}", "checkpoint") is None


def test_a_checkpoint_is_not_saved_under_a_step_that_would_not_be_found(tmp_path):
    with pytest.raises(CheckpointError, match="is not a count of optimizer steps"):
        Checkpointer(tmp_path).save(10**18, parts())
    folder = Checkpointer(tmp_path).save(10**18 - 1, parts(3))
    assert (folder / MANIFEST).exists()
    assert Checkpointer(tmp_path).restore(parts()) == 10**18 - 1


def test_every_name_that_a_save_writes_passes(tmp_path):
    folder = Checkpointer(tmp_path).save(1, parts(1))
    assert untrusted.paths_problem(str(path.relative_to(folder)) for path in Path(folder).rglob("*")) == ""
