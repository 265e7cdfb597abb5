"""`trainer ckpt prune` removes the right checkpoints, and asks before."""

import builtins
import os
import re
import shutil
import socket
import sys

import pytest
from ckpt_faults import forget_temporaries
from ckpt_parts import flip, foreign, save

from tr_ckpt import Checkpointer, files
from tr_ckpt.command import main


@pytest.fixture
def run(tmp_path):
    for step in (5, 10, 15, 20):
        save(tmp_path, step, best=10)
    return tmp_path


def steps(directory):
    return Checkpointer(directory).steps()


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--keep", "1"], [20]),
        (["--keep", "2"], [15, 20]),
        (["--keep", "9"], [5, 10, 15, 20]),
        (["--keep", "1", "--keep-best"], [10, 20]),
        (["--keep", "3", "--keep-best"], [10, 15, 20]),
        (["--keep", "1", "--keep-every", "10"], [10, 15, 20]),
        (["--keep", "1", "--keep-every", "15"], [15, 20]),
    ],
)
def test_what_is_asked_for_stays(run, words, kept, capsys):
    assert main(["prune", str(run), *words, "--yes"]) == 0
    assert steps(run) == kept
    assert ("stays, best" in capsys.readouterr().out) == ("--keep-best" in words)
    assert sorted(path.name for path in run.iterdir()) == sorted(f"checkpoint-{step}" for step in kept)


def test_it_shows_what_goes_and_what_that_frees(run, trainer_ckpt):
    sizes = {step: sum(path.stat().st_size for path in (run / f"checkpoint-{step}").iterdir()) for step in (5, 10)}
    heading, *rows, empty, total = trainer_ckpt("prune", run, "--keep", "2", "--dry-run").out.splitlines()
    assert heading.split() == ["checkpoint", "size"]
    assert [" ".join(row.split()[3:]) for row in rows] == ["goes", "goes", "stays", "stays, newest, verified"]
    assert empty == ""
    assert total == f"2 checkpoints to remove, {sum(sizes.values()) / 1000:.3g} kB to free"
    assert steps(run) == [5, 10, 15, 20]


def test_files_that_have_another_name_free_nothing(run, tmp_path, trainer_ckpt):
    """As those of a checkpoint that is being pushed: what is pushed stays whole."""
    pushing = tmp_path / ".tmp-pushing-checkpoint-5@elsewhere@1@ab"
    pushing.mkdir()
    for path in (run / "checkpoint-5").iterdir():
        os.link(path, pushing / path.name)
    assert "1 checkpoint to remove, 0 B to free" in trainer_ckpt("prune", run, "--keep", "3", "--yes").out
    assert steps(run) == [10, 15, 20]
    assert (pushing / "manifest.json").exists()


def test_with_nothing_to_remove_it_says_so_and_does_not_ask(run, trainer_ckpt):
    assert trainer_ckpt("prune", run, "--keep", "4").out.endswith("\nnothing to remove\n")


def test_the_newest_stays_and_not_the_last_step(run):
    save(run, 7)
    assert main(["prune", str(run), "--keep", "1", "--yes"]) == 0
    assert steps(run) == [7]


def test_when_the_newest_is_damaged_the_newest_valid_one_stays_and_the_damaged_too(run, trainer_ckpt):
    flip(run / "checkpoint-20" / "model.safetensors")
    output = trainer_ckpt("prune", run, "--keep", "1", "--yes")
    assert steps(run) == [15, 20]
    assert "checkpoint-20 is damaged and stays: model.safetensors was changed after it was written" in output.err
    assert re.search(r"^checkpoint-20 .* stays, damaged$", output.out, re.MULTILINE)
    assert re.search(r"^checkpoint-15 .* stays, newest, verified$", output.out, re.MULTILINE)


def test_damaged_and_foreign_ones_neither_count_nor_go(run, capsys):
    (run / "checkpoint-15" / "model.json").unlink()
    foreign(run, 1)
    assert main(["prune", str(run), "--keep", "2", "--yes"]) == 0
    assert steps(run) == [10, 20]
    assert (run / "checkpoint-15").is_dir()
    assert (run / "checkpoint-1").is_dir()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["stays,", "damaged"] in [row[-2:] for row in rows]
    assert ["stays,", "foreign"] in [row[-2:] for row in rows]


