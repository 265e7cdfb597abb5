"""What becomes of an earlier run's checkpoints, and the command that continues a run."""

import shlex
import sys
from types import SimpleNamespace

import pytest
from continuing import begin_in, checkpoints, continuing_command
from input_error import InputError

from tr_all import TrainingArguments


@pytest.fixture
def folder(tmp_path):
    for name in ("checkpoint-20", "checkpoint-100", "checkpoint-tmp", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    return tmp_path


def test_checkpoints_are_folders_with_a_step_in_ascending_order(folder):
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-20", "checkpoint-100"]
    assert checkpoints(folder / "nowhere") == []


def test_a_folder_with_checkpoints_is_refused_with_the_two_flags_named(folder):
    message = (
        r"holds 2 checkpoint.s. of an earlier run, the last one checkpoint-100; add --resume_from_checkpoint True "
    )
    with pytest.raises(InputError, match=f"{message}.*--overwrite_output_dir .*--output_dir"):
        begin_in(TrainingArguments(str(folder)))


def test_overwriting_removes_the_checkpoints_and_nothing_else(folder):
    begin_in(TrainingArguments(str(folder), overwrite_output_dir=True))
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-7", "checkpoint-tmp", "other"]


@pytest.mark.parametrize("resume", [True, "auto", "checkpoint-20"])
def test_resuming_keeps_the_checkpoints(folder, resume):
    begin_in(TrainingArguments(str(folder), resume_from_checkpoint=resume))
    assert len(checkpoints(folder)) == 2


def test_a_new_folder_is_accepted(tmp_path):
    begin_in(TrainingArguments(str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()


def test_resuming_where_there_is_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="--resume_from_checkpoint True: there is no checkpoint in"):
        begin_in(TrainingArguments(str(tmp_path), resume_from_checkpoint=True))


def test_resuming_and_overwriting_at_once_is_refused(folder):
    arguments = TrainingArguments(str(folder), resume_from_checkpoint=True, overwrite_output_dir=True)
    with pytest.raises(InputError, match="continues a run and --overwrite_output_dir throws it away; keep one"):
        begin_in(arguments)
    assert len(checkpoints(folder)) == 2


def command(argv, done=10, of=10, **arguments):
    state = SimpleNamespace(global_step=done, max_steps=of)
    return shlex.split(continuing_command(argv, "script.py", TrainingArguments("out", **arguments), state))[1:]


def test_a_finished_run_is_continued_for_as_long_again(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["--output_dir", "out", "--num_train_epochs", "1.5", "--do_train"]
    resumed = ["script.py", "--output_dir", "out", "--do_train", "--num_train_epochs", "3"]
    assert command(words, num_train_epochs=1.5) == [*resumed, "--resume_from_checkpoint", "True"]


def test_a_stopped_run_is_continued_to_its_end(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["--max-steps=40", "--output_dir", "with space"]
    resumed = ["script.py", "--output_dir", "with space", "--max_steps", "40", "--resume_from_checkpoint", "True"]
    assert command(words, done=10, of=40, max_steps=40) == resumed


@pytest.mark.parametrize(
    "flag",
    [["--overwrite_output_dir"], ["--overwrite-output-dir", "True"], ["--overwrite_output_dir", "--local-rank=0"]],
)
def test_flags_that_would_contradict_resuming_are_left_out(monkeypatch, tmp_path, flag):
    monkeypatch.chdir(tmp_path)
    words = [*flag, "--resume_from_checkpoint", "old", "--bf16"]
    resumed = ["script.py", "--bf16", "--num_train_epochs", "6", "--resume_from_checkpoint", "True"]
    assert command(words, overwrite_output_dir=True) == resumed


def test_overwriting_that_a_file_asks_for_is_turned_off(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command(["--config", "run.yaml"], overwrite_output_dir=True)[-2:] == ["--overwrite_output_dir", "False"]


def test_a_run_of_several_processes_is_continued_with_as_many(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    assert command([])[:6] == launched


def test_the_command_names_this_interpreter(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    state = SimpleNamespace(global_step=1, max_steps=1)
    text = continuing_command([], "script.py", TrainingArguments("out"), state)
    assert shlex.split(text)[0] == sys.executable
