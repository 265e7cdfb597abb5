"""`trainer ckpt` lists and verifies."""

import re

import pytest
from ckpt_parts import parts

from tr_ckpt import Checkpointer, command
from tr_ckpt.command import main


@pytest.fixture
def run(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for step in (9, 10):
        checkpointer.save(step, parts(step))
    return checkpointer


def test_ls_lists_every_checkpoint_in_order(run, capsys):
    assert main(["ls", str(run.directory)]) == 0
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split() == ["checkpoint", "size", "ranks", "saved", "at", "(UTC)", "parts", "condition"]
    assert first.split()[0] == "checkpoint-9"
    assert second.split()[0] == "checkpoint-10"
    assert first.endswith("extra model  complete")
    assert re.search(r" B  1      20\d\d-\d\d-\d\d \d\d:\d\d:\d\d  ", first)


def test_verify_reads_what_ls_does_not(run, capsys):
    path = run.path(10) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["ls", str(run.directory)]) == 0
    assert main(["verify", str(run.directory)]) == 1
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("verified")
    assert second.endswith("model.safetensors was changed after it was written: its SHA-256 is another")


def test_a_missing_file_shows_in_ls(run, capsys):
    (run.path(9) / "model.json").unlink()
    assert main(["ls", str(run.directory)]) == 1
    assert "model.json is missing" in capsys.readouterr().out


def test_one_checkpoint_can_be_verified_under_any_name(run, capsys):
    run.path(9).rename(run.directory / "best")
    assert main(["verify", str(run.directory / "best")]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("best ")


def test_a_checkpoint_without_a_manifest_is_listed_as_such(run, capsys):
    (run.directory / "checkpoint-11").mkdir()
    assert main(["ls", str(run.directory)]) == 1
    assert "manifest.json is missing, so it is incomplete or was written by" in capsys.readouterr().out


def test_a_folder_without_checkpoints_is_an_error(tmp_path, capsys):
    assert main(["ls", str(tmp_path)]) == 1
    expected = f"no checkpoint in {tmp_path}: it holds neither a manifest.json nor a folder checkpoint-<step>\n"
    assert capsys.readouterr().err == expected


def test_the_prefix_can_be_given(tmp_path, capsys):
    Checkpointer(tmp_path, prefix="epoch").save(1, parts(1))
    assert main(["ls", str(tmp_path), "--prefix", "epoch"]) == 0
    assert "epoch-1" in capsys.readouterr().out


def test_help_explains_the_actions(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "trainer ckpt" in text
    assert "verify" in text
    assert "read every byte" in text


@pytest.mark.parametrize("arguments", [[], ["list", "."], ["ls"], ["ls", ".", "--pref", "x"]])
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (45_678, "45.7 kB"), (999_999, "1000 kB"), (2.5e12, "2.5 TB")],
)
def test_sizes_are_readable(size, shown):
    assert command._size(size) == shown