def test_without_a_valid_checkpoint_nothing_is_removed(tmp_path, trainer_ckpt):
    for step in (5, 10):
        flip(save(tmp_path, step) / "model.safetensors")
    assert trainer_ckpt("prune", tmp_path, "--keep", "1", "--yes", code=1).err.endswith(
        "nothing is removed: there is no valid checkpoint to keep\n"
    )
    assert steps(tmp_path) == [5, 10]


@pytest.mark.parametrize(
    ("answer", "kept"), [("y", [20]), ("YES ", [20]), ("", [5, 10, 15, 20]), ("n", [5, 10, 15, 20])]
)
def test_on_a_terminal_it_asks(run, answer, kept, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "input", lambda question: asked.append(question) or answer)
    assert main(["prune", str(run), "--keep", "1"]) == 0
    assert asked == ["remove 3? [y/N] "]
    assert steps(run) == kept
    assert ("nothing was removed" in capsys.readouterr().out) == (len(kept) > 1)


def test_an_answer_that_does_not_come_removes_nothing(run, capsys, monkeypatch):
    def no_answer(question):
        raise EOFError

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "input", no_answer)
    assert main(["prune", str(run), "--keep", "1"]) == 0
    assert steps(run) == [5, 10, 15, 20]


def test_without_a_terminal_it_wants_to_be_told(run, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert main(["prune", str(run), "--keep", "1"]) == 2
    expected = "trainer ckpt prune: nothing was removed: there is no terminal to ask on; give --yes\n"
    assert capsys.readouterr().err == expected
    assert steps(run) == [5, 10, 15, 20]


def test_one_that_cannot_be_removed_is_named_and_the_others_go(run, trainer_ckpt, monkeypatch):
    original = files.rename

    def rename(source, target):
        if source.name == "checkpoint-5":
            raise PermissionError(13, "Permission denied")
        original(source, target)

    monkeypatch.setattr(files, "rename", rename)
    assert (
        trainer_ckpt("prune", run, "--keep", "1", "--yes", code=1).err
        == "checkpoint-5 could not be removed: Permission denied\n"
    )
    assert steps(run) == [5, 20]


def test_a_best_that_is_not_known_cannot_be_kept(tmp_path, trainer_ckpt):
    for step in (5, 10):
        save(tmp_path, step)
    assert (
        "nothing was removed: checkpoint-10 knows of no best step, so --keep-best cannot"
        in trainer_ckpt("prune", tmp_path, "--keep", "1", "--keep-best", "--yes", code=2).err
    )
    assert steps(tmp_path) == [5, 10]


def test_one_checkpoint_is_no_folder_to_prune(run, capsys):
    assert main(["prune", str(run / "checkpoint-5"), "--keep", "1", "--yes"]) == 2
    expected = f"trainer ckpt prune: {run / 'checkpoint-5'} is one checkpoint; give the folder that it is in\n"
    assert capsys.readouterr().err == expected
    shutil.rmtree(run)
    assert main(["prune", str(run), "--keep", "1", "--yes"]) == 2


@pytest.mark.parametrize("count", ["0", "-1", "x", "1.5"])
def test_a_count_must_be_one(run, count, capsys):
    with pytest.raises(SystemExit) as left:
        main(["prune", str(run), "--keep", count])
    assert left.value.code == 2
    assert steps(run) == [5, 10, 15, 20]


def test_what_a_killed_removal_left_is_cleared_away_by_the_next(run, monkeypatch, trainer_ckpt):
    remove_file = files.remove_file

    def die(path):
        if path.parent.name.startswith(".tmp-removed"):
            raise KeyboardInterrupt
        remove_file(path)

    with monkeypatch.context() as killed:
        killed.setattr(files, "remove_file", die)
        assert main(["prune", str(run), "--keep", "1", "--yes"]) == 130
    assert [path.name.split("@")[0] for path in run.glob(".tmp-*")] == [".tmp-removed-checkpoint-5"]
    forget_temporaries()  # as in another process
    assert "1 that an earlier removal left half done" in trainer_ckpt("prune", run, "--keep", "9", "--dry-run").out
    assert len(list(run.glob(".tmp-*"))) == 1
    assert main(["prune", str(run), "--keep", "9", "--yes"]) == 0
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-10", "checkpoint-15", "checkpoint-20"]


def test_what_a_living_process_is_removing_is_left_to_it(run):
    busy = run / f".tmp-removed-checkpoint-1@{socket.gethostname()}@{os.getppid()}@0a1b2c3d"
    busy.mkdir()
    assert main(["prune", str(run), "--keep", "9", "--yes"]) == 0
    assert busy.is_dir()
